"""Context parallelism on the command line: one sentence for what ranks cannot share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from helixpipe.program.json_text import to_json
from megatron.pretrain.config import core
from megatron.pretrain.plan.programs import make_program
from schedules import Shape, build
from tests.training.helpers import config

WRONG = [
    (
        "--context-parallel-size 2 --attention-dropout 0 --cp-comm-type a2a+p2p",
        2,
        "--cp-comm-type a2a+p2p is not supported; valid values are a2a and p2p.",
    ),
    (
        "--context-parallel-size 2 --attention-dropout 0 --cp-comm-type p2p a2a",
        2,
        "--cp-comm-type p2p a2a: ranks have other tokens with p2p than with a2a; give one for all layers.",
    ),
    (
        "--context-parallel-size 2",
        2,
        "--attention-dropout 0.1 cannot be had with --cp-comm-type p2p; give 0, or --cp-comm-type a2a.",
    ),
    (
        "--context-parallel-size 3 --cp-comm-type a2a",
        3,
        "--context-parallel-size 3 with --cp-comm-type a2a must divide the 4 heads of a tensor-parallel rank; nearest "
        "valid sizes are 2 and 4, or use p2p.",
    ),
    (
        "--context-parallel-size 3 --attention-dropout 0",
        3,
        "--seq-length 32 must be a multiple of 6 with --context-parallel-size 3 and --cp-comm-type p2p; the nearest "
        "valid values are 30 and 36.",
    ),
    (
        "--context-parallel-size 2",
        3,
        "the world size 3 must be a multiple of --pipeline-model-parallel-size 1 x --tensor-model-parallel-size 1 x "
        "--context-parallel-size 2 = 2; the nearest valid sizes are 2 and 4.",
    ),
    (
        "--hierarchical-context-parallel-sizes 2 2",
        1,
        "--hierarchical-context-parallel-sizes 2 2 is refused: context-parallel ranks are one group; give "
        "--context-parallel-size.",
    ),
    (
        "--context-parallel-size 2 --attention-dropout 0 --pipeline-model-parallel-size 2 "
        "--pipeline-schedule seq1f1b --chunk-lengths 18,14",
        4,
        "--chunk-lengths 18,14 must be multiples of 4, which tensor- and context-parallel ranks can share.",
    ),
]


@pytest.mark.parametrize(("flags", "world", "message"), WRONG, ids=[flags for flags, *_ in WRONG])
def test_wrong_flags_give_one_sentence(flags: str, world: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_program(config(flags, world=world), 2)
    assert str(caught.value) == message


def test_ranks_share_the_data_of_a_model_copy() -> None:
    made = config("--context-parallel-size 2 --cp-comm-type a2a a2a --tensor-model-parallel-size 2", world=8)
    assert made.parallel.data_parallel_size == 2
    assert core.gpt_options(made).cp_comm_type == "a2a"
    assert core.transformer_config(made).context_parallel_size == 1  # what asks megatron-core for attention of its own


def test_a_file_s_chunks_that_ranks_cannot_share(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    to_json(build("seq1f1b", Shape(2, 2, 4, chunks=2, chunk_lengths=(18, 14))), path)
    flags = "--context-parallel-size 2 --attention-dropout 0 --pipeline-model-parallel-size 2 --global-batch-size 2"
    with pytest.raises(UserError, match=r"^chunks must be multiples of 4 tokens with --context-parallel-size 2.*14\.$"):
        config(f"{flags} --micro-batch-size 1 --num-layers 4 --pipeline-schedule {path}", world=4)


def test_chunks_can_be_shared() -> None:
    flags = "--context-parallel-size 2 --attention-dropout 0 --pipeline-model-parallel-size 2 --pipe-sp-splits 3"
    made = config(f"{flags} --pipeline-schedule seq1f1b", world=4)
    lengths = make_program(made, 2).chunk_lengths
    assert lengths is not None and sum(lengths) == 32
    assert all(length % 4 == 0 for length in lengths)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--kv-blocks", "--kv-blocks cannot be had with --attention-dropout 0.1; give 0, or leave --kv-blocks out."),
        ("--attention-dropout 0 --kv-blocks --context-parallel-size 2", "--kv-blocks cannot be had with --context-"),
        ("--pipeline-model-parallel-size 2 --sppo-multiplex both", "--sppo-multiplex cannot be had with --attention-"),
    ],
)
def test_blocks_of_keys_and_values_are_refused_where_they_cannot_be(flags: str, says: str) -> None:
    base = "--pipeline-schedule sppo --pipe-sp-splits 2 --global-batch-size 2"
    with pytest.raises(UserError) as caught:
        config(f"{base} {flags}", world=2 if "parallel-size" in flags else 1)
    assert str(caught.value).startswith(says)
    assert config(f"{base} --kv-blocks --attention-dropout 0").offload.kv_blocks
