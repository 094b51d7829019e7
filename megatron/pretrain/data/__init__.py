"""Tokenizers, indexed datasets, samplers."""
