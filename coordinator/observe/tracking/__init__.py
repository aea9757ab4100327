"""Trackers whose libraries may block, each in a process of its own: W&B, MLflow, trackio."""
