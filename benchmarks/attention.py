"""The helix rows of bench.py: attention-heavy sequences, attention of a layer on both ranks at once."""

from __future__ import annotations

from benchmarks.engines import Engine, OurEngine, Pairs, Problem, found
from benchmarks.other_engines import megatron_core
from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules.helix import HelixOptions


def helix(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Without recomputation all do the same work; with it all make everything but attention twice."""
    folds = [folds for folds in (1, 2) if problem.count % (2 * folds) == 0]
    again = RecomputeOptions("without-attention")
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        "megatron-core 1F1B, its GPTModel": megatron_core(problem, whole=True),
        "ours, zb1p": OurEngine(problem, found(problem, "zb1p")),
    }
    others = list(every)
    for fold in folds:
        for ship in ("none", "qkv", "attention"):
            options = HelixOptions(fold, ship, helix_recompute=False)
            every[f"ours, helix, {fold} folds, ship {ship}"] = OurEngine(problem, problem.program("helix", options))
    pairs = [(name, other) for other in others for name in every if "helix" in name]
    recomputed = {
        "ours, 1f1b, all but attention recomputed": problem.program("1f1b", recompute=again),
        "ours, helix, all but attention recomputed": problem.program("helix", HelixOptions(folds[-1]), recompute=again),
    }
    every |= {name: OurEngine(problem, program) for name, program in recomputed.items()}
    return every, [*pairs, tuple(reversed(list(recomputed)))]
