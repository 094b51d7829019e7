"""One microbatch of a step as a step of its own: the same ops on the same ranks, in a program that is valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.lowering.lower import lower
from helixpipe.lowering.streams import check_streams
from helixpipe.program.alone import alone
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations
from schedules import Shape, build

STAGES = {"interleaved-1f1b": 2, "hanayo": 2}
CHUNKS = {"seq1f1b": 3, "sppo": 3}
OTHERS = "gpipe 1f1b zb1p zb2p chimera zbv helix weipipe wzb1 wzb2 weipipe-naive"


def program(name: str) -> Program:
    return build(name, Shape(4, 8, 8, virtual_stages=STAGES.get(name), chunks=CHUNKS.get(name, 1)))


@pytest.mark.parametrize("name", [*STAGES, *CHUNKS, *OTHERS.split()])
def test_it_has_the_ops_of_its_microbatch_in_their_order_and_is_valid(name: str) -> None:
    whole = program(name)
    for microbatch in (0, 5, 7):
        one = alone(whole, microbatch)
        lowered = lower(one)
        check_streams(lowered)
        assert one.stages == whole.stages and len(one.workload) == 1
        for own, ops in zip(one.ranks, whole.ranks, strict=True):
            renamed = [op._replace(microbatch=microbatch) for op in own]
            assert renamed == [op for op in ops if op.microbatch == microbatch]
        assert one.workload.in_tokens(24).tokens(0) == whole.workload.in_tokens(24).tokens(microbatch)


def test_a_units_own_activations_go_with_it() -> None:
    whole = program("1f1b")
    kept = Activations(recompute=(whole.stages[1].pieces[:1],))
    whole = replace(whole, activations={Unit(1, 5): kept, Unit(1, 6): Activations()})
    assert alone(whole, 5).activations == {Unit(1, 0): kept}
