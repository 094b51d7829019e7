"""A small valid command line to vary."""

from __future__ import annotations

from megatron.pretrain.arguments import parse_args
from megatron.pretrain.config import Config

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def config(flags: str = "", *, world: int = 1, rank: int = 0, length: str = "--train-iters 10") -> Config:
    """The base command line and `flags`; a flag given twice takes its last value."""
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    return parse_args(f"{BASE} {length} {flags}".split(), environ=environ)
