"""Snapshots of a run in the memory of its hosts, each rank's own and a neighbour's, from which it goes on when ranks
are lost (`--in-memory-checkpoint-interval`).

After a step every rank copies its state into the older of two slots; when all have, the step is theirs and its line is
printed. Each then sends its slot to a neighbour, beside the next step. Before a slot is written over, all ranks agree
that the newer one, and the neighbour's copy of it, are whole. So at any moment all ranks have their own snapshots of
one step, and the copies and their own of that step or the one before.

A job that begins anew, with as many ranks or fewer, offers what its ranks find on their hosts, that of lost ranks too,
and takes the newest step that is there as a whole (`snapshot_choice`). No disk is read. What another run has left, one
with other flags or data, is not taken (`identity`).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.common.host_memory import ROOT, Hold, Stamp, folder_of, remove, remove_orphans
from helixpipe.common.output import say
from megatron.pretrain.checkpoint.ranks import on_first
from megatron.pretrain.checkpoint.resumed import IDENTITIES
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.config import Config
from megatron.pretrain.extension import RunningTrainer, RunParts, TrainerExtension
from megatron.pretrain.process.lifetime import has_launcher
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.resilience.host_network import HostNetwork, Pending
from megatron.pretrain.resilience.rank_state import RankState
from megatron.pretrain.resilience.slots import Slot, TwoSlots
from megatron.pretrain.resilience.snapshot_choice import Choice, Offer, Place, TakenBy, choose

_OWN, _COPY = "own", "copy"


class Member(NamedTuple):
    """A rank in a job. neighbour: the rank that gets a copy of its snapshots, of another replica where there is one;
    None where there is no other rank. sender: the rank whose copies it gets."""

    rank: int
    place: Place
    neighbour: int | None
    sender: int | None

    @property
    def near(self) -> list[int]:
        """The ranks that this one exchanges copies with."""
        return [each for each in (self.neighbour, self.sender) if each is not None]


def member_of(parallel: Parallel) -> Member:
    """Return this rank as a member of megatron-core's initialised parallel state."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group() if parallel.dp_size > 1 else parallel.pp_group
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    place = parallel.pp_rank, parallel.tp_rank
    if len(ranks) == 1:
        return Member(parallel.rank, place, None, None)
    return Member(parallel.rank, place, ranks[(own + 1) % len(ranks)], ranks[own - 1])


class StateOfRank(Protocol):
    """The state of a rank, of which a snapshot takes `size` bytes; see `rank_state.RankState`."""

    size: int

    def write(self, body: Tensor, progress: TrainingProgress) -> None: ...

    def restore(self, bodies: Sequence[Tensor]) -> TrainingProgress: ...

    def taken_by(self, body: Tensor) -> TakenBy | None: ...


class Network(Protocol):
    """What ranks tell each other, in their hosts' memory."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        ...

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        ...

    def send(self, values: Tensor, rank: int) -> Pending: ...

    def receive(self, values: Tensor, rank: int) -> Pending: ...


def _make_own(folder: Path) -> None:
    """Make the folder of a rank and its launcher's around it, for this user alone. Raises UserError where they are
    another's: what they hold is unpickled."""
    for each in (folder.parent, folder):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
        if each.lstat().st_uid != os.getuid():
            raise UserError(f"--in-memory-checkpoint-interval: {each} belongs to another user; remove it.")


