"""The coordinator's desk: what people, scripts and Prometheus may see of a run, and what they may change in it."""
