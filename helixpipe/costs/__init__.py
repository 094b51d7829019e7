"""What ops take and tensors weigh: by hand, from a model on named hardware, or from a profile."""
