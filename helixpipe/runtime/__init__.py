"""A lowered program run with tensors, autograd and torch.distributed."""
