"""Runs on the rank of test_wrong_types.py."""

from __future__ import annotations

import contextlib
import copy
import io
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import known
from megatron.pretrain.checkpoint.saved_arguments import read_arguments
from tests.checkpoint import cases
from tests.checkpoint.damage import UNLISTED
from tests.checkpoint.runs import Layout, Run
from tests.hunt import SEED

OTHERS = ["text", "", 7, -3, 10**30, 2.5, float("nan"), True, None, [], [1, "a"], {}, {"a": 1}, torch.ones(3), (0.9,)]
LAYOUTS = {"float32": Layout(), "zero": Layout(distributed_optimizer=True), "bf16": Layout(bf16=True)}


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in plain values, from the whole on."""
    yield before
    value = vars(value) if isinstance(value, Namespace) else value
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, (list, tuple)) else ()
    for key in keys:
        yield from places(value[key], (*before, key))


def replaced(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    if not place:
        return other
    changed = copy.copy(value)
    inner: Any = vars(changed) if isinstance(changed, Namespace) else changed
    if isinstance(inner, tuple):
        return tuple(replaced(each, place[1:], other) if i == place[0] else each for i, each in enumerate(inner))
    inner[place[0]] = replaced(inner[place[0]], place[1:], other)
    return changed


def replacing_anything(rank: int, world_size: int, folder: str) -> dict[str, tuple[int, int]]:
    """By layout, how often another value in the place of any was refused, and how often it was loaded."""
    return {name: replacing(layout, Path(folder, name)) for name, layout in LAYOUTS.items()}


def replacing(layout: Layout, directory: Path) -> tuple[int, int]:
    """Put another value in the place of any, load, and train a step: what fails says so in a sentence."""
    Run(layout).train(1).save(directory)
    newest = directory / "iter_0000001"
    UNLISTED(newest)
    common = known.load_common(newest)
    outcomes: list[str] = []
    group = next(place[:-1] for place in places(common) if place[-1:] == ("eps",))

    @example((*group, "eps"), 10**30)  # more than 64 bits, which no tensor can hold
    @example((*group, "eps"), None)
    @example((*group, "betas"), None)
    @example((*group, "amsgrad"), True)  # its state has no maxima
    @example((*group, "capturable"), True)
    @example((*group, "foreach"), torch.ones(3))
    @seed(SEED)
    @settings(max_examples=15, deadline=None, database=None)
    @given(st.sampled_from(list(places(common))), st.sampled_from(OTHERS))
    def load(place: tuple[Any, ...], other: Any) -> None:
        torch.save(replaced(common, place, other), newest / "common.pt")
        run = Run(layout, seed=2)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run.load(directory)
                read_arguments(str(directory))
        except CheckpointError as error:
            assert "\n" not in str(error) and str(error).endswith("."), str(error)
            assert str(directory) in str(error) or "the checkpoint's optimizer" in str(error), str(error)
            outcomes.append("refused")
        else:
            run.train(1)
            outcomes.append("loaded")

    load()
    return outcomes.count("refused"), outcomes.count("loaded")


def named(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Return what is said of some of them."""
    directory = Path(folder)
    Run(cases.DP).train(1).save(directory)
    newest = directory / "iter_0000001"
    UNLISTED(newest)
    common = known.load_common(newest)
    told = {}
    for place, other in (
        ((), [1]),
        (("iteration",), "five"),
        (("args",), 5),
        (("args", "consumed_train_samples"), "many"),
        (("args", "index_samples"), [3]),
        (("optimizer",), [1]),
        (("optimizer", "param_groups", 0, "eps"), "small"),
        (("optimizer", "param_groups", 0, "betas", 1), 7),
        (("opt_param_scheduler", "num_steps"), "x"),
    ):
        torch.save(replaced(common, place, other), newest / "common.pt")
        told[".".join(map(str, place))] = cases.message(lambda: Run(cases.DP, seed=2).load(directory))
    return told
