"""A run that watches itself (`--replan auto`): whether noise makes it flap, what watching costs, and at 1,024 ranks.

    make bench-watching ARGS="[--runs 20] [--rounds 9] [--output docs/resilience.md]"

*Noise*: simulated, since 500 real steps of many runs would take hours: each step of `zb1p` on 4 ranks with 8
microbatches is simulated with ops and messages that take 4 % more or less (a standard deviation), reported as its ranks
would, and taken in by the detector and the planner of training; a plan, another order of the same stages, is adopted at
once. Pauses: in 2 % of the steps a random rank takes 3 times as long. Bursts: in 4 % of them a random link 4 times, for
one or two steps. Causes: a random rank at half or link at a quarter of its speed from a random step on, for 80 steps,
twice in a run.

*Cost*: steps of two ranks with and without watching take turns on this machine's CPU, `TIMED` each; figures are medians
and quartiles of the ratios. Counted: the seconds that a step's marks take alone, and those of its report.

*1,024 ranks*: reports and a plan of 16 pipeline ranks with 64 microbatches, simulated and counted, times 8 replicas.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.paper_steps import BASE, STEP, reports, true_costs
from benchmarks.ranks import on_ranks, seconds_of_steps
from benchmarks.report import Figures, Outcome, Page, markdown
from benchmarks.rounds import in_turn, ratios
from helixpipe.adapt.replan import PlannerAnswer, Situation, replan
from helixpipe.adapt.reports import Link
from helixpipe.common.flags import option
from helixpipe.planning.plan import make_plan
from helixpipe.program.program import Program
from schedules import Shape, build

STEPS, NOISE, LASTS = 500, 0.04, 80
TIMED = 8
"""Steps of a round of the cost."""

Speeds = tuple[dict[int, float], dict[Link, float]]
"""How many times as long the ops of ranks, and messages of links, take in a step."""


@dataclass(frozen=True)
class Options(Figures, Page):
    runs: int = option(20, "Of each kind of noise.", at_least=1)
    rounds: int = option(9, "Rounds of the cost that count; 0 leaves it out.", at_least=0)


def run(options: Options) -> Outcome:
    kinds = [noise(kind, options.runs) for kind in ("noise", "pauses", "bursts", "causes")]
    tables = {"noise": noise_table(kinds), "watch-1024": large_table(large := at_1024())}
    costs = None
    if options.rounds:
        costs = on_ranks("benchmarks.watching:costs", options.rounds)
        tables["watch-cost"] = costs_table(costs)
    text = "\n\n".join("\n".join(lines) for lines in tables.values())
    return Outcome(text, tables=tables, figures={"noise": kinds, "1024": large, "cost": costs})


# -------------------------------------------------------------------------------------------------------------- noise


class Planner:
    """Plans in this process."""

    def announce(self, size: Situation) -> None: ...

    def plan(self, size: Situation, give_up: Any = None) -> PlannerAnswer:
        return PlannerAnswer(replan(size, lambda costs: ()))

    def close(self) -> None: ...


def program(ranks: int = 4, microbatches: int = 8) -> Program:
    return build("zb1p", Shape(ranks, microbatches, layers=ranks, costs=BASE))


def noise(kind: str, runs: int) -> dict[str, Any]:
    """What `runs` runs of 500 steps with this kind of noise told, and how often they switched."""
    found = [simulated(kind, Random(f"{kind} {number}")) for number in range(runs)]
    switches = [each["switches"] for each in found]
    return {"kind": kind, "runs": runs, "told": sum(each["told"] for each in found), "switches": switches}


def simulated(kind: str, rng: Random) -> dict[str, int]:
    """Return the changes that a run has told, and the plans it has switched to."""
    import threading

    from helixpipe.watch.lead import Lead, Place
    from helixpipe.watch.lead import Options as Watching

    plan, lines = make_plan(program(), BASE), list[str]()
    place, watching = Place(0, 4, 0, 1), Watching(STEP, "auto", steps=STEPS)
    lead = Lead(plan, place, watching, Planner, lines.append, threading.Event())
    running, switches, speeds = plan, 0, timeline(kind, rng)
    for step in range(STEP, STEPS + 1, STEP):
        costs = true_costs(plan.program, *speeds.get(step, ({}, {})))
        sent = lead.take(reports(running.lowered, costs, step, rng, NOISE), None, waiting=False)
        if sent is not None:
            running, switches = sent.plan(plan.costs), switches + 1
            lead.switched(running, sent.name, step)
    return {"told": sum("times as long as at first" in line for line in lines), "switches": switches}


def timeline(kind: str, rng: Random) -> dict[int, Speeds]:
    """Return what is slow in which steps; others are as always."""
    links = [(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1]
    slow: dict[int, Speeds] = {}
    if kind == "causes":
        for begin in (rng.randrange(40, 120), rng.randrange(280, 360)):
            part: Speeds = ({rng.randrange(4): 2.0}, {}) if rng.random() < 0.5 else ({}, {rng.choice(links): 4.0})
            slow |= dict.fromkeys(range(begin, begin + LASTS), part)
    for step in range(STEPS + 1):
        if kind == "pauses" and rng.random() < 0.02:
            slow[step] = {rng.randrange(4): 3.0}, {}
        if kind == "bursts" and rng.random() < 0.04:
            slow |= dict.fromkeys((step, step + rng.randrange(2)), ({}, {rng.choice(links): 4.0}))
    return slow


def noise_table(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    says = {
        "noise": "noise of 4 %",
        "pauses": "and pauses of a rank",
        "bursts": "noise, and bursts on links",
        "causes": "noise, and two lasting causes a run",
    }
    rows = [
        (
            *(says[each["kind"]], str(each["runs"]), str(each["told"])),
            *(str(sum(each["switches"])), str(max(each["switches"]))),
        )
        for each in kinds
    ]
    return markdown(("500 steps with", "runs", "changes told", "switches", "most in a run"), rows, "lrrrr")


# ------------------------------------------------------------------------------------------------------- 1,024 ranks


def at_1024() -> dict[str, float]:
    """Count what 16 pipeline ranks, 8 tensor-parallel ranks and 8 replicas report, read and send."""
    import base64
    import pickle

    from helixpipe.adapt.monitor import Monitor

    replicas, every = 8, 1024
    own = make_plan(program(16, 64), BASE)
    sent = reports(own.lowered, true_costs(own.program), STEP, Random(0), NOISE)
    report = statistics.mean(len(each.to_json()) for each in sent)
    monitor, taking = Monitor(own.lowered, BASE), []
    for _ in range(30):
        start = time.perf_counter()
        monitor.take(sent)
        taking.append(time.perf_counter() - start)
    start = time.perf_counter()
    slow = true_costs(own.program, {7: 2.0})
    proposal = replan(Situation(1, own.program, own.costs, own.program, slow), lambda costs: ())
    planning = time.perf_counter() - start
    plan = proposal.program if proposal is not None else own.program
    return {
        "reports": 16 * replicas,
        "report_bytes": report,
        "step_bytes": report * 16 * replicas,
        "taking": statistics.median(taking) * replicas,
        "planning": planning,
        "plan_bytes": len(base64.b64encode(pickle.dumps(plan))),
        "fetches": every,
    }


def large_table(found: Mapping[str, float]) -> list[str]:
    rows = [
        ("reports of a timed step", f"{found['reports']:.0f} of {found['report_bytes'] / 1e3:.1f} kB"),
        ("into the store, and out of it to one rank", f"{found['step_bytes'] / 1e6:.2f} MB a timed step"),
        ("taking them in, one thread of the first rank", f"{found['taking']:.2f} s"),
        ("a plan anew, a process beside it", f"{found['planning']:.1f} s"),
        ("a plan to every rank", f"{found['fetches']:.0f} times {found['plan_bytes'] / 1e3:.0f} kB, once a switch"),
    ]
    return markdown(("at 1,024 ranks (p = 16, 8 replicas, m = 64)", "counted"), rows, "lr")


# --------------------------------------------------------------------------------------------------------------- cost


def costs_table(costs: Mapping[str, Any]) -> list[str]:
    rows = []
    for every, own in costs["ratios"].items():
        low, middle, high = statistics.quantiles(own, n=4, method="inclusive")
        counted = costs["counted"] / int(every)
        rows.append((every, f"{counted:.2%}", f"{middle - 1:+.2%}", f"{low - 1:+.2%} to {high - 1:+.2%}"))
    return markdown(("--watch-interval", "counted", "measured", "quartiles"), rows, "lrrr")


def costs(rounds: int) -> dict[str, Any]:
    """On each rank."""

    from benchmarks.flips import LARGE, _initialize
    from benchmarks.steps import FLAGS, Run
    from helixpipe.runtime.meter import report_of
    from helixpipe.runtime.recording import Clock, Recorder
    from megatron.pretrain.plan.replanning import make_adaptation

    flags = f"{FLAGS} {LARGE} --watch-interval"
    _initialize(f"{flags} 2")
    trainers = {}
    for name in ("0", "2", "1"):
        trainers[name] = trainer = Run(f"{flags} {name}").trainer
        trainer.adaptation = make_adaptation(
            *(trainer.config, trainer.parallel, trainer.pipeline.plans, trainer.state.optimizer),
            steps=trainer.length.iterations,
        )

    taken = in_turn(trainers, rounds, lambda name: seconds_of_steps(trainers[name], TIMED), warm_up=1)
    work, record = trainers["0"]._iteration(record=True)
    assert record is not None
    recorder, ops = Recorder(Clock(trainers["0"].parallel.device)), list(record.ops)
    start = time.perf_counter()
    for op, *_ in ops:
        recorder.ran(op, recorder.mark())
    for message in work.lowered.messages:
        recorder.posted(message)
        recorder.sent(message)
        recorder.arrived(message, recorder.mark())
    report_of(record, 1, 0).to_json()
    counted = time.perf_counter() - start
    step = statistics.median(taken["0"]) / TIMED
    for trainer in trainers.values():
        if trainer.adaptation is not None:
            trainer.adaptation.close()
        trainer.pipeline.close()
    return {
        "seconds": taken,
        "ratios": {name: ratios(taken[name], taken["0"]) for name in ("2", "1")},
        "counted": counted / step,
    }
