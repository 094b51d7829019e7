"""Stands for the script of NVIDIA's checkout: its own forward step and data, and the trainer's `pretrain`."""

from functools import partial

from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from model_provider import model_provider

from tests.drop_in import loop


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    return loop.batches, None, None


def forward_step(data_iterator, model, return_schedule_plan=False):
    assert get_args().micro_batch_size == loop.BATCH
    return loop.forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
