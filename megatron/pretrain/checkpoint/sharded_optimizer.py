"""The state of an optimizer of weights' parts (`ShardedWeights`) in a checkpoint.

It is written as megatron-core's distributed optimizer writes its own (`fully_reshardable`): tensors in the shapes of
the weights, gathered unit by unit into the host's memory, and plain values beside them. So either reads what the other
wrote, and with `optimizer.convert` so do the others. When it is loaded every rank reads whole tensors and keeps its
parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from helixpipe.runtime.sharded_weights import FlatWeights, ShardedWeights, WeightShard
from megatron.pretrain.checkpoint.chained import EXPERTS, joined_groups
from megatron.pretrain.checkpoint.optimizer import (
    SHARDING,
    WholeOptimizer,
    complete_state,
    counts_by_group,
    matched,
    rates,
    saved_steps,
    set_rates,
)

_STATE = "optimizer.state."


class SavedOptimizer(Protocol):
    """An optimizer as checkpoints see it. saved_as: in the words of `optimizer.saved_class`."""

    saved_as: str

    def state(self, model_state: dict[str, Any], is_loading: bool = False) -> dict[str, Any]:
        """Return the state to save, or to be filled by loading. model_state: the model's own."""
        ...

    def copies(self, state: dict[str, Any]) -> Iterator[tuple[Any, Any, Tensor]]:
        """Yield (list or dict, place in it, weight) of the float32 copies in the state."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Take what has been read, in the form of `saved_as`."""
        ...


def saved_optimizer(optimizer: Any, sharded: ShardedWeights | None, metadata: dict[str, Any]) -> SavedOptimizer:
    """Return the optimizer's saved form. metadata: for megatron-core's sharded state."""
    return WholeOptimizer(optimizer, metadata) if sharded is None else PartsOptimizer(sharded, optimizer)


def whole_weights(sharded: ShardedWeights | None) -> AbstractContextManager[None]:
    """Return a context in which weights sharded over data-parallel ranks are gathered."""
    return nullcontext() if sharded is None else sharded.whole()


