"""Bits flipped in training: how many `--check-every` finds within its N steps, whom it names, and what it costs.

    make bench-flips ARGS="[--flips 10] [--every 10] [--rounds 7] [--output docs/resilience.md]"

Two pipeline ranks, two replicas, on this machine's CPU; each flip is of a random bit of a random float32 value on a
random rank in a random step, in a run of its own. `exponent`: one of the sign's and the exponent's 9 bits; `mantissa`:
one of 23. What the checks cost is measured on a larger model, in one process a rank: steps without checks, with those
of every step alone, and with a comparison of replicas every N steps, take turns, N steps each; figures are medians of
the ratios of a round. Predicted: a comparison from a simulation of the one microbatch alone with what the step's ops
took, digests from their bytes and the rate at which this machine makes one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from types import MappingProxyType
from typing import Any

from benchmarks.ranks import on_ranks, seconds_of_steps
from benchmarks.report import Figures, Outcome, Page, markdown
from benchmarks.rounds import in_turn, ratios
from benchmarks.steps import FLAGS, UNCLIPPED
from helixpipe.common.flags import option

RANKS = 4
SMALL = (
    "--hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--global-batch-size 8 --lr 1e-3 --pipeline-schedule 1f1b --clip-grad 1"
)
LARGE = f"--seq-length 512 --max-position-embeddings 512 --global-batch-size 8 --pipeline-schedule 1f1b {UNCLIPPED}"
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "weight": "weight in memory",
        "state": "optimizer's state in memory",
        "message": "activation or gradient in a message",
        "computed": "output of each forward of a rank",
        "flickering": "output of every second forward of a rank",
        "once": "output of a single forward",
    }
)
"""What a flipped bit is of; of what a rank computes, from then on."""
BITS: Mapping[str, tuple[int, int]] = {"exponent": (23, 31), "mantissa": (0, 22)}
NEVER = 10**6
"""Steps between comparisons that never come."""


@dataclass(frozen=True)
class Options(Figures, Page):
    flips: int = option(10, "Of each kind of value, of each kind of bits.", at_least=1)
    every: int = option(10, "N of --check-every.", at_least=1)
    rounds: int = option(7, "Rounds of the cost that count; 0 leaves it out.", at_least=0)
    seed: int = option(1, "Of what is drawn.")


def run(options: Options) -> Outcome:
    drawn = [
        {"where": where, "bits": bits, **_draw(Random(f"{options.seed} {where} {bits} {number}"), bits, options.every)}
        for where in KINDS
        for bits in BITS
        for number in range(options.flips)
    ]
    found = on_ranks("benchmarks.flips:found", drawn, options.every, ranks=RANKS)
    tables = {"flips": table(found, options.every)}
    costs = None
    if options.rounds:
        costs = on_ranks("benchmarks.flips:costs", options.every, options.rounds, ranks=RANKS)
        tables["flips-cost"] = costs_table(costs)
    text = "\n\n".join("\n".join(lines) for lines in tables.values())
    return Outcome(text, tables=tables, figures={"flips": found, "costs": costs})


def _draw(rng: Random, bits: str, every: int) -> dict[str, int]:
    """State there is from the second step on."""
    return {
        "rank": rng.randrange(RANKS),
        "step": rng.randint(2, every + 1),
        "bit": rng.randint(*BITS[bits]),
        "which": rng.randrange(1000),
        "element": rng.randrange(10**6),
    }


# ------------------------------------------------------------------------------------------------------------- tables


def table(found: Sequence[Mapping[str, Any]], every: int) -> list[str]:
    rows = []
    for where, name in KINDS.items():
        own = [each for each in found if each["where"] == where]
        after = [[each["after"] for each in own if each["bits"] == bits and each["after"] is not None] for bits in BITS]
        rows.append(
            (
                *(name, f"{sum(map(len, after))} of {len(own)}"),
                " / ".join(f"{statistics.median(steps):g}" if steps else "–" for steps in after),
                str(sum(each["named"] == [each["rank"]] for each in own)),
                str(sum(len(each["named"]) == 2 and each["rank"] in each["named"] for each in own)),
            )
        )
    heads = (
        *("a bit flips in", f"found within {every} steps", f"median of steps until then: {' / '.join(BITS)}"),
        *("rank named", "one of two named"),
    )
    return markdown(heads, rows, "lrrrr")


def costs_table(costs: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, says in (("resting", "in every step"), ("compared", f"and replicas every {costs['every']}")):
        low, middle, high = statistics.quantiles(costs["ratios"][name], n=4, method="inclusive")
        rows.append((says, f"{costs['predicted'][name]:.2%}", f"{middle - 1:.2%}", f"{low - 1:.2%} to {high - 1:.2%}"))
    return markdown(("checks", "predicted", "measured", "quartiles"), rows, "lrrr")


# ----------------------------------------------------------------------------------------------------------- on ranks


def _run(flags: str, every: int) -> Any:
    """A trainer whose steps are checked; 0: they are not."""
    from benchmarks.steps import Run
    from megatron.pretrain.step.corruption import make_check

    trainer = Run(f"{flags} --check-every {every}").trainer
    trainer.check = make_check(trainer.config, trainer.parallel, trainer.pipeline, trainer.state)
    return trainer


def _initialize(flags: str) -> None:
    from helixpipe.model.device import prepare

    prepare()
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.process.parallel import initialize

    initialize(parse_args(flags.split()))


def found(drawn: Sequence[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """On each rank: each flip with the steps after which it was found, None: never, and the ranks that were named."""
    import re

    from benchmarks.flipping import Flip, inject
    from helixpipe.common.errors import CorruptionError, UserError

    _initialize(f"{FLAGS} {SMALL}")
    outcomes = []
    for each in drawn:
        flip = Flip(**{name: value for name, value in each.items() if name != "bits"})
        trainer = _run(f"{FLAGS} {SMALL}", every)
        if flip.rank == trainer.parallel.rank:
            inject(trainer, flip)
        after, says = None, ""
        try:
            for _ in range(flip.step + every - 1):
                trainer._iteration(record=False)
        except CorruptionError as error:
            after, says = trainer.progress.iteration - flip.step + 1, str(error)
        except UserError:  # a loss that is no number ends the run first, and says nothing of a rank
            pass
        trainer.pipeline.close()
        named = sorted({int(rank) for rank in re.findall(r"rank (\d+) \(pipeline", says)})
        outcomes.append({**asdict(flip), "bits": each["bits"], "after": after, "named": named})
    return outcomes


def costs(every: int, rounds: int) -> dict[str, Any]:
    """On each rank: the ratios of steps with checks over those without, and what was predicted."""

    flags = f"{FLAGS} {LARGE}"
    _initialize(flags)
    trainers = {name: _run(flags, often) for name, often in (("off", 0), ("resting", NEVER), ("compared", every))}

    taken = in_turn(trainers, rounds, lambda name: seconds_of_steps(trainers[name], every), warm_up=1)
    return {
        "every": every,
        "seconds": taken,
        "ratios": {name: ratios(taken[name], taken["off"]) for name in ("resting", "compared")},
        "predicted": _predicted(trainers["off"], trainers["compared"], every, statistics.median(taken["off"]) / every),
    }


def _predicted(trainer: Any, checked: Any, every: int, step: float) -> dict[str, float]:
    """As shares of a step. Collective."""
    import torch

    from helixpipe.costs.by_hand import OpTimes
    from helixpipe.lowering.lower import lower
    from helixpipe.program.alone import alone
    from helixpipe.runtime.digests import digest
    from helixpipe.simulate.simulator import simulate

    checked.check.begin()
    resting = 2 * sum(tensor.nbytes for tensor in checked.check._resting.values())
    work, record = trainer._iteration(record=True)
    model, batches = trainer.config.model, len(work.microbatches)
    messages = 2 * batches * model.seq_length * model.hidden_size * 4  # an activation and a gradient of each
    weights = 2 * sum(weight.nbytes for weight in trainer.state.model.parameters())  # and their gradients
    sample = torch.randn(1 << 22)
    digest(sample)
    start = time.perf_counter()
    for _ in range(5):
        digest(sample)
    rate = 5 * sample.nbytes / (time.perf_counter() - start)
    times: dict[tuple[str, int, int], list[float]] = {}
    for event in trainer.pipeline.recorded(record, work.lowered).measured.ops:
        times.setdefault((event.op.kind, event.op.stage, 0), []).append(event.end - event.start)
    one = alone(work.lowered.program, 0)
    taken = simulate(lower(one), OpTimes(one, {key: statistics.median(each) for key, each in times.items()})).makespan
    in_every = (resting + messages) / rate / step
    return {"resting": in_every, "compared": in_every + (taken + weights / rate) / every / step}
