"""The optimizer in a checkpoint: state that exists before the first step, and conversion between optimizer classes.

megatron-core has three: with float32 weights, with half-precision weights and float32 copies, and the distributed
optimizer. In its model-space format (`fully_reshardable`) all of them store moments as tensors shaped like the weights,
whatever p, TP and DP; they differ in the name of the float32 copy and in where the number of steps is. Renaming what is
asked for, before the tensors are read, and rearranging the few plain values, after, lets any of them read any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint.chained import (
    EXPERTS,
    divided,
    half_weights,
    identity,
    is_chained,
    joined,
    plain_joined,
    saved_groups,
    weights_of,
)

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""How megatron-core lays out tensors: independent of p, TP and DP, with one stacked tensor for all layers."""

_STATE = "optimizer.state."
_CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")  # in the groups of an optimizer with state on the host
_KERNELS = ("bias_correction", "fused")  # there, too: settings of this program, not of what was saved
_TAG = "is_decoupled_lr"  # of what tells groups apart, what no release uses for anything else
RATES = ("max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""The entries of a group that come from this run's flags. megatron-core 0.19 also tells groups apart by them, 0.16
takes the saved ones.
"""

_COPIES = ("param", "fp32_param")  # the float32 copy's name with the distributed optimizer, and without


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers in a ChainedOptimizer that have parameters."""
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    return [part for part in parts if weights_of(part) or any(group["params"] for group in part.param_groups)]


def _adam_states(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield (parameter, state) of torch's Adam; nothing for fused ones, which keep their steps elsewhere."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        for each in inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]:
            if isinstance(each, (torch.optim.Adam, torch.optim.AdamW)):
                for group in each.param_groups:
                    yield from ((parameter, each.state[parameter]) for parameter in group["params"])


def counts_by_group(inner: torch.optim.Optimizer) -> bool:
    """Return whether an Adam counts its steps in its groups, as Apex's and Transformer Engine's FusedAdam do.

    torch's Adam counts them for each weight.
    """
    return not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, HybridDeviceOptimizer))


def saved_steps(state: dict[str, Any]) -> int:
    """Return how many steps Adam had made when its state was saved, in any layout.

    torch's count is saved once, as `common_step`; FusedAdam's and the distributed optimizer's in each group. Where both
    are there, the smaller one belongs to an optimizer that was replaced.

    Raises:
        CheckpointError: If groups of weights have made different numbers of steps, or something is no number of steps.
    """
    states = list(state.values()) if is_chained(state) else [state]
    groups = [group for each in states for group in saved_groups(each)]
    counts = {_step_count(group["step"]) for group in groups if group.get("step") is not None}
    if len(counts) > 1:
        raise CheckpointError(
            f"the checkpoint's optimizer has made {' and '.join(map(str, sorted(counts)))} steps of Adam for groups of "
            "weights, but one number is kept for all; pass --no-load-optim to load the weights alone."
        )
    common = [each.get("optimizer", each).get("state", {}).get("common_step", 0) for each in states]
    return max(*counts, *map(_step_count, common), 0)


def _step_count(saved: Any) -> int:
    """Return a saved number of steps: a number, or a tensor of one. Raises CheckpointError for anything else."""
    number = saved.item() if isinstance(saved, torch.Tensor) and saved.numel() == 1 else saved
    if not isinstance(number, (int, float)) or number % 1 != 0 or not 0 <= number < 2**53:
        raise CheckpointError(
            f"the checkpoint's optimizer has made {str(saved)[:40]} steps of Adam, which is no number of steps; pass "
            "--no-load-optim to load the weights alone."
        )
    return int(number)


def _momenta(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield (parameter, state) of torch's SGD where it has momentum."""
    for inner in (part.optimizer for part in parts_of(optimizer)):
        for group in inner.param_groups if isinstance(inner, torch.optim.SGD) else ():
            yield from ((parameter, inner.state[parameter]) for parameter in group["params"] if group["momentum"])


def _hybrids(optimizer: Any) -> list[HybridDeviceOptimizer]:
    """Return the optimizers that keep state on the host."""
    return [part.optimizer for part in parts_of(optimizer) if isinstance(part.optimizer, HybridDeviceOptimizer)]


def complete_state(optimizer: Any) -> None:
    """Give torch's Adam, and SGD, the state it would have before its first step, where it has none.

    megatron-core's own initialisation leaves the number of steps out, without which its distributed optimizer can be
    neither saved nor loaded. Every parameter gets its own counter: the distributed optimizer loads one tensor shared by
    all of them, which torch would then increment once a parameter. From groups of an optimizer with state on the host
    it takes classes, which no checkpoint may hold.
    """
    for parameter, state in _adam_states(optimizer):
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(parameter.data)
            state[moment] = state[moment].to(parameter.device)  # megatron-core takes torch's Adam to be on the host
        steps = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).detach().clone().reshape(())
        if not steps >= 0:
            raise ValueError(f"an optimizer cannot have made {float(steps)} steps")
        state["step"] = steps
    for parameter, state in _momenta(optimizer):
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter.data)
    for hybrid in _hybrids(optimizer):
        hybrid._sync_sub_optimizers_state_to_hdo()
        for group in hybrid.param_groups:
            for name in _CLASSES:
                group.pop(name, None)


