"""Measured and simulated comparisons; `python -m benchmarks` lists them."""