class Snapshots:
    """The snapshots of this rank and of its neighbour. All methods are collective. folder: of this rank on its host."""

    def __init__(self, folder: Path, member: Member, state: StateOfRank, network: Network):
        _make_own(folder)
        self._hold = Hold(folder.parent)
        self._folder, self._member, self._state, self._network = folder, member, state, network
        self._own, self._copies = TwoSlots(folder, _OWN), TwoSlots(folder, _COPY)
        self._kinds = {_OWN: self._own, _COPY: self._copies}
        sizes = network.gather(state.size)
        self._copy_size = 0 if member.sender is None else sizes[member.sender]
        self._life, self._last, self._taken = 1, 0, 0
        self._arriving: list[Pending] = []
        self._copy: tuple[Slot, Stamp] | None = None

    @property
    def bytes(self) -> int:
        """The host memory that this rank takes: two slots of its own and two of a neighbour's."""
        return 2 * (self._state.size + self._copy_size)

    @property
    def description(self) -> str:
        """Say where snapshots are, and what they take."""
        whose = "" if self._member.sender is None else f", 2 of rank {self._member.sender}'s"
        return f"snapshots in host memory: {self.bytes / 2**20:.1f} MiB a rank (2 of its own{whose}) in {self._folder}"

    def take(self, progress: TrainingProgress) -> None:
        """Take a snapshot of the state after a step. Returns when every rank has its own. Raises CheckpointError, on
        all ranks, where a host has no memory for it."""
        self._arrive()
        self._agree(self._last)  # all have the copies of the one before, so what is older may go
        if self._taken < 2:
            self._reserve()
        stamp, own = Stamp(self._life, progress.iteration), self._own.other
        own.begin()
        self._state.write(own.body, progress)
        own.complete(stamp)
        self._agree(stamp.step)
        self._own.kept, self._last = own, stamp.step
        self._taken += 1
        self._start_copies(own, stamp)

    def _reserve(self) -> None:
        reason = ""
        try:
            self._own.other.reserve(self._state.size)
            if self._copy_size:
                self._copies.other.reserve(self._copy_size)
        except OSError as error:
            reason = error.strerror or str(error)
        reasons = [each for each in self._network.gather(reason) if each]
        if reasons:
            raise CheckpointError(
                f"--in-memory-checkpoint-interval: this rank needs {self.bytes / 2**20:.0f} MiB in {ROOT}, and some "
                f"host has no room for all of its ranks' ({reasons[0]})."
            )

    def restore(self) -> TrainingProgress | None:
        """Take the newest state that all ranks together have in memory; None if there is none. Raises CheckpointError
        if it is of another model."""
        member = self._member
        self._kinds.update(self._left_behind())
        own = [offer for kind in self._kinds for offer in self._offers(kind)]
        gathered = self._network.gather((member.place, own))
        places, offers = [place for place, _ in gathered], [each for _, each in gathered]
        self._life = 1 + max((offer.stamp.life for each in offers for offer in each), default=0)
        choice = choose(offers, set(places))
        if choice is None:
            return None
        progress = self._state.restore(self._bodies(choice, places))
        self._kinds = {_OWN: self._own, _COPY: self._copies}
        self._own.keep(choice.stamp)
        self._copies.keep(choice.stamp)
        self._last = progress.iteration
        self.take(progress)  # ranks that had none have theirs now, and neighbours copies
        self._arrive()
        self._agree(self._last)
        if self._member.rank == 0:
            say(f" > going on from the snapshots of iteration {self._last} in memory")
        return progress

    def close(self) -> None:
        """Give the memory back, at the end of the run."""
        self._arrive()
        self.forget()

    def forget(self) -> None:
        """Give the memory back although the run has failed, in a way in which it would again: not collective."""
        self._hold.close()
        remove(self._folder)

    # ------------------------------------------------------------------------------------------------------- copies

    def _start_copies(self, own: Slot, stamp: Stamp) -> None:
        network, member = self._network, self._member
        if member.neighbour is not None:
            self._arriving.append(network.send(own.body, member.neighbour))
        if member.sender is not None:
            copy = self._copies.other
            copy.begin()
            self._arriving.append(network.receive(copy.body, member.sender))
            self._copy = copy, stamp

    def _arrive(self) -> None:
        """Wait until the neighbours' copies of the last snapshot are whole."""
        while self._arriving:
            self._arriving.pop().wait()
        if self._copy is not None:
            copy, stamp = self._copy
            copy.complete(stamp)
            self._copies.kept, self._copy = copy, None

    def _agree(self, step: int) -> None:
        least = self._network.least(step)
        if least != step:
            raise RuntimeError(f"this rank has a snapshot of step {step}, another one of step {least}")

    # ------------------------------------------------------------------------------------------------------ recovery

    def _left_behind(self) -> dict[str, TwoSlots]:
        """Return what ranks that are not there any more, or wait, have left in this host's memory: on the first rank of
        the host, which offers it beside its own."""
        here, place = self._folder.parent, (socket.gethostname(), str(self._folder))
        host = [Path(folder) for name, folder in self._network.gather(place) if name == place[0]]
        if next(folder for folder in host if folder.parent == here) != self._folder:
            return {}
        lost = sorted(folder for folder in here.iterdir() if folder.is_dir() and folder not in host)
        return {f"{folder.name}/{kind}": TwoSlots(folder, kind) for folder in lost for kind in (_OWN, _COPY)}

    def _offers(self, kind: str) -> list[Offer]:
        return [
            Offer(stamp, by, slot.body.numel(), (kind, number))
            for stamp, number, slot in self._kinds[kind].whole()
            if (by := self._state.taken_by(slot.body)) is not None
        ]

    def _bodies(self, choice: Choice, places: Sequence[Place]) -> list[Tensor]:
        """Return the snapshots of this rank's place, after all ranks have sent what others lack."""
        bodies = []
        for place in sorted(choice.sources):
            for source in choice.sources[place]:
                holders = sorted(source.holders)
                lacking = [rank for rank, own in enumerate(places) if own == place and rank not in source.holders]
                body = self._held(source.holders)
                for number, rank in enumerate(lacking):
                    holder = holders[number % len(holders)]
                    if self._member.rank == holder:
                        assert body is not None
                        self._network.send(body, rank).wait()
                    elif self._member.rank == rank:
                        body = torch.empty(source.size, dtype=torch.uint8)
                        self._network.receive(body, holder).wait()
                if self._member.place == place:
                    assert body is not None
                    bodies.append(body)
        return bodies

    def _held(self, holders: Mapping[int, tuple[str, int]]) -> Tensor | None:
        where = holders.get(self._member.rank)
        return None if where is None else self._kinds[where[0]].slots[where[1]].body


