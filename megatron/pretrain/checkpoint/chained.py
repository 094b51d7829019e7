"""One saved state for the optimizers that megatron-core chains: with experts over several ranks, one of the weights
that data-parallel ranks share, and one of the experts.

A checkpoint has the layout of a single optimizer, whatever number is chained: groups of weights that differ in nothing
but in whose experts they are become one. So any expert-parallel size reads what another wrote, and no size the other's
order of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr")  # tells groups apart in every release
EXPERTS = "is_expert_parallel"
_PARAMETERS, _STATES, _COPIES, _TENSORS = "params", "state", "fp32_from_fp16_params", "param_state"


def identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the multipliers of a group, by which groups are told apart."""
    multipliers = (group[name] if name in group else group.get(f"pre_{name}") for name in _IDENTITY)
    return (*multipliers, group.get("default_config", True))  # False with rates of its own (--decoupled-lr)


def saved_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's state, of any class."""
    if is_chained(state):
        return joined_groups(each for _, each in sorted(state.items()))
    groups: list[dict[str, Any]] = state.get("optimizer", state)["param_groups"]
    return groups


def is_chained(state: Mapping[Any, Any]) -> bool:
    """Whether a saved state is of several optimizers, side by side, as megatron-core saves them."""
    return 0 in state


def plain_joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of the plain values of several: those of the first, with groups that only others have."""
    return {**states[0], **_with_groups(states[0], joined_groups(states))}


def joined(parts: Sequence[Any], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of the sharded states of several optimizers."""
    groups = joined_groups(states)
    state = {**states[0], **_with_groups(states[0], groups)}
    if _TENSORS in state:
        tensors = [tensor for each in states for _, tensor in sorted(each[_TENSORS].items())]
        state[_TENSORS] = dict(enumerate(tensors))
        return state
    copies: list[list[Any]] = [[] for _ in groups]
    numbers: list[list[int]] = [[] for _ in groups]
    values: dict[Any, Any] = {}
    for each, first in zip(states, _firsts(parts), strict=True):
        own = saved_groups(each)
        for number, place in enumerate(_places(own, groups)):
            numbers[place] += [first + index for index in own[number][_PARAMETERS].unwrap()]
            copies[place] += each.get(_COPIES, [[]] * len(own))[number]
        inner = each.get("optimizer", each)[_STATES]
        values.update((first + key if isinstance(key, int) else key, value) for key, value in inner.items())
    for group, own_numbers in zip(groups, numbers, strict=True):
        group[_PARAMETERS] = LocalNonpersistentObject(own_numbers)
    state.get("optimizer", state)[_STATES] = values
    if _COPIES in state:
        state[_COPIES] = copies
    return state


def divided(parts: Sequence[Any], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the loaded state of each of several optimizers, from that of one. The reverse of `joined`."""
    groups = saved_groups(state)
    tensors = iter((state.get(_TENSORS) or {}).values())
    copies = [iter(each) for each in state.get(_COPIES, ())]
    states = []
    for part, first in zip(parts, _firsts(parts), strict=True):
        places = _places(part.param_groups, groups)
        own = {**state, **_with_groups(state, _own_groups(part, [groups[place] for place in places]))}
        inner, count = own.get("optimizer", own), _count(part)
        if _STATES in inner:
            inner[_STATES] = {
                key - first if isinstance(key, int) else key: value
                for key, value in inner[_STATES].items()
                if not isinstance(key, int) or first <= key < first + count
            }
        if _COPIES in state:
            sizes = map(len, part.float16_groups)
            own[_COPIES] = [list(islice(copies[place], size)) for place, size in zip(places, sizes, strict=True)]
        if _TENSORS in state:
            own[_TENSORS] = dict(enumerate(islice(tensors, len(weights_of(part)))))
        states.append(own)
    return states


def _own_groups(part: Any, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the values of saved ones and numbers of its own weights."""
    groups, first = [], 0
    for group, values in zip(part.optimizer.param_groups, saved, strict=True):
        end = first + len(group[_PARAMETERS])
        numbers = {_PARAMETERS: list(range(first, end))} if _PARAMETERS in values else {}
        groups.append({**values, **numbers, EXPERTS: group.get(EXPERTS, False)})
        first = end
    return groups


def _count(part: Any) -> int:
    """Return how many weights an optimizer has here."""
    return sum(len(group[_PARAMETERS]) for group in part.optimizer.param_groups)


def weights_of(part: Any) -> list[Any]:
    """Return the weights of a distributed optimizer, in the order of its saved tensors; of others, none."""
    buffers = part.buffers if isinstance(part, DistributedOptimizer) else ()
    return [weight for buffer in buffers for weight in buffer.param_index_map]


def half_weights(parts: Sequence[Any]) -> list[list[Any]]:
    """Return the weights of half precision of optimizers with float32 copies of them, in the order of the saved
    copies."""
    halves = [part for part in parts if isinstance(part, Float16OptimizerWithFloat16Params)]
    groups = joined_groups([{"param_groups": part.param_groups} for part in halves])
    weights: list[list[Any]] = [[] for _ in groups]
    for part in halves:
        for place, own in zip(_places(part.param_groups, groups), part.float16_groups, strict=True):
            weights[place] += own
    return weights


def _firsts(parts: Sequence[Any]) -> list[int]:
    """Return the number of each optimizer's first weight among those of all."""
    return list(accumulate(map(_count, parts), initial=0))[:-1]


def joined_groups(states: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the groups of all states, those of the same multipliers once."""
    groups: list[dict[str, Any]] = []
    for state in states:
        own = saved_groups(state)
        new = [group for group, place in zip(own, _places(own, groups), strict=True) if place == len(groups)]
        groups += [{**group, EXPERTS: False} for group in new]
    return groups


def _places(own: Iterable[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> list[int]:
    """Return which of `groups` each of an optimizer's own is: in order among those of the same multipliers; their
    number where none is left."""
    waiting: dict[tuple[Any, ...], list[int]] = {}
    for index, group in enumerate(groups):
        waiting.setdefault(identity(group), []).append(index)
    own_waiting = (waiting.get(identity(group)) for group in own)
    return [rest.pop(0) if rest else len(groups) for rest in own_waiting]


def _with_groups(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what of a state's entries holds the groups, with others in their place."""
    if "optimizer" in state:
        return {"optimizer": {**state["optimizer"], "param_groups": groups}}
    return {"param_groups": groups}
