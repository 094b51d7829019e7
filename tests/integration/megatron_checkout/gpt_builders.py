"""Stands for the module of this name in NVIDIA's checkout."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel

from tests.drop_in import loop


def gpt_builder(args, pre_process, post_process, vp_stage=None, config=None):
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        loop.VOCABULARY,
        loop.SEQUENCE,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )
    numbers = {f"decoder.layers.{index}": layer.layer_number for index, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():  # as its layer has it, wherever that is
        layer = ".".join(name.split(".")[:3])
        name = name.replace(layer, f"layer {numbers[layer]}") if layer in numbers else name
        generator = torch.Generator().manual_seed(sum(name.encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm.weight" in name)
    return model
