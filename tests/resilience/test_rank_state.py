"""A rank's state in a snapshot: what is trained on from it is what would have been, bit for bit, and shares of the
optimizer's state find each other when there are more ranks or fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.resilience.rank_state import RankState
from tests.checkpoint.runs import Layout, Run
from tests.distributed import run_ranks

ZERO = Layout(distributed_optimizer=True)
LAYOUTS = {
    "pp2": Layout(pp=2),
    "tp2 bf16": Layout(tp=2, bf16=True),
    "cp2 zero": Layout(cp=2, distributed_optimizer=True),
    "zero": ZERO,
    "zero bf16": Layout(distributed_optimizer=True, bf16=True),
    "untied spread head": Layout(pp=2, spread_head=True, tied=False),
    "weipipe": Layout(pp=2, schedule="weipipe"),
    "experts": Layout(pp=2, experts=True),
    "ends": Layout(pp=2, ends_lr=3e-2),
}
RESHARDED = ("zero", "zero bf16")


def state_of(run: Run, identity: str = "this") -> RankState:
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return RankState(run.model, run.optimizer, run.scheduler, place, group.rank(), group.size(), identity)


def body_of(run: Run) -> torch.Tensor:
    state = state_of(run)
    body = torch.full((state.size,), 255, dtype=torch.uint8)
    state.write(body, run.progress)
    return body


def bodies_of(state: RankState, body: torch.Tensor) -> list[torch.Tensor]:
    """Those that this rank's place needs, of all ranks."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, body)
    by = [state.taken_by(each) for each in (body, *gathered)]
    own = [each for each, its in zip(gathered, by[1:], strict=True) if its and by[0] and its.place == by[0].place]
    return own[-1:] if by[0] and by[0].complete else own


def equal(run: Run, other: Run) -> str:
    """'' when two runs have equal states, bit for bit."""
    for number, (a, b) in enumerate(zip(run.tensors(), other.tensors(), strict=True)):
        if not torch.equal(a, b):
            return f"tensor {number} differs by {(a.float() - b.float()).abs().max()}"
    if run.scheduler.state_dict() != other.scheduler.state_dict() or run.progress != other.progress:
        return f"{other.progress}, {other.scheduler.state_dict()}"
    groups = zip(run.optimizer.param_groups, other.optimizer.param_groups, strict=True)
    return "" if all({**a, "params": []} == {**b, "params": []} for a, b in groups) else "other settings"


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, str]:
    results = {}
    for name, layout in LAYOUTS.items():
        run = Run(layout).train(2)
        for group in run.optimizer.param_groups:  # as a checkpoint may have set them
            group["betas"] = 0.8, 0.9
        run.scheduler.lr_decay_steps += 50
        run.train(1)
        state, body = state_of(run), body_of(run)
        bodies = bodies_of(state, body)
        torch.save((bodies, run.tensors()), f"{folder}/{name}.{rank}")
        drawn = torch.rand(3)
        again = Run(layout, seed=2)
        again.progress = state_of(again).restore(bodies)
        results[name] = equal(run, again) or ("" if torch.equal(drawn, torch.rand(3)) else "other random numbers")
        results[name] = results[name] or equal(run.train(2), again.train(2))
    return results


def on_one_rank(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """From what two ranks had a part of each; two further steps give what they give there."""
    results = {}
    for name in RESHARDED:
        bodies, _ = torch.load(f"{folder}/{name}.0")
        run = Run(LAYOUTS[name], seed=3)
        run.progress = state_of(run).restore(bodies)
        torch.save((body_of(run), [weight.detach() for weight in run.model.parameters()]), f"{folder}/{name} whole")
        results[name] = "" if run.progress.iteration == 3 else str(run.progress)
        assert state_of(run, "another").taken_by(bodies[0]) is None
    other = Run(Layout(distributed_optimizer=True, hidden_size=32))
    with pytest.raises(CheckpointError, match="lack elements of"):
        state_of(other).restore(bodies)
    return results


def on_two_ranks_again(rank: int, world_size: int, folder: str) -> dict[str, str]:
    results = {}
    for name in RESHARDED:
        body, weights = torch.load(f"{folder}/{name} whole")
        _, before = torch.load(f"{folder}/{name}.{rank}")
        run = Run(LAYOUTS[name], seed=4)
        run.progress = state_of(run).restore([body])
        same = all(map(torch.equal, run.tensors(), before)) and all(map(torch.equal, run.model.parameters(), weights))
        results[name] = "" if same else "differs"
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    folder: Path = tmp_path_factory.mktemp("states")
    works = {"same": (on_two_ranks, 2), "fewer": (on_one_rank, 1), "more": (on_two_ranks_again, 2)}
    return {name: run_ranks(work, ranks, str(folder)) for name, (work, ranks) in works.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_goes_on_as_if_nothing_had_been(results: dict[str, list[dict[str, str]]], name: str) -> None:
    assert [each[name] for each in results["same"]] == ["", ""]


@pytest.mark.parametrize("name", RESHARDED)
def test_fewer_ranks_and_more_find_the_optimizers_state(results: dict[str, list[dict[str, str]]], name: str) -> None:
    assert [each[name] for each in results["fewer"]] == [""]
    assert [each[name] for each in results["more"]] == ["", ""]
