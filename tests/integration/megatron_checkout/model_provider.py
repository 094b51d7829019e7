"""Stands for the module of this name in NVIDIA's checkout."""

from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def model_provider(model_builder, pre_process=True, post_process=True, vp_stage=None, config=None):
    args = get_args()
    return model_builder(args, pre_process, post_process, vp_stage, config or core_transformer_config_from_args(args))
