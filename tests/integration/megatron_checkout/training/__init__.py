"""Stands for megatron.training of NVIDIA's checkout: names and arguments of its public functions, none of its code."""

from megatron.training.arguments import get_args
from megatron.training.training import pretrain

__all__ = ["get_args", "pretrain"]
