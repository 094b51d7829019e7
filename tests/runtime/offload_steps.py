"""Steps of one rank that offload: random ones against the plain model, and their memory against the sweep; runs inside
a rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.model import Microbatch
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Stage
from helixpipe.program.workload import uniform
from helixpipe.runtime.copies import ThreadEngine
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.offload import Offloader, UnitSaving
from helixpipe.runtime.segments import SegmentGraph
from helixpipe.runtime.transport import SingleRankTransport
from helixpipe.simulate.sweep import sweep
from tests.costs import layouts, pieces
from tests.hunt import SEED
from tests.lowering.offloads import everything, offloading_program
from tests.lowering.random_programs import needs, random_runs
from tests.model.common import CHAIN, LAYERS, SEQUENCE, gradients_of, set_parallel, worst
from tests.runtime.case import Case
from tests.runtime.equality import left_in_tables, make_model, make_step, reference
from tests.runtime.offloading import Spoiling

MODELS = [
    Case("none", 1, 2, "gpt", tied=True, layers=LAYERS),
    Case("none", 1, 2, "llama", layers=LAYERS),
    Case("none", 1, 2, "llama", layers=LAYERS, mlp_chunk=5),
]


def random_steps(rank: int, world_size: int, examples: int) -> None:
    """Random cuts, chunks, recomputation, orders, shares and delays: gradients are those of plain megatron-core."""
    set_parallel(tp=1)
    models = [(case, make_model(case), reference(case.alone())[0]) for case in MODELS]

    @seed(SEED)
    @settings(max_examples=examples, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32), number=st.integers(0, len(models) - 1))
    @example(seed=2938368, number=0)  # a residual that passes by goes out on its way, and would leave as well
    def check(seed: int, number: int) -> None:
        (case, model, expected), rng = models[number], Random(seed)
        program = offloading_program(one_rank(rng, case.m), seed)
        delays = rng.choice(((0.0,), (0.0, 0.001), (0.0, 0.0, 0.005)))
        engine = ThreadEngine(rng.choice((None, 1e8)), lambda: rng.choice(delays))
        executor = Executor(
            0, model, SingleRankTransport(), offloader=Spoiling(engine, rng.choice((0, 10_000, 1_000_000)))
        )
        model.zero_grad()
        executor.run(lower(program), make_step(case))
        error, parameter = worst(gradients_of(model), expected)
        assert error < 1e-9, parameter
        assert sum(left_in_tables(executor)) == 0
        engine.close()

    check()


def one_rank(rng: Random, m: int) -> Program:
    """Stages, chunks, split backwards, recomputation inside or by ops, in a random order."""
    cuts = sorted(rng.sample(range(1, len(CHAIN)), rng.randint(0, 3)))
    places = [0, *cuts, len(CHAIN)]
    stages = tuple(
        Stage(CHAIN[a:b], recompute=random_runs(CHAIN[a:b], rng.choice((0.0, 0.5)), rng)) for a, b in pairwise(places)
    )
    ends = [*sorted(rng.sample(range(1, SEQUENCE), rng.choice((0, 0, 1, 2)))), SEQUENCE]
    lengths = tuple(end - start for start, end in pairwise([0, *ends]))
    workload = uniform(m, len(lengths), lengths if len(lengths) > 1 else None)
    empty = Program("random", stages, ((),), workload, kv_blocks=rng.random() < 0.4)
    ops = set()
    for stage, each in enumerate(stages):
        for microbatch in range(m):
            for chunk in range(len(lengths)):
                kinds = rng.choice(("FB", "FIW")) + "R" * (bool(each.recompute) and rng.random() < 0.5)
                ops |= {Op(kind, stage, microbatch, chunk) for kind in kinds}
    order, pending, eager = list[Op](), sorted(ops), rng.choice((1, 3, len(ops)))
    while pending:
        ready = [op for op in pending if needs(empty, op, ops) <= set(order)]
        order.append(rng.choice(ready[-eager:]))
        pending.remove(order[-1])
    return replace(empty, ranks=(tuple(order),))


def both(rank: int, world_size: int, examples: int) -> dict[str, tuple[float, float]]:
    """In one launch."""
    random_steps(rank, world_size, examples)
    return peaks(rank, world_size)


# -------------------------------------------------------------------------------------------------------------- memory


class Meter:
    """Bytes of storages that autograd saved something of, or that came back, for as long as anybody has them."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def see(self, tensors: Iterable[torch.UntypedStorage]) -> None:
        for storage in tensors:
            self._seen[storage._cdata] = weakref.ref(storage)
        self.look()

    def look(self) -> int:
        alive = [storage() for storage in self._seen.values()]
        now = sum(storage.nbytes() for storage in alive if storage is not None)
        self.peak = max(self.peak, now)
        return now