def folder_of_rank() -> Path:
    """Return the folder of this rank's snapshots under its launcher, once the launchers' that are gone are removed. A
    rank without one, which nobody starts again, has its own: its parent may be a shell, in which other runs follow."""
    remove_orphans()
    return folder_of(os.getppid() if has_launcher() else os.getpid()) / os.environ.get("LOCAL_RANK", "0")


def identity(config: Config, data: Mapping[str, str]) -> str:
    """Return a digest of what a run is, the same with other numbers of ranks. data: of data and tokenizer, see
    `data.identity.identities`."""
    groups = (config.model, config.training, config.data, config.checkpoint)
    sizes = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    values = [*groups, sizes, sorted(data.items())]
    return hashlib.sha256(repr(values).encode()).hexdigest()


class HostSnapshots(TrainerExtension):
    """Takes snapshots of a run, and goes on from them."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._snapshots: Snapshots | None = None

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.checkpoint.in_memory_checkpoint_interval is not None and not config.training.skip_train

    def set_up(self, parts: RunParts) -> TrainingProgress | None:
        """Return how far the newest state is that all ranks together have in memory. Collective."""
        parallel, self._leaving = parts.parallel, parts.leaving
        member = member_of(parallel)
        part, count = dist.get_rank(parallel.dp_cp_group), dist.get_world_size(parallel.dp_cp_group)
        data = {name: parts.arguments[name] for name, _ in IDENTITIES.values()}
        run = on_first(lambda: identity(self.config, data), "flags")
        own = RankState(parts.state.model, parts.state.optimizer, parts.scheduler, member.place, part, count, run)
        self._snapshots = Snapshots(folder_of_rank(), member, own, HostNetwork(member.near))
        if parallel.is_first:
            say(f" > {self._snapshots.description}")
        return self._snapshots.restore()

    def begin(self, trainer: RunningTrainer) -> None:
        self._trainer = trainer

    def before_step(self, iteration: int) -> None:
        """Leave the group where the launcher says so: in a group of one no connection tells it."""
        if self._leaving():
            raise ConnectionAbortedError("this rank leaves its group")

    def complete(self, iteration: int) -> None:
        """Take a snapshot if it is due. The last iteration ends with the run's own checkpoint."""
        trainer, interval = self._trainer, self.config.checkpoint.in_memory_checkpoint_interval or 1
        assert self._snapshots is not None
        if iteration % interval == 0 and iteration != trainer.length.iterations:
            with trainer.timed("snapshot"):
                self._snapshots.take(trainer.progress)

    def close(self, error: BaseException | None) -> None:
        """Give the memory back, unless another rank was lost and this one, or its successor, goes on."""
        if self._snapshots is None:
            return
        if error is None:
            self._snapshots.close()
        elif isinstance(error, UserError) and not self._leaving():
            self._snapshots.forget()
