"""Stands for megatron.training.arguments: a parser that knows no flags of others."""

import argparse

from tests.drop_in import loop

_ARGS = []


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, default in (
        ("--pipeline-model-parallel-size", 1),
        ("--num-virtual-stages-per-pipeline-rank", None),
        ("--num-layers", 4),
        ("--micro-batch-size", 2),
        ("--global-batch-size", 8),
        ("--train-iters", 3),
    ):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    return parser.parse_args()


def validate_args(args):
    """Leaves virtual stages out where there is one, and where there is one rank; biases are those of QKV as well."""
    virtual = args.num_virtual_stages_per_pipeline_rank
    several = args.pipeline_model_parallel_size > 1 and virtual is not None and virtual > 1
    args.virtual_pipeline_model_parallel_size = virtual if several else None
    args.add_qkv_bias = True
    return args


def set_args(args):
    _ARGS[:] = [args]


def get_args():
    return _ARGS[0]


def core_transformer_config_from_args(args):
    virtual = args.virtual_pipeline_model_parallel_size or 1
    case = loop.Case(None, args.pipeline_model_parallel_size, 1, v=virtual)
    config = loop.make_config(case)
    config.num_layers, config.add_qkv_bias = args.num_layers, args.add_qkv_bias
    return config