class Metered(Offloader):
    """Asserts that what is gone has gone. kept: storages that others have: weights, batch, tables."""

    def __init__(self, meter: Meter, kept: Sequence[torch.Tensor]):
        super().__init__(ThreadEngine())
        self._meter, self._kept = meter, {tensor.untyped_storage()._cdata for tensor in kept}

    def leave(
        self, unit: Unit, saving: UnitSaving, graphs: Sequence[SegmentGraph], stays: Iterable[torch.Tensor]
    ) -> None:
        storages = [storage.data for storage in saving._storages.values() if storage.data is not None]
        self._meter.see(storage for storage in storages if storage._cdata not in self._kept)
        super().leave(unit, saving, graphs, stays)

    def gone(self, unit: Unit) -> None:
        leaving = [weakref.ref(storage.data) for storage in self._away[unit].storages if storage.data is not None]
        assert len(leaving) == len(self._away[unit].storages)
        super().gone(unit)
        assert not any(storage() is not None and storage().nbytes() for storage in leaving)
        self._meter.look()

    def fetch(self, unit: Unit, *args: Any) -> None:
        super().fetch(unit, *args)
        self._meter.see(tensor.untyped_storage() for tensor in self._away[unit].back)


MEMORY = {
    "gpt": ("gpt", "F0 F1 F2 F3 B3 B2 B1 B0"),
    "llama": ("llama", "F0 F1 B0 F2 B1 F3 B2 B3"),
    "split": ("llama-mha", "F0 F1 F2 I0 W0 I1 I2 F3 W1 W2 I3 W3"),
}


def step_of(data: Microbatch) -> Step:
    return Step(0, int, lambda index: data, lambda index: torch.tensor(1.0), layouts.BATCH, layouts.TOKENS)


def peaks(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """For each of `MEMORY` and ways to offload, what was measured over what the sweep says: (device, host)."""
    set_parallel(tp=1)
    layout, found = Layout(1, False, layouts.BATCH, element_bytes=4, fused_kernels=False), {}
    for name, (style, order) in MEMORY.items():
        shape = layouts.SHAPES[style]
        model, data = pieces.make(shape, layout), pieces.batch()
        model.run(pieces.CHAIN, (), data, pieces.CONTEXT)  # makes RoPE's table
        step = step_of(data)
        costs = ModelCosts(shape, HARDWARE["a100-80"], layout, seq_length=layouts.TOKENS)
        for way, program in ways(order).items():
            lowered, meter = lower(program, costs), Meter()
            kept = [*model.parameters(), *model.constants(), *data.tensors()]
            offloader = Metered(meter, kept)
            executor = Executor(0, model, SingleRankTransport(), offloader=offloader)
            executor.run(lowered, step)
            offloader.engine.close()
            expected = sweep(lowered, BoundCosts(program, costs), 0)
            found[f"{name} {way}"] = meter.peak / expected.activations, offloader.arena.peak / expected.host
    return found


def ways(order: str) -> dict[str, Program]:
    """Of a program of one stage: all that is large leaves; half of it; of every other unit; late."""
    stage = Stage(pieces.CHAIN)
    ops = tuple(Op(cell[0], 0, int(cell[1:])) for cell in order.split())
    program = Program("one", (stage,), (ops,), uniform(4), min_offloaded_bytes=1024)
    units = [op.unit for op in ops if op.kind == "F"]
    half = {unit: Activations((), ((stage.pieces, 0.5),), 1) for unit in units}
    nothing = {unit: Activations((), ((stage.pieces[:1], 1.0),), 0) for unit in units[1::2]}
    some = everything(program, 1, units[::2])
    return {
        "all": everything(program, 0),
        "early": everything(program, 2),
        "half": replace(program, activations=half),
        "some": replace(some, activations={**some.activations, **nothing}),
    }