def request_saved_names(copies: Iterable[tuple[Any, Any, torch.Tensor]], saved: Collection[str]) -> None:
    """Ask for the float32 copies by the name the checkpoint has for them, in place. copies: (list or dict, place in it,
    weight) of each. saved: all names of the checkpoint.

    Where it has none, the copy is made from the weight, once that is loaded.
    """
    for holder, place, weight in copies:
        name = holder[place].key.removeprefix(_STATE).partition(".")[2]
        names = [key for copy in _COPIES if (key := f"{_STATE}{copy}.{name}") in saved]
        if names:
            holder[place].key = names[0]
        else:
            holder[place] = LocalNonpersistentObject(weight)


def copies(state: dict[str, Any], optimizer: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield (list or dict, place in it, weight) of the float32 copies in an optimizer's sharded state."""
    weights = [weight for part in parts_of(optimizer) for weight in weights_of(part)]
    yield from ((state["param_state"][index], "param", weight) for index, weight in enumerate(weights))
    for holder, weights in zip(state.get("fp32_from_fp16_params", ()), half_weights(parts_of(optimizer)), strict=True):
        yield from ((holder, index, weight) for index, weight in enumerate(weights))


def saved_class(common: dict[str, Any], saved: Collection[str], where: str) -> str:
    """Return the class that saved the optimizer: `distributed`, `half` or `float32`.

    common: the checkpoint's plain values. Raises CheckpointError when it has no optimizer or one in a format that
    depends on the order of the weights in the memory of the program that wrote it.
    """
    if any(name.startswith("optimizer.distributed.") for name in saved):
        raise CheckpointError(
            f"{where} holds a distributed optimizer in a format that cannot be resharded; save it again with "
            "Megatron-LM's --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim to load the weights alone."
        )
    if "optimizer" not in common:
        raise CheckpointError(f"{where} holds no optimizer; pass --no-load-optim to load the weights alone.")
    saved_state = common["optimizer"]
    first = saved_state[0] if is_chained(saved_state) else saved_state
    if "param_state_sharding_type" in first:
        return "distributed"
    return "half" if "optimizer" in first else "float32"


def current_class(optimizer: Any) -> str:
    """Return the class of an optimizer, in the words of `saved_class`."""
    kinds = {DistributedOptimizer: "distributed", Float16OptimizerWithFloat16Params: "half"}
    return next((name for kind, name in kinds.items() if isinstance(parts_of(optimizer)[0], kind)), "float32")


class WholeOptimizer:
    """An optimizer of megatron-core's, of whole weights, as checkpoints see it; `SavedOptimizer`."""

    def __init__(self, optimizer: Any, metadata: dict[str, Any]):
        self._optimizer, self._metadata = optimizer, metadata
        self.saved_as = current_class(optimizer)

    def state(self, model_state: dict[str, Any], is_loading: bool = False) -> dict[str, Any]:
        complete_state(self._optimizer)
        parts = parts_of(self._optimizer)
        states = []
        for each in parts:
            each.init_state_fn = each.init_state_fn or (lambda *_: None)  # SGD has none, and would have it called
            with _told_apart(each) if is_loading else nullcontext():  # what is asked for is loaded once, as it is now
                states.append(each.sharded_state_dict(model_state, is_loading, metadata=self._metadata))
            if not is_loading and not isinstance(each.optimizer, torch.optim.SGD):
                steps = saved_steps(states[-1])  # in the groups as well, where FusedAdam looks
                for group in saved_groups(states[-1]):
                    group["step"] = steps
        return states[0] if len(parts) == 1 else joined(parts, states)

    def copies(self, state: dict[str, Any]) -> Iterator[tuple[Any, Any, torch.Tensor]]:
        return copies(state, self._optimizer)

    def load(self, state: dict[str, Any]) -> None:
        load(self._optimizer, state)


def matched(groups: Iterable[dict[str, Any]], saved: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved group of each of an optimizer's groups: in order among those with the same multipliers, and
    the same for experts as for other weights.

    Raises CheckpointError if there is none.
    """
    alternatives: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for group in saved:
        alternatives.setdefault(identity(group), []).append(group)
    taken: Counter[tuple[Any, ...]] = Counter()
    result = []
    try:
        for group in groups:
            key = identity(group)
            result.append(alternatives[key][taken[key, group.get(EXPERTS)]])
            taken[key, group.get(EXPERTS)] += 1
        return result
    except (KeyError, IndexError):
        raise CheckpointError(
            "the checkpoint's optimizer has other groups of weights (weight decay, learning rates of their own); "
            "give the flags it was trained with, or --no-load-optim to begin its state anew."
        ) from None


def rates(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group that come from flags."""
    return {name: group[name] for name in RATES if name in group}


def set_rates(group: dict[str, Any], values: dict[str, Any]) -> None:
    for name in RATES:
        group.pop(name, None)
    group.update(values)


def load(optimizer: Any, state: dict[str, Any]) -> None:
    """Give an optimizer its loaded state (after `convert`), but for what this run's flags say of its groups."""
    parts = parts_of(optimizer)
    matched(parts[0].param_groups, saved_groups(state))
    for part, own in zip(parts, [state] if len(parts) == 1 else divided(parts, state), strict=True):
        _load_part(part, own)
    complete_state(optimizer)


def _load_part(part: Any, state: dict[str, Any]) -> None:
    """Give an optimizer that is one of no chain its loaded state.

    megatron-core's distributed optimizer looks for torch Adam's step among the tensors that were read, where it never
    is: the steps are put aside while it loads them. The others find the step where their Adam looks for it.
    """
    pairs = zip(part.param_groups, matched(part.param_groups, saved_groups(state)), strict=True)
    for number, (group, saved) in enumerate(pairs):
        set_rates(saved, rates(group))
        saved[_TAG] = number
    for hybrid in _hybrids(part):
        for group in state["optimizer"]["param_groups"]:
            group.update({name: hybrid.defaults[name] for name in _KERNELS})
    if not isinstance(part.optimizer, torch.optim.SGD):
        _place_steps(state.get("optimizer", state), saved_steps(state), counts_by_group(part.optimizer))
    with _told_apart(part):
        if isinstance(part, DistributedOptimizer) and "param_state" in state:
            tensors = state.pop("param_state")
            part.load_state_dict(state)
            steps = [(each, each.pop("step")) for _, each in _adam_states(part)]
            part.load_parameter_state_from_fully_reshardable(tensors)
            for parameter_state, step in steps:
                parameter_state["step"] = step
        else:
            part.load_state_dict(state)


def _place_steps(plain: dict[str, Any], steps: int, by_group: bool) -> None:
    """Put the number of steps where an optimizer looks for it. The distributed one has no state here, and groups."""
    if by_group or "state" not in plain:
        for group in plain["param_groups"]:
            group["step"] = steps
        plain.get("state", {}).pop("common_step", None)
    else:
        for group in plain["param_groups"]:
            group.pop("step", None)
        plain["state"]["common_step"] = torch.tensor(float(steps))


@contextmanager
def _told_apart(part: Any) -> Iterator[None]:
    """Tag an optimizer's groups by their numbers: megatron-core 0.16 takes groups that differ in their rates alone for
    one, and so would load the values of one into the other."""
    tags = [group.get(_TAG) for group in part.param_groups]
    for number, group in enumerate(part.param_groups):
        group[_TAG] = number
    try:
        yield
    finally:
        for group, tag in zip(part.param_groups, tags, strict=True):
            group[_TAG] = tag


def convert(state: dict[str, Any], common: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Rearrange a loaded optimizer state from the layout that class `old` saved to the one that class `new` reads.

    state: megatron-core's mixture of the tensors that `new` asked for and the plain values of `old`. common: the plain
    values of `old` alone. A loss scale that is fixed has no state to hand on to one that adapts, which begins anew.
    """
    state = {name: value for name, value in state.items() if name != "grad_scaler" or "scale" in value}
    outer, steps = common["optimizer"], saved_steps(common["optimizer"])
    if chained := is_chained(outer):
        outer = plain_joined([each for _, each in sorted(outer.items())])
    if old == new and not chained:
        return state
    groups = [{**group, "step": steps} for group in saved_groups(outer)]
    rest: dict[str, Any] = {
        name: state[name] for name in ("grad_scaler", "param_state", "fp32_from_fp16_params") if name in state
    }
    if new == "distributed":
        sharding = SHARDING["distrib_optim_sharding_type"]
        return {**rest, "optimizer": {"param_groups": groups}, "param_state_sharding_type": sharding}
    asked = state["optimizer"] if new == "half" else state
    own = [{"params": now["params"], **group} for now, group in zip(asked["param_groups"], groups, strict=True)]
    plain = {"param_groups": own, "state": asked["state"]}
    return {**rest, "optimizer": plain} if new == "half" else plain
