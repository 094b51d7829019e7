"""Cost models, that is op times and tensor sizes: by hand, from a model on named hardware, or from a profile."""
