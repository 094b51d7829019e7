"""What really leaves the device of the units of a step, beside what the byte model counts; runs inside ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Leaving
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Stage, segments
from helixpipe.program.workload import uniform
from helixpipe.runtime.copies import ThreadEngine
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.offload import Offloader, UnitSaving
from helixpipe.runtime.segments import SegmentGraph
from helixpipe.runtime.transport import SingleRankTransport
from tests.costs import layouts, pieces
from tests.model.common import set_parallel

Row = tuple[str, float, float]

RECOMPUTATIONS = (RecomputeOptions(), *pieces.RECOMPUTATIONS[:1], *pieces.RECOMPUTATIONS[3:])


class Telling(Offloader):
    """`left`: the bytes that left of each unit."""

    def __init__(self) -> None:
        super().__init__(ThreadEngine())
        self.left: dict[Unit, int] = {}

    def leave(
        self, unit: Unit, saving: UnitSaving, graphs: Sequence[SegmentGraph], stays: Iterable[torch.Tensor]
    ) -> None:
        super().leave(unit, saving, graphs, stays)
        storages = self._away[unit].storages
        assert len({storage.data._cdata for storage in storages if storage.data is not None}) == len(storages)
        self.left[unit] = sum(storage.nbytes for storage in storages)


CASES = ("gpt-tp1", "llama-tp2-sp", "gpt-tp2-sp-slices")


def compare(rank: int, world_size: int, cases: Sequence[str]) -> dict[str, list[Row]]:
    """Return what `pieces.compare` finds, and what leaves in some of the cases."""
    results = pieces.compare(rank, world_size, cases)
    for turn, case in enumerate(each for each in CASES if each in cases):
        name, tp, split, mlp_chunk = layouts.CASES[case]
        set_parallel(tp=tp)
        layout = Layout(tp, split, layouts.BATCH, element_bytes=4, fused_kernels=False, mlp_chunk=mlp_chunk)
        if pieces.has_turn(turn, layout):
            results[case] += leaving(layouts.SHAPES[name], layout)
    return results


def leaving(shape: ModelShape, layout: Layout) -> list[Row]:
    """For each recomputation, cut and chunks: whole stages, single pieces, half of the bytes, large tensors only."""
    model, own, data, found = pieces.make(shape, layout), PieceBytes(shape, layout), pieces.batch(), list[Row]()
    model.run(pieces.CHAIN, (), data, pieces.CONTEXT)  # makes RoPE's table
    step = Step(0, int, lambda index: data, lambda index: torch.tensor(1.0), layouts.BATCH, layouts.TOKENS)
    for what, program in _programs():
        teller = Telling()
        executor = Executor(0, model, SingleRankTransport(), offloader=teller)
        executor.run(lower(program), step)
        teller.engine.close()
        lengths = program.workload.tokens(0)
        for unit, bytes_left in teller.left.items():
            earlier = sum(lengths[: unit.chunk])
            chunk = Chunk(lengths[unit.chunk], earlier, True) if len(lengths) > 1 else Chunk(layouts.TOKENS)
            ours = own.offloaded(*_asked(program, unit, chunk))
            found.append((f"leaving {what} {unit}", bytes_left, ours))
    return found


def _asked(program: Program, unit: Unit, chunk: Chunk) -> tuple[tuple[object, ...], Chunk, Leaving]:
    stages, activations = program.stages, program.activations_of(unit)
    before = stages[unit.stage - 1].pieces[-1] if unit.stage else None
    after = stages[unit.stage + 1].pieces[0] if unit.stage + 1 < len(stages) else None
    own = segments(stages[unit.stage].pieces, activations)
    return own, chunk, Leaving(activations.offload, before, after, program.min_offloaded_bytes)


def _programs() -> Iterator[tuple[str, Program]]:
    """On one rank, forwards and then backwards in reverse."""
    chain = pieces.CHAIN
    cuts = {"whole": (), "layer": (6,), "inside": (2, 4, 8, 9)}
    runs = {
        "all": lambda stage: ((stage, 1.0),),
        "pieces": lambda stage: tuple(((piece,), 1.0) for piece in stage),
        "half": lambda stage: ((stage, 0.5),),
        "some": lambda stage: tuple(((piece,), 1.0) for piece in stage[1::2]),
    }
    for cut, places in cuts.items():
        bare = tuple(Stage(chain[a:b]) for a, b in pairwise((0, *places, len(chain))))
        for options in RECOMPUTATIONS if cut == "whole" else RECOMPUTATIONS[-1:] + RECOMPUTATIONS[:1]:
            stages = options.stages(bare) if options.granularity is not None else bare
            for lengths in ((), pieces.CHUNKS):
                for name, of in runs.items():
                    if (name == "half" and cut != "whole") or (name in ("half", "some") and cut == "whole" and lengths):
                        continue
                    what = f"{cut} {name} {options.granularity} {options.recompute_modules} chunks {lengths}"
                    yield what, _program(stages, lengths, of)
    program = _program((Stage(chain),), (), runs["all"])
    yield "large", replace(program, min_offloaded_bytes=4096)


def _program(stages: tuple[Stage, ...], lengths: tuple[int, ...], runs: object) -> Program:
    chunks = max(len(lengths), 1)
    order = [Op("F", stage, 0, chunk) for chunk in range(chunks) for stage in range(len(stages))]
    order += [op._replace(kind="B") for op in reversed(order)]
    own = {
        op.unit: Activations(stages[op.stage].recompute, runs(stages[op.stage].pieces), 0)  # type: ignore[operator]
        for op in order
    }
    return Program("one", stages, (tuple(order),), uniform(1, chunks, lengths or None), activations=own)
