"""Ours beside TRL's ``GRPOTrainer``, and our vLLM engine beside a bare one; see ``__main__``."""
