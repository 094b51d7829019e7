"""Inference with a trained model: text generation, and perplexity by the distance from a document's beginning."""
