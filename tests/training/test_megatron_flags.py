"""Flags of Megatron-LM and of papers' code that are read, ignored or refused; the dump of arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.pretrain.config import core
from megatron.pretrain.plan.costs import training_costs
from tests.training.helpers import config

ROOT = Path(__file__).resolve().parents[2]

# --------------------------------------------------------------------------------------- flags of Megatron-LM, the dump


def test_ignored_flags_are_named_in_one_warning() -> None:
    chosen = config("--no-masked-softmax-fusion --manual-gc-interval 5 --lr 0.5 --tp-comm-overlap-rs-dgrad")
    assert chosen.training.lr == 0.5
    assert len(chosen.warnings) == 1
    for flag in ("--no-masked-softmax-fusion", "--manual-gc-interval", "--tp-comm-overlap-rs-dgrad"):
        assert flag in chosen.warnings[0]


def test_a_log_says_once_what_overlaps_tensor_parallel_communication() -> None:
    """Whoever asks for it with several flags, at any size."""
    flags = "--tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad --no-masked-softmax-fusion"
    (warning,) = config(f"{flags} --tensor-model-parallel-size 2", world=2).warnings
    assert ": --tp-comm-overlap-rs-dgrad (--overlap-tp-comm says what of tensor-parallel" in warning
    assert "; --disable-tp-comm-bulk-dgrad (as --tp-comm-overlap-rs-dgrad); " in warning
    assert warning.count("tensor-parallel") == 1 and "; --no-masked-softmax-fusion (" in warning


@pytest.mark.parametrize("flag", ["--tp-comm-overlap", "--overlap-tp-comm auto"])
def test_tensor_parallel_overlap_is_chosen_by_the_cost_model(flag: str) -> None:
    """Short sequences run whole: each half would begin every collective anew."""
    sizes = "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 2 --hidden-size 4096"
    sizes += " --num-attention-heads 32 --max-position-embeddings 32768"
    for length, way in ((8192, "halves"), (64, "off")):
        chosen = config(f"{flag} {sizes} --seq-length {length}", world=2)
        assert chosen.parallel.overlap_tp_comm == way
        assert core.gpt_options(chosen).overlap_tp_comm == way
        assert training_costs(chosen).bytes.layout.halves == (way == "halves")
    assert config(f"{sizes} --seq-length 8192", world=2).parallel.overlap_tp_comm == "off"
    alone = config(f"{flag} --seq-length 4096 --max-position-embeddings 4096")
    assert not training_costs(alone).bytes.layout.halves