class PartsOptimizer:
    """The saved state of a megatron-core optimizer whose parameters are shards of the weights. All methods run while
    the weights are gathered (`ShardedWeights.whole`), since the model's state then has their entries. Collective over
    data-parallel ranks.
    """

    saved_as = "distributed"

    def __init__(self, sharded: ShardedWeights, optimizer: Any):
        self._sharded, self._optimizer = sharded, optimizer
        inner = [each.optimizer for each in self._optimizers()]
        self._holders = {id(main): one for one in inner for group in one.param_groups for main in group["params"]}

    def state(self, model_state: dict[str, Any], is_loading: bool = False) -> dict[str, Any]:
        complete_state(self._optimizer)
        entries = {id(entry.data): entry for entry in model_state.values()}
        tensors: dict[int, dict[str, Any]] = {}
        for unit in self._sharded.units:
            values = {name: self._values(unit, name, is_loading) for name in self._names()}
            for place, weight in enumerate(unit.weights.values()):
                entry = entries[id(weight)]
                tensors[len(tensors)] = {name: _like(entry, name, ids[place]) for name, ids in values.items()}
        every = joined_groups({"param_groups": each.param_groups} for each in self._optimizers())
        groups = [{name: value for name, value in group.items() if name != "params"} for group in every]
        step = self._step()
        state: dict[str, Any] = {
            "optimizer": {"param_groups": [{**group, "step": step} for group in groups]},
            "param_state": tensors,
            "param_state_sharding_type": SHARDING["distrib_optim_sharding_type"],
        }
        if scalers := self._scalers():  # all alike
            state["grad_scaler"] = scalers[0].state_dict()
        return state

    def copies(self, state: dict[str, Any]) -> Iterator[tuple[Any, Any, Tensor]]:
        weights = (weight for unit in self._sharded.units for weight in unit.weights.values())
        yield from ((state["param_state"][index], "param", weight) for index, weight in enumerate(weights))

    def load(self, state: dict[str, Any]) -> None:
        complete_state(self._optimizer)
        for scaler in self._scalers() if "grad_scaler" in state else ():
            scaler.load_state_dict(state["grad_scaler"])
        groups = list(self._groups())
        saved = matched(groups, state["optimizer"]["param_groups"])
        steps = saved_steps(state)
        by_group = any(counts_by_group(each.optimizer) for each in self._optimizers())
        for group, values in zip(groups, saved, strict=True):
            kept = {name: group[name] for name in ("params", EXPERTS) if name in group}
            of_flags = rates(group)
            group.update({**values, **kept, "step": steps})
            set_rates(group, of_flags)
            if not by_group:
                group.pop("step")
        whole = iter(state["param_state"].values())
        for unit in self._sharded.units:
            of_weight = {name: next(whole) for name in unit.weights}
            for part in unit.parts:
                self._load_part(part, of_weight[part.name], steps)

    def _load_part(self, part: WeightShard, whole: dict[str, Tensor], steps: int) -> None:
        main, own = self._main(part), self._state_of(part)
        with torch.no_grad():
            for name in self._names():
                share = whole[name].detach().reshape(-1)[part.start : part.end].view(main.shape)
                target = main if name == "param" else own.setdefault(name, torch.zeros_like(main))
                target.detach().copy_(share)
        if "step" in own:
            own["step"] = torch.tensor(steps, dtype=torch.float32)

    # ------------------------------------------------------------------------------------------------------- details

    def _values(self, unit: FlatWeights, name: str, is_loading: bool) -> list[Tensor]:
        """Return a value of all weights of a unit, whole and in the host's memory; uninitialised if it is
        to be read.
        """
        if is_loading:
            return [torch.empty(shape, dtype=self._dtype(unit)) for shape in unit.shapes.values()]
        own = torch.zeros(unit.shard.numel(), dtype=self._dtype(unit), device=unit.shard.device)
        for part in unit.parts:
            value = self._main(part) if name == "param" else self._state_of(part).get(name)
            if value is not None:
                unit.range_in(own, part).copy_(value.detach().reshape(-1))
        return [view.to("cpu", copy=True) for view in unit.views(unit.all_parts(own))]

    def _dtype(self, unit: FlatWeights) -> torch.dtype:
        return torch.promote_types(unit.shard.dtype, torch.float32)

    def _names(self) -> tuple[str, ...]:
        """Return the names of the values kept for each shard of a weight."""
        config = self._inner()[0].config
        if config.optimizer == "adam":
            return ("param", "exp_avg", "exp_avg_sq")
        return ("param", "momentum_buffer") if config.sgd_momentum else ("param",)

    def _inner(self) -> list[Any]:
        return list(self._optimizer.chained_optimizers)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers() for group in each.optimizer.param_groups]

    def _optimizers(self) -> list[Any]:
        """Return those of the chain that have parameters."""
        return [each for each in self._inner() if each.optimizer is not None]

    def _scalers(self) -> list[Any]:
        return [each.grad_scaler for each in self._inner() if getattr(each, "grad_scaler", None)]

    def _main(self, part: WeightShard) -> Tensor:
        """Return the float32 copy of a shard, or the shard itself if it is not of half precision."""
        main: Tensor = getattr(part.parameter, "main_param", part.parameter)
        return main

    def _state_of(self, part: WeightShard) -> dict[str, Any]:
        main = self._main(part)
        own: dict[str, Any] = self._holders[id(main)].state[main]
        return own

    def _step(self) -> int:
        """Return the updates so far; the same on all ranks."""
        states = [self._state_of(part) for part in self._sharded.parts()[:1]]
        return max((int(each["step"]) for each in [*states, *self._groups()] if "step" in each), default=0)


def _like(entry: Any, name: str, value: Tensor) -> Any:
    """Return an entry of the optimizer's state that is laid out in the checkpoint as the weight is."""
    changes: dict[str, Any] = {"key": f"{_STATE}{name}.{entry.key}", "data": value}
    if not isinstance(entry, ShardedTensorFactory):
        changes["dtype"] = value.dtype
    return replace(entry, **changes)
