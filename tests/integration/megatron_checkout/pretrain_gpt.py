"""Stands for the script of NVIDIA's checkout: its own forward step, loss and data, and the trainer's `pretrain`."""

from functools import partial

import torch
from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.utils import get_batch_on_this_tp_rank, is_first_or_last_pipeline_stage
from model_provider import model_provider

from tests.drop_in import loop


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    return loop.batches, None, None


def get_batch(data_iterator, vp_stage=None):
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None
    tokens, labels, loss_mask = get_batch_on_this_tp_rank(data_iterator)
    positions = torch.arange(loop.SEQUENCE).expand(loop.BATCH, -1)
    attention_mask = torch.ones(1, 1, loop.SEQUENCE, loop.SEQUENCE, dtype=torch.bool).triu(1)
    return tokens, labels, loss_mask, attention_mask, positions


def loss_func(loss_mask, output_tensor, model=None):
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask.view(-1))
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator, model, return_schedule_plan=False):
    assert get_args().micro_batch_size == loop.BATCH
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, positions = get_batch(data_iterator, vp_stage)
    if attention_mask is None:  # a stage between the ends; NVIDIA's layers make the mask of a kernel themselves
        attention_mask = torch.ones(1, 1, loop.SEQUENCE, loop.SEQUENCE, dtype=torch.bool).triu(1)
    output_tensor = model(tokens, positions, attention_mask, labels=labels, loss_mask=loss_mask)
    return output_tensor, partial(loss_func, loss_mask, model=model)


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
