"""Runs on the ranks of test_schedules.py."""

from __future__ import annotations

from pathlib import Path

import torch

from helixpipe.common.errors import CheckpointError
from helixpipe.lowering.validate import validate
from schedules import CATALOGUE
from tests.checkpoint.async_cases import unlike_at_once
from tests.checkpoint.runs import REPLICATED_LAYERS, Layout, Run, contents

WHOLE = Layout(num_layers=4)  # as many layers as every schedule can place on two ranks
NAMES = (*CATALOGUE, REPLICATED_LAYERS)


def round_trips(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, str]:
    """For each schedule, what is wrong with the checkpoints of a run that it places; '' for nothing."""
    Run(WHOLE).train(1).save(f"{folder}/whole")
    expected = contents(Path(folder, "whole/iter_0000001"))
    results = {}
    for name in names:
        try:
            results[name] = round_trip(Path(folder, name.replace(" ", "-")), name, expected)
        except CheckpointError as error:  # the same on both ranks, which can go on
            results[name] = str(error)
    return results


def round_trip(directory: Path, schedule: str, expected: dict[str, torch.Tensor]) -> str:
    """Train a step, save, and load in a run of another seed. expected: what a run with the whole model on one rank has
    saved after as many steps."""
    layout = Layout(pp=1 if schedule == "none" else 2, num_layers=WHOLE.num_layers, schedule=schedule)
    validate(layout.program())
    run = Run(layout).train(1).save(directory)
    saved = contents(directory / "iter_0000001")
    if saved.keys() != expected.keys():
        return f"only one of this run and one without a pipeline saves {saved.keys() ^ expected.keys()}"
    if differing := [name for name in saved if not torch.equal(saved[name], expected[name])]:
        return f"saved unlike a run without a pipeline: {differing}"
    if wrong := unlike_at_once(Run(layout).train(1), directory / "async"):
        return f"saved beside training: {wrong}"
    again = Run(layout, seed=2)
    again.load(directory)
    if again.progress != run.progress or again.scheduler.state_dict() != run.scheduler.state_dict():
        return f"resumed at {again.progress}, not {run.progress}"
    ours, loaded = run.tensors(), again.tensors()
    same = [torch.equal(one, other) for one, other in zip(ours, loaded, strict=False)]
    return "" if len(ours) == len(loaded) and all(same) else f"loaded {len(loaded)} tensors of {len(ours)}: {same}"
