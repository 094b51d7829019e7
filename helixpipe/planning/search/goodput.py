"""Goodput of a large job: the share of its time that trains, beside checkpoints and failures.

A job of many GPUs fails every few hours and goes on from its last checkpoint. Writing checkpoints more often costs more
time, and less is lost by a failure; the best time between them is about sqrt(2 C M), with C the time of a checkpoint
and M the mean time between failures (Young, "A first order approximation to the optimum checkpoint interval", CACM
1974; Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006, equation 37).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIGA

GPU_HOURS = 24 * 54 * 16384 / 419
"""Hours of one GPU between failures that end the job: 419 unexpected interruptions in 54 days of 16,384 H100
(Grattafiori et al., "The Llama 3 herd of models", 2024)."""

RESTART = 600.0
"""Seconds from a failure to the first step after it, without loading and what was lost: detection and diagnosis take
less than 10 minutes on average (Jiang et al., MegaScale, NSDI 2024)."""

LARGE = 1024
"""GPUs from which on goodput is said."""

CHECKPOINT_BYTES = 14
"""Bytes that a checkpoint has of a weight: bfloat16, and Adam's float32 copy and two moments."""


@dataclass(frozen=True)
class GoodputOptions:
    """Failures and checkpoints of a long run."""

    mtbf_hours: float | None = option(
        None,
        f"Hours between failures of the whole job (default: {GPU_HOURS:,.0f} over the number of GPUs, as in Llama 3's "
        "training).",
        metavar="HOURS",
        more_than=0,
    )
    checkpoint_bandwidth: float = option(
        1.0,
        "GB/s of a node to the storage of checkpoints (1: 2 TB/s over 2,048 nodes, Llama 3's sustained).",
        metavar="X",
        more_than=0,
    )
    restart_minutes: float = option(
        RESTART / 60, "Minutes from a failure until a checkpoint is loaded again.", metavar="MINUTES", at_least=0
    )


@dataclass(frozen=True)
class Goodput:
    """Checkpoints and failures of a run. checkpoint, interval, failures: seconds that a checkpoint takes, between two
    of them, and between two failures. nbytes: of a checkpoint. share: of the time that is spent on steps that count.
    """

    nbytes: float
    checkpoint: float
    interval: float
    failures: float
    share: float


def goodput_of(options: GoodputOptions, weights: float, gpus: int, nodes: int) -> Goodput:
    """Return the goodput with the best time between checkpoints. weights: of the whole model, which all nodes write
    and read together, each its part."""
    nbytes = weights * CHECKPOINT_BYTES
    checkpoint = nbytes / (options.checkpoint_bandwidth * GIGA * nodes)
    hours = options.mtbf_hours or GPU_HOURS / gpus
    failures = 3600 * hours
    interval = best_interval(checkpoint, failures)
    restart = 60 * options.restart_minutes + checkpoint  # reading takes as long as writing
    return Goodput(nbytes, checkpoint, interval, failures, useful_share(interval, checkpoint, restart, failures))


def best_interval(checkpoint: float, failures: float) -> float:
    """Return the seconds of training between two checkpoints that lose the least (Daly, equation 37). checkpoint,
    failures: seconds of a checkpoint, and between two failures."""
    if checkpoint >= 2 * failures:
        return failures
    ratio = checkpoint / (2 * failures)
    return sqrt(2 * checkpoint * failures) * (1 + sqrt(ratio) / 3 + ratio / 9) - checkpoint


def useful_share(interval: float, checkpoint: float, restart: float, failures: float) -> float:
    """Return the part of the time that trains, where failures come at random: an interval t with its checkpoint C takes
    M e^(R/M) (e^((t+C)/M) - 1) on average (Daly's complete model). All in seconds."""
    return interval / (failures * exp(restart / failures) * expm1((interval + checkpoint) / failures))
