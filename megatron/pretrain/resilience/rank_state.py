"""All that a rank needs to go on after a step, as runs of numbers and plain values: weights, the optimizer's state, the
random state, and how far training is.

Runs are named after weights and say where in these they begin. So ranks that share out the optimizer's state
differently, because there are more or fewer of them, find their own in those of others.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from helixpipe.common.errors import CheckpointError, UserError
from megatron.pretrain.checkpoint import tensors
from megatron.pretrain.checkpoint.optimizer import complete_state, parts_of
from megatron.pretrain.checkpoint.state import TrainingProgress, generators
from megatron.pretrain.resilience.snapshot_choice import Place, TakenBy

_ALIGNMENT = 64
_COUNT = 8  # bytes of the number in front of the plain values
_SPARE = 1 << 16
"""Bytes that plain values may grow by: numbers get longer."""


@dataclass(frozen=True)
class Run:
    """Elements of a tensor from number `start` on, as one dimension. `values` shares the tensor's memory."""

    name: str
    start: int
    values: Tensor

    @property
    def end(self) -> int:
        return self.start + self.values.numel()


class RankState:
    """The state of this rank's model and what trains it. scheduler: of the learning rate. place, part, parts: of this
    rank, see `snapshot_choice.TakenBy`. run: what the run is, see `snapshots.identity`. A snapshot takes `size`
    bytes."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, place: Place, part: int, parts: int, run: str = ""):
        complete_state(optimizer)
        self._optimizers, self._scheduler = parts_of(optimizer), scheduler
        for part_of_optimizer in self._optimizers:
            inner = part_of_optimizer.optimizer
            if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                raise UserError(
                    f"--in-memory-checkpoint-interval knows the state of torch's Adam, not of {type(inner).__module__}."
                    f"{type(inner).__name__}; save checkpoints with --save-interval instead."
                )
        self._model = tensors.unwrap(model)
        self._names = {id(weight): name for name, weight in self._model.named_parameters()}
        self._names_of_mains = {
            id(getattr(weight, "main_param", weight)): name for name, weight in self._model.named_parameters()
        }
        complete = not any(isinstance(each, DistributedOptimizer) for each in self._optimizers)
        self._run, self._by = run, TakenBy(place, part, parts, complete)
        self.runs = list(self._all_runs())
        plain = len(self.plain_values(TrainingProgress()))
        self._begin = _aligned(_COUNT + 2 * plain + _SPARE)
        self._offsets = self._table(self._begin)
        *_, (_, _, count, dtype, offset) = self._offsets
        self.size = _aligned(offset + count * dtype.itemsize)

    def write(self, body: Tensor, progress: TrainingProgress) -> None:
        """Copy the state into a memory of `size` bytes."""
        plain = self.plain_values(progress, self._offsets)
        if _COUNT + len(plain) > self._begin:
            raise RuntimeError(f"plain values of {len(plain)} bytes have grown beyond the {self._begin} reserved")
        body[:_COUNT] = torch.tensor([len(plain)], dtype=torch.int64).view(torch.uint8)
        body[_COUNT : _COUNT + len(plain)] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        for run, entry in zip(self.runs, self._offsets, strict=True):
            _values(body, entry).copy_(run.values)

    def taken_by(self, body: Tensor) -> TakenBy | None:
        """Return who took a snapshot; None if it is another run's."""
        plain = _read_plain(body)
        by: TakenBy = plain["by"]
        return by if plain["run"] == self._run else None

    @torch.no_grad()
    def restore(self, bodies: Sequence[Tensor]) -> TrainingProgress:
        """Take the state from the snapshots of all ranks that had these weights, or of one that had all. Returns how
        far training was. Raises CheckpointError if they are of another model."""
        plains = [_read_plain(body) for body in bodies]
        held: dict[str, list[Run]] = {}
        for body, plain in zip(bodies, plains, strict=True):
            for entry in plain["table"]:
                held.setdefault(entry[0], []).append(Run(entry[0], entry[1], _values(body, entry)))
        self.take(held, plains)
        return TrainingProgress(**plains[0]["progress"])

    @torch.no_grad()
    def take(self, held: Mapping[str, Sequence[Run]], plains: Sequence[dict[str, Any]]) -> None:
        """Take the state from runs, by name, and plain values: of the first all, of the others their scalars. Raises
        CheckpointError where elements are missing."""
        for run in self.runs:
            _fill(run, held.get(run.name, ()))
        scalars = {name: values for plain in plains for name, values in plain["scalars"].items()}
        for name, state in self._states():
            for key, value in scalars.get(name, {}).items():
                state[key] = value.clone() if isinstance(value, Tensor) else value
        self._restore_plain(plains[0])

    # ------------------------------------------------------------------------------------------------------- tensors

    def _all_runs(self) -> Iterator[Run]:
        weights = [(name, weight) for name, weight in self._model.named_parameters()]
        own = {weight.untyped_storage().data_ptr() for _, weight in weights}
        yield from (Run(f"model.{name}", 0, _flat(weight)) for name, weight in weights)
        if (biases := self._model.routing.biases) is not None:
            yield Run("routing.biases", 0, _flat(biases))
        for name, start, main, state in self._mains():
            if main.untyped_storage().data_ptr() not in own:  # else it is the model's weight itself
                yield Run(f"main.{name}", start, _flat(main))
            for key, value in state.items():
                if _is_run(value, main):
                    yield Run(f"{key}.{name}", start, _flat(value))

    def _mains(self) -> Iterator[tuple[str, int, Tensor, dict[str, Any]]]:
        """Yield (name, first element, what the optimizer updates, its state) of each weight that is updated here."""
        for number, part in enumerate(self._optimizers):
            inner = part.optimizer
            if isinstance(part, DistributedOptimizer):
                for weight, (group, order) in part.model_param_group_index_map.items():
                    main = inner.param_groups[group]["params"][order]
                    begin = part._get_model_param_range_map(weight)["param"].start
                    yield f"{number}.{self._names[id(weight)]}", begin, main, inner.state[main]
            else:
                for group in inner.param_groups:
                    for main in group["params"]:
                        yield f"{number}.{self._names_of_mains[id(main)]}", 0, main, inner.state[main]

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from ((name, state) for name, _, _, state in self._mains())

    def _table(self, begin: int) -> list[tuple[str, int, int, torch.dtype, int]]:
        """Return (name, start, elements, type, offset) of each run."""
        table = []
        for run in self.runs:
            table.append((run.name, run.start, run.values.numel(), run.values.dtype, begin))
            begin = _aligned(begin + run.values.numel() * run.values.dtype.itemsize)
        return table

    # --------------------------------------------------------------------------------------------------- plain values

    def plain_values(self, progress: TrainingProgress, table: list[Any] | None = None) -> bytes:
        """Return all that is no run. table: of the runs in a snapshot, None where they are in none yet."""
        table = self._table(0) if table is None else table
        scalars = {
            name: {key: value for key, value in state.items() if not _is_run(value, main)}
            for name, _, main, state in self._mains()
        }
        steps = [group["step"] for groups in self._groups() for group in groups if "step" in group]
        plain = {
            "by": self._by,
            "run": self._run,
            "table": table,
            "scalars": scalars,
            "step": steps[:1],  # of optimizers that count steps by group: alike in all
            "scalers": [each.grad_scaler.state_dict() for each in self._scaled()],
            "groups": [[_values_of(group) for group in groups] for groups in self._groups()],
            "scheduler": {name: value for name, value in vars(self._scheduler).items() if name != "optimizer"},
            "generators": generators(),
            "progress": dataclasses.asdict(progress),
        }
        return pickle.dumps(plain)

    def _restore_plain(self, plain: dict[str, Any]) -> None:
        for groups, saved in zip(self._groups(), plain["groups"], strict=True):
            for group, values in zip(groups, saved, strict=True):  # all ranks have the same, in the same order
                group.update(values)
                for step in plain["step"]:
                    group["step"] = step
        for each, values in zip(self._scaled(), plain["scalers"], strict=True):
            each.grad_scaler.load_state_dict(values)
        vars(self._scheduler).update(plain["scheduler"])  # a checkpoint's may be in force, and not the flags'
        self._scheduler.step(increment=0)
        tensors.set_rng_state(plain["generators"])

    def _groups(self) -> list[list[dict[str, Any]]]:
        return [each.optimizer.param_groups for each in self._optimizers]

    def _scaled(self) -> list[Any]:
        return [each for each in self._optimizers if getattr(each, "grad_scaler", None)]


def _fill(run: Run, held: Iterable[Run]) -> None:
    """Copy a run's elements from others of the same tensor, which may overlap."""
    position = run.start
    for other in sorted(held, key=lambda each: each.start):
        end = min(other.end, run.end)
        if other.start <= position < end:
            values = other.values[position - other.start : end - other.start]
            run.values[position - run.start : end - run.start].copy_(values)
            position = end
    if position < run.end:
        raise CheckpointError(f"the snapshots in memory lack elements of {run.name} from {position} on.")


def _read_plain(body: Tensor) -> dict[str, Any]:
    size = int(body[:_COUNT].view(torch.int64))
    plain: dict[str, Any] = pickle.loads(body[_COUNT : _COUNT + size].numpy().tobytes())
    return plain


def _values(body: Tensor, entry: tuple[str, int, int, torch.dtype, int]) -> Tensor:
    _, _, count, dtype, offset = entry
    return body[offset : offset + count * dtype.itemsize].view(dtype)


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _is_run(value: Any, main: Tensor) -> bool:
    """Whether a value of the optimizer's state has an element for each of the weight's."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == main.numel()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
