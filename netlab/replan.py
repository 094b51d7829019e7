"""Runs that plan themselves anew: a link at a quarter, a rank at half its speed (Linux, root; emulated ranks).

    sudo make bench-replan ARGS="[--schedule zb1p] [--time-scale 0.5] [--rate 100mbit]"

As in emulate.py every rank is a process with the real executor, transport and lowered program on a host of its own, and
its ops wait. They are watched, planned anew and switched by what does so in training. From step 20 to 59 a link carries
a quarter of its rate in both directions, or the ops of a rank take twice as long. The oracle plans with the true speeds
from the start; its steps and those of the unchanged order are run in turn, with the same cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MappingProxyType

from benchmarks.report import ROOT, Outcome, markdown, write_tables
from helixpipe.adapt.replan import Situation, replan
from helixpipe.adapt.reports import Link
from helixpipe.common.flags import option
from helixpipe.lowering.lower import lower
from netlab.emulated_costs import EmulatedCosts, Size
from netlab.emulated_ranks import measured_link, run_ranks
from netlab.hosts import Lab
from netlab.job import parse_rate
from netlab.replan_costs import SCHEDULES, EmulatedReplanner, program, true_costs
from netlab.replan_ranks import Cause, Watched, steps_of, watched_steps

PAGE = ROOT / "docs" / "resilience.md"

CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        "link between ranks 1 and 2 at 1/4": Cause(links={(1, 2): 4.0, (2, 1): 4.0}),
        "rank 2 at 1/2": Cause(ranks={2: 2.0}),
    }
)
RANKS, AFTER = 4, 20
"""Ranks of the pipeline; steps after the cause is gone."""


@dataclass(frozen=True)
class Options:
    schedule: str = option("zb1p", "The run's own.", choices=SCHEDULES)
    microbatches: int = option(8, "Of a step.", at_least=1)
    rate: str = option("100mbit", "Of a link in each direction.")
    time_scale: float = option(0.5, "Of all op times.", more_than=0)
    steps: int = option(4, "Of the unchanged order and of the oracle's, each.", at_least=1)
    page: bool = option(False, "Write the table into docs/resilience.md.", flags=("--page",))


def run(options: Options) -> Outcome:
    rate = parse_rate(options.rate)
    size = Size(RANKS, options.microbatches, 2 * RANKS, time_scale=options.time_scale)
    rows = []
    for name, cause in CAUSES.items():
        with Lab(RANKS, rate, pairs=True) as lab:
            link = measured_link([lab.namespace(0), lab.namespace(RANKS - 1)])
            rows.append(_row(name, cause, lab, size, size.costs(link, link), options))
    heads = (
        *("cause", "before s", "slow s", "found after", "switched after", "then s"),
        *("oracle s", "share of its gain", "back after"),
    )
    table = markdown(heads, rows, "lrrrrrrrr")
    if options.page:
        write_tables(PAGE, {"replan": table})
    return Outcome("\n".join(table))


def _row(name: str, cause: Cause, lab: Lab, size: Size, costs: EmulatedCosts, options: Options) -> tuple[str, ...]:
    own = program(options.schedule, size, costs)
    true = true_costs(own, costs, cause.ranks, cause.links)
    proposal = replan(Situation(1, own, costs, own, true), EmulatedReplanner(size).candidates)
    assert proposal is not None, "the oracle has nothing better"
    names = [lab.namespace(rank) for rank in range(RANKS)]
    set_links = partial(_set_links, lab, cause.links)
    unchanged, oracle = run_ranks(
        *(steps_of, names, 600.0, [lower(own, costs), lower(proposal.program, true)], size, costs, cause),
        *(options.steps, set_links),
    )[0]
    watched = run_ranks(watched_steps, names, 600.0, own, size, costs, cause, cause.end + AFTER, set_links)[0]
    return (name, *_figures(watched, cause, median(unchanged), median(oracle)))


def _figures(watched: Watched, cause: Cause, unchanged: float, oracle: float) -> tuple[str, ...]:
    """Return the cells of a row after its name. Steps count from the first that was slow, or well again."""
    found = [int(step) for line in watched.lines for step in re.findall(r"iteration (\d+): .* of its speed", line)]
    seconds, plans = watched.seconds, watched.plans
    before = median(seconds[2 : cause.first - 1])
    then = [taken for step, taken in enumerate(seconds, 1) if plans[step - 1] == 1 and step < cause.end]
    switched = plans.index(1) + 1 if 1 in plans else None
    back = plans.index(2) + 1 if 2 in plans else None
    share = (unchanged - median(then)) / (unchanged - oracle) if then else 0.0
    return (
        *(f"{before:.3f}", f"{unchanged:.3f}"),
        f"{found[0] - cause.first + 1} steps" if found else "never",
        f"{switched - cause.first} steps" if switched else "never",
        *(f"{median(then):.3f}" if then else "", f"{oracle:.3f}", f"{share:.0%}"),
        f"{back - cause.end} steps" if back else "never",
    )


def _set_links(lab: Lab, links: Mapping[Link, float], slow: bool) -> None:
    for (source, target), times in links.items():
        assert lab.rate is not None
        lab.set_pair_rate(source, target, lab.rate / times if slow else lab.rate)
