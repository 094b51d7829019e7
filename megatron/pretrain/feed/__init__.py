"""What steps work on: microbatches, and the plan by which they run."""
