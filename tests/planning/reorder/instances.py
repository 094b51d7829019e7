"""Random instances, and programs of the catalogue with costs that tell every op from every other."""

from __future__ import annotations

from math import inf
from random import Random

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.planning.reorder.instance import Instance, instance_of
from helixpipe.program.program import Op, Program
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build

COSTS = PieceTimes(
    {"embed": 0.3, "norm": 0.1, "qkv": 1.1, "attn": 2.3, "proj": 0.7, "mlp": 3.1, "head": 1.7}, 2.1, message=0.45
)


def simulated(program: Program) -> Simulation:
    return simulate(lower(program, COSTS), COSTS)


def small(name: str = "1f1b", ranks: int = 3, microbatches: int = 4, chunks: int = 1, **options: int) -> Program:
    return build(name, Shape(ranks, microbatches, 2 * ranks, chunks, costs=COSTS, **options))


def instance(program: Program, limits: list[float] | None = None) -> Instance:
    return instance_of(lower(program, COSTS), COSTS, limits)


def random_instance(seed: int) -> Instance:
    """Ops and transfers with random times, sizes and edges, some of which make circles with the ranks' orders."""
    rng = Random(seed)
    ranks, num_ops, transfers = rng.randint(1, 3), rng.randint(1, 14), rng.randint(0, 8)
    num_tasks = num_ops + transfers
    orders: list[list[int]] = [[] for _ in range(ranks)]
    home = [rng.randrange(ranks) for _ in range(num_ops)]
    for task in range(num_ops):
        orders[home[task]].insert(rng.randint(max(0, len(orders[home[task]]) - 2), len(orders[home[task]])), task)
    rank_in_line = sorted(range(num_tasks), key=lambda task: task if task < num_ops else rng.randrange(num_ops) + 0.5)
    successors: list[list[int]] = [[] for _ in range(num_tasks)]
    waiting = [0] * num_tasks
    for at, task in enumerate(rank_in_line):
        for later in rank_in_line[at + 1 :]:
            if rng.random() < 0.15:
                successors[task].append(later)
                waiting[later] += 1
    links = rng.randint(1, 3)
    size = lambda: rng.choice((0.0, 1.0, -1.0, rng.random()))  # noqa: E731
    return Instance(
        tuple(Op("F", 0, task) for task in range(num_ops)),
        orders,
        [rng.choice((0.0, 1.0, 2.0, rng.random())) for _ in range(num_tasks)],
        [*home, *(ranks + rng.randrange(links) for _ in range(transfers))],
        ranks + links,
        successors,
        waiting,
        [rng.random() for _ in range(ranks)],
        [rng.random() for _ in range(num_ops)],
        [size() for _ in range(num_ops)],
        [(rng.randrange(-1, ranks), size()) for _ in range(transfers)],
        [(rng.randrange(-1, ranks), size()) for _ in range(transfers)],
        [rng.choice((inf, 3.0 + rng.random())) for _ in range(ranks)],
    )
