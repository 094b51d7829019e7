"""Core attention: kernels, stored keys and values, documents, and rows that context-parallel ranks share."""
