"""What tests (and benchmarks) of several areas need."""
