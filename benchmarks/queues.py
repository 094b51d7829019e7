"""`make bench-queues`: steps on GPUs with one hardware queue against steps with one a stream: docs/costs.md's table.

    python benchmarks/queues.py [--ranks 4 8] [--messages 2 10 20]

For every schedule of the catalogue how many percent a simulated step takes longer where a GPU starts work in the order
it was issued in (CUDA_DEVICE_MAX_CONNECTIONS=1). Every piece's forward takes 1, so a layer's 5, and a backward twice
that; a message takes some percent of a layer's forward, also where it carries a chunk of a sequence. 16 microbatches,
two layers a rank, four chunks where the schedule has chunks.
"""

from __future__ import annotations

import argparse

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], metavar="P", help="(default: 4 8)")
    parser.add_argument(
        "--messages", type=float, nargs="+", default=[2, 10, 20], metavar="PERCENT",
        help="time of a message in percent of a layer's forward (default: 2 10 20)",
    )  # fmt: skip
    arguments = parser.parse_args()
    cases = [(ranks, percent) for ranks in arguments.ranks for percent in arguments.messages]
    print("| | " + " | ".join(f"p = {ranks}, {percent:g} %" for ranks, percent in cases) + " |")
    print("|---|" + "--:|" * len(cases))
    for name, schedule in CATALOGUE.items():
        if not schedule.one_rank:
            figures = [f"{longer(name, *case):.1f}" for case in cases]
            print(f"| `{name}` | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
