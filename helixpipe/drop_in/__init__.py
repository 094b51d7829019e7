"""The engine in place of megatron-core's forward_backward_func."""
