"""Checkpoints: folders, tensors, optimizer state, agreement between ranks."""
