"""Cost models, the times of ops and the sizes of tensors: by hand, from a model on named hardware, or from a profile."""
