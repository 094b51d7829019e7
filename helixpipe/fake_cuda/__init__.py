"""A CUDA device that computes nothing."""
