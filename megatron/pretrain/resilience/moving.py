"""Weights and the optimizer's state on their way between ranks, in memory, when a run changes the layers of its ranks.

They are named as in snapshots (`rank_state`): by weights, whose names have the number of their layer in the model, and
for shares of them by where in these they begin. So a rank finds what its new model needs in what others had, however
layers, and shares of replicas, lie now. Each rank copies its own state to its host's memory and frees its model before
it builds the next. Then all tell each other what they have and need, and each sends what others lack.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.resilience.rank_state import RankState, Run
from megatron.pretrain.resilience.snapshots import Network


class Elements(NamedTuple):
    """Elements of a tensor, from `start` on, before `end`."""

    name: str
    start: int
    end: int


class MovedPart(NamedTuple):
    """Elements that a rank has and another needs."""

    source: int
    target: int
    extent: Elements


class RankHoldings(NamedTuple):
    """What ranks have and need, by rank. shard: ranks of other shards have other elements of weights of the same names
    (tensor parallelism). replica: a rank's own is asked first."""

    held: Sequence[Sequence[Elements]]
    needed: Sequence[Sequence[Elements]]
    shard: Sequence[int]
    replica: Sequence[int]


def parts(ranks: RankHoldings) -> Iterator[MovedPart]:
    """Yield who gives what to whom, so that every rank has all that it needs: what it has itself, then what ranks of
    its replica have. Raises RuntimeError where nobody has it."""
    holders: dict[tuple[int, str], list[tuple[int, Elements]]] = defaultdict(list)
    for rank, own in enumerate(ranks.held):
        for extent in own:
            holders[ranks.shard[rank], extent.name].append((rank, extent))
    for target, needed in enumerate(ranks.needed):
        for name, start, end in needed:
            givers = sorted(
                holders[ranks.shard[target], name],
                key=lambda each: (each[0] != target, ranks.replica[each[0]] != ranks.replica[target], each[0]),
            )
            while start < end:
                covering = ((rank, extent) for rank, extent in givers if extent.start <= start < extent.end)
                source = next(covering, None)
                if source is None:
                    raise RuntimeError(f"no rank has elements of {name} from {start} on")
                upto = min(end, source[1].end)
                yield MovedPart(source[0], target, Elements(name, start, upto))
                start = upto


class MovingState:
    """The state of this rank, without its model, on its way to another model. rank: in the job. shard, replica: as of
    `RankHoldings`."""

    def __init__(self, state: RankState, rank: int, shard: int, replica: int):
        self._rank, self._shard, self._replica = rank, shard, replica
        self._held = {run.name: Run(run.name, run.start, run.values.to("cpu", copy=True)) for run in state.runs}
        self._plain = pickle.loads(state.plain_values(TrainingProgress()))

    def into(self, state: RankState, network: Network) -> int:
        """Give a new model its state. Collective over all ranks. Returns the bytes that came from others."""
        scalars = _by_value(self._plain["scalars"])
        own = [_extents(self._held.values()), _extents(state.runs), self._shard, self._replica, scalars]
        gathered: list[Any] = network.gather(own)
        every, others = RankHoldings(*list(zip(*gathered, strict=True))[:4]), [each[4] for each in gathered]
        pairs: dict[tuple[int, int], list[Elements]] = defaultdict(list)
        for part in parts(every):
            if self._rank in (part.source, part.target):
                pairs[part.source, part.target].append(part.extent)
        types = {run.name: run.values.dtype for run in state.runs}
        runs = defaultdict(list, {name: [run] for name, run in self._held.items()})
        under_way, came = [], 0
        for (source, target), extents in sorted(pairs.items()):
            if source == target:
                continue
            for extent in extents:  # each by itself, from where it is to where it will be: hosts have no room for more
                if source == self._rank:
                    under_way.append(network.send(self._values(extent).view(torch.uint8), target))
                    continue
                name, start, end = extent
                values = torch.empty(end - start, dtype=types[name])
                runs[name].append(Run(name, start, values))
                under_way.append(network.receive(values.view(torch.uint8), source))
                came += values.nbytes
        for work in under_way:
            work.wait()
        state.take(runs, [self._plain, *({"scalars": _by_name(each)} for each in others)])
        return came

    def _values(self, extent: Elements) -> Tensor:
        run = self._held[extent.name]
        return run.values[extent.start - run.start : extent.end - run.start]


def _extents(runs: Iterable[Run]) -> list[Elements]:
    return [Elements(run.name, run.start, run.end) for run in runs]


def _by_value(scalars: Mapping[str, Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Return the scalars of weights, each set of values once, with the names of those that have it: they count steps,
    and most as many."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, values in scalars.items():
        names[repr([(key, _exact(value)) for key, value in values.items()])].append(name)
    return [(scalars[alike[0]], alike) for alike in names.values()]


def _by_name(scalars: Iterable[tuple[Mapping[str, Any], Iterable[str]]]) -> dict[str, Mapping[str, Any]]:
    return {name: values for values, names in scalars for name in names}


def _exact(value: Any) -> Any:
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value
