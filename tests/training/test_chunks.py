"""The number of chunks of a sequence where no flag says it."""

from __future__ import annotations

import pytest

from megatron.pretrain.plan.programs import make_program
from schedules import CATALOGUE
from tests.training.helpers import config

PIPELINE = "--pipeline-model-parallel-size 2 --num-layers 4 --micro-batch-size 1 --global-batch-size 4"


@pytest.mark.parametrize("name", [name for name, schedule in CATALOGUE.items() if not schedule.one_rank])
def test_schedules_made_for_chunks_find_their_number(name: str) -> None:
    flags = f"{PIPELINE} --pipeline-schedule {name}"
    assert config(flags, world=2).chunks.auto == CATALOGUE[name].chunks
    for given in ("--pipe-sp-splits 1", "--pipe-sp-splits 2", "--chunk-lengths 20,12"):
        made = config(f"{flags} {given}", world=2)
        assert not made.chunks.auto and made.chunks.count() == (1 if given.endswith(" 1") else 2)
    strategy = f"{flags} --pipe-sp-strategy average"
    if CATALOGUE[name].chunks:
        assert config(strategy, world=2).chunks.auto


@pytest.mark.parametrize(("length", "unit"), [(32, 2), (8, 8), (4096, 1)])
def test_what_is_found_fits_the_sequence(length: int, unit: int) -> None:
    """Also where it has fewer tokens than there are chunks to try, and ranks share each chunk."""
    tensor = f"--tensor-model-parallel-size {unit} --num-attention-heads 8 --hidden-size 64 --sequence-parallel"
    flags = f"{PIPELINE} --pipeline-schedule seq1f1b --seq-length {length} --max-position-embeddings {length} {tensor}"
    program = make_program(config(flags, world=2 * unit), 4)
    assert program == make_program(config(f"{flags} --pipe-sp-splits auto", world=2 * unit), 4)
    assert program.num_chunks * unit <= length
    assert length != 4096 or program.num_chunks > 1
