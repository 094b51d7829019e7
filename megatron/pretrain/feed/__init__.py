"""Prepares the work of each step: microbatches, and the plan by which they run."""
