"""Imitation and training on dumps: which data, in which order."""
