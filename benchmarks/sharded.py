"""Weights in parts beside whole ones, simulated: the table of docs/sharded_weights.md.

    make bench-sharded ARGS="[--output docs/sharded_weights.md]"

A row is a schedule on GPUs, with the optimizer's state in parts alone or the weights as well; the model and the batch
are one for all. All figures come from the cost model (docs/costs.md).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from benchmarks.report import Outcome, Page, markdown
from benchmarks.simulated import Setting, simulated
from helixpipe.cli.model import ModelOptions, make_plan
from helixpipe.costs.hardware import GIB

Options = Page

NODES, SEQUENCES, TOKENS, LOSS_SLICE = 4, 64, 4096, 1024


class Row(NamedTuple):
    """label: what the table says of it. ranks: of the pipeline."""

    label: str
    schedule: str
    ranks: int
    hardware: str
    strategy: Literal["optim", "optim_grads_params"]


ROWS = (
    Row("`1f1b` p = 4, distributed optimizer", "1f1b", 4, "h100", "optim"),
    Row("`1f1b` p = 4, in parts", "1f1b", 4, "h100", "optim_grads_params"),
    Row("`zb1p` p = 4, distributed optimizer", "zb1p", 4, "h100", "optim"),
    Row("`zb1p` p = 4, in parts", "zb1p", 4, "h100", "optim_grads_params"),
    Row("`none`, in parts (FSDP)", "none", 1, "h100", "optim_grads_params"),
    Row("the same on 32 A800: `1f1b` in parts", "1f1b", 4, "a800", "optim_grads_params"),
    Row("`none`, in parts (FSDP)", "none", 1, "a800", "optim_grads_params"),
)

HEADS = ("", "n", "step, s", "tokens/s/GPU", "bubble", "most memory, GiB", "network busy, s", "waited for, s")


def cells(row: Row) -> list[str]:
    """A line of the table."""
    options = ModelOptions(
        model="llama2-13b",
        seq_length=TOKENS,
        global_batch_size=SEQUENCES,
        hardware=row.hardware,
        nodes=NODES,
        loss_chunk_size=LOSS_SLICE,
        data_parallel_sharding_strategy=row.strategy,
    )
    plan = make_plan(options, row.ranks, None, None)
    assert plan is not None
    step = simulated(plan, Setting(row.schedule).program(plan))
    simulation = step.simulation
    busy, waited = (
        f"{max(seconds):.3f}" if simulation.shares else "0"
        for seconds in (simulation.sharing_time, simulation.held_up_by_sharing)
    )
    return [
        row.label,
        str(plan.costs.data_parallel),
        f"{step.step_time:.3f}",
        f"{step.tokens_per_gpu:,.0f}",
        f"{simulation.bubble_ratio:.1%}".replace("%", " %"),
        f"{step.peak / GIB:.1f}",
        busy,
        waited,
    ]


def run(options: Options) -> Outcome:
    lines = markdown(HEADS, [cells(row) for row in ROWS], "l" + "r" * 7)
    return Outcome("\n".join(lines), {"sharded": lines})
