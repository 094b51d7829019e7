"""The training program behind pretrain_gpt.py; `megatron.core` beside it in the namespace is megatron-core's."""
