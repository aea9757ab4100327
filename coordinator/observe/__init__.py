"""What a user sees of a run: records, run directory, trackers, progress in the terminal, report."""
