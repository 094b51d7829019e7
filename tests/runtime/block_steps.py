"""Memory of one rank whose chunks offload, with keys and values in blocks, measured beside the sweep; runs inside a
rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.model.attention.kv_blocks import KeyValueBlocks
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage
from helixpipe.program.workload import uniform
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.step import PlanOnRank
from helixpipe.runtime.transport import SingleRankTransport
from helixpipe.simulate.sweep import sweep
from tests.costs import layouts, pieces
from tests.lowering.offloads import everything
from tests.model.common import set_parallel
from tests.runtime.offload_steps import Meter, Metered, both

ORDERS = {
    "one": "F0.0 F0.1 F0.2 F0.3 B0.3 B0.2 B0.1 B0.0",
    "rounds": "F0.0 F0.1 F0.2 F0.3 F1.0 B0.3 F1.1 B0.2 B0.1 B0.0 F1.2 F1.3 B1.3 B1.2 B1.1 B1.0",
}
"""Units by microbatch and chunk."""


class StoreMeter(Meter):
    """Adds what a store of keys and values has."""

    store: KeyValueStore | KeyValueBlocks | None = None

    def look(self) -> int:
        now = super().look() + (self.store.bytes_alive() if self.store is not None else 0)
        self.peak = max(self.peak, now)
        return now


class MeteredExecutor(Executor):
    """An executor whose store has the meter look whenever it grows."""

    meter: StoreMeter

    def _store(self, plan: PlanOnRank) -> KeyValueStore | KeyValueBlocks:
        store = self.meter.store = super()._store(plan)
        count = store.count

        def counted(nbytes: int) -> None:
            count(nbytes)
            self.meter.look()

        store.count = counted  # type: ignore[method-assign]
        return store


def every(rank: int, world_size: int, examples: int) -> tuple[dict[str, tuple[float, float]], dict[str, list[float]]]:
    """All that test_offload.py launches a rank for."""
    return both(rank, world_size, examples), block_peaks()


def block_peaks() -> dict[str, list[float]]:
    """For each of `ORDERS` the most bytes at a time: measured, expected, and expected of whole rows."""
    set_parallel(tp=1)
    layout = Layout(1, False, layouts.BATCH, element_bytes=4, fused_kernels=False)
    shape, found = layouts.SHAPES["llama-mha"], {}
    model, data = pieces.make(shape, layout), pieces.batch()
    model.run(pieces.CHAIN, (), data, pieces.CONTEXT)  # makes RoPE's table
    costs = ModelCosts(shape, HARDWARE["a100-80"], layout, seq_length=layouts.TOKENS)
    step = Step(0, int, lambda index: data, lambda index: torch.tensor(1.0), layouts.BATCH, layouts.TOKENS)
    for name, order in ORDERS.items():
        program = _program(order.split())
        meter = StoreMeter()
        offloader = Metered(meter, [*model.parameters(), *model.constants(), *data.tensors()])
        executor = MeteredExecutor(0, model, SingleRankTransport(), offloader=offloader)
        executor.meter = meter
        executor.run(lower(program, costs), step)
        offloader.engine.close()
        ways = (program, replace(program, kv_blocks=False))
        expected = (sweep(lower(way, costs), BoundCosts(way, costs), 0).activations for way in ways)
        found[name] = [float(meter.peak), *expected]
    return found


def _program(cells: Iterable[str]) -> Program:
    """A stage of the layers that offloads all it saves, and the ends, which keep what they save."""
    embed, *layers, head = pieces.CHAIN
    stages = (Stage((embed,)), Stage(tuple(layers)), Stage((head,)))
    ops: list[Op] = []
    for cell in cells:
        microbatch, chunk = map(int, cell[1:].split("."))
        forward = [Op("F", stage, microbatch, chunk) for stage in range(3)]
        ops += forward[:2] if cell[0] == "F" else [forward[2], *(op._replace(kind="B") for op in reversed(forward))]
    count = max(op.microbatch for op in ops) + 1
    workload = uniform(count, 4, (12, 6, 4, 2))
    program = Program("blocks", stages, (tuple(ops),), workload, min_offloaded_bytes=256, kv_blocks=True)
    units = {op.unit for op in ops if op.kind == "F" and op.stage == 1}
    return everything(program, 0, units)
