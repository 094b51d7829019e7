"""Steps on GPUs with one hardware queue against steps with one a stream: docs/costs.md's table.

    make bench-queues ARGS="[--ranks 4 8] [--messages 2 10 20]"

For every schedule of the catalogue how many percent a simulated step takes longer where a GPU starts work in the order
it was issued in (CUDA_DEVICE_MAX_CONNECTIONS=1). Every piece's forward takes 1, so a layer's 5, and a backward twice
that; a message takes some percent of a layer's forward, also where it carries a chunk of a sequence. 16 microbatches,
two layers a rank, four chunks where the schedule has chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import Outcome, Page, markdown, progress
from helixpipe.common.flags import option
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.program.stages import LAYER_PIECES, PIECE_KINDS
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, build

MICROBATCHES, CHUNKS = 16, 4


def longer(schedule: str, ranks: int, percent: float) -> float:
    """Percent that a step takes longer with one queue. percent: what a message takes of a layer's forward."""
    chunks = CHUNKS if CATALOGUE[schedule].chunks else 1
    costs = PieceTimes(dict.fromkeys(PIECE_KINDS, 1.0), message=len(LAYER_PIECES) * percent / 100)
    lowered = lower(build(schedule, Shape(ranks, MICROBATCHES, 2 * ranks, chunks)), costs)
    one, many = (simulate(lowered, costs, one_queue=one).makespan for one in (True, False))
    return 100 * (one / many - 1)


@dataclass(frozen=True)
class Options(Page):
    ranks: tuple[int, ...] = option((4, 8), "Pipeline ranks.", metavar="P", at_least=1)
    messages: tuple[float, ...] = option(
        (2, 10, 20), "What a message takes, in percent of a layer's forward.", metavar="PERCENT", at_least=0
    )


def run(options: Options) -> Outcome:
    cases = [(ranks, percent) for ranks in options.ranks for percent in options.messages]
    rows = []
    for name, schedule in CATALOGUE.items():
        if not schedule.one_rank:
            rows.append([f"`{progress(name)}`", *(f"{longer(name, *case):.1f}" for case in cases)])
    heads = ["", *(f"p = {ranks}, {percent:g} %" for ranks, percent in cases)]
    return Outcome("\n".join(markdown(heads, rows, "l" + "r" * len(cases))))
