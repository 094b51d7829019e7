"""Choices of what is kept, recomputed or offloaded, so that a program fits the memory."""
