"""Flags of a run that watches its own speeds and its own bits, and plans anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option
from megatron.pretrain.config.parallel import PIPELINE


@dataclass(frozen=True)
class AdaptConfig:
    """Flags of watching ranks and links, of what is done where another plan is better, and of checks for silent
    corruption."""

    replan: Literal["off", "advise", "auto"] = option(
        "advise",
        "When ranks or links have become slower: off says so; advise also says whether another order of the same "
        "stages would be faster now; auto switches to it between two steps, and back, and has layers move between "
        "ranks right after a checkpoint where that pays (docs/resilience.md).",
        heading=PIPELINE,
    )
    replan_chunks: bool = option(
        False,
        "Also consider cutting sequences into other chunks, with which losses are equal to rounding only; without, "
        "they stay equal to the digit.",
        heading=PIPELINE,
    )
    watch_interval: int = option(
        2,
        "Steps from one timed step to the next, in which ranks and links are watched; 0 watches nothing.",
        at_least=0,
        heading=PIPELINE,
    )
    check_every: int = option(
        0,
        "Check for bits that are not what they should be: weights in memory and messages in every step, and every so "
        "many steps the replicas' weights, and one microbatch that all replicas compute; 0 checks nothing "
        "(docs/resilience.md).",
        at_least=0,
        heading=PIPELINE,
    )
    watch_dir: str | None = option(
        None,
        "Folder of live.json, the run's state for `helixpipe watch` (default: --save).",
        metavar="DIR",
        heading=PIPELINE,
    )
