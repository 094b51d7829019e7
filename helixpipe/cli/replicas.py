"""Which replicas of a model train, when ranks of some have died: `helixpipe train` with snapshots in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from helixpipe.common.host_memory import Stamp

AWAY = 60.0
"""Seconds for which a replica is left out whose ranks die again before another step is done; twice as long each time
that happens again."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks of a job. pipeline: pipeline ranks; beside: tensor- times context-parallel ranks of each; replicas: of the
    model when all ranks are there. sizes: numbers of replicas among which the batch can be shared out, rising."""

    pipeline: int
    beside: int
    replicas: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, flags: Sequence[str], ranks: int) -> RankLayout:
        """Return the layout of so many ranks that flags of the training program ask for."""
        pipeline, beside = ranks_of_a_replica(flags)
        replicas = ranks // (pipeline * beside)
        if replicas * pipeline * beside != ranks:  # the training program says what is wrong
            return cls(1, ranks, 1, (1,))
        batch, micro = (number_of(flags, f"--{kind}-batch-size") or 0 for kind in ("global", "micro"))
        if any(flag.startswith("--rampup-batch-size") for flag in flags) or not batch or not micro:
            return cls(pipeline, beside, replicas, (replicas,))
        fitting = (count for count in range(1, replicas) if batch % (micro * count) == 0)
        return cls(pipeline, beside, replicas, (*fitting, replicas))

    def ranks(self, members: Sequence[int]) -> list[int]:
        """Return the ranks of these replicas, numbered as when all are there, in the order in which megatron-core
        numbers them: tensor- and context-parallel ranks beside each other, then replicas, then pipeline ranks."""
        places = [(stage, each) for stage in range(self.pipeline) for each in members]
        return [
            (stage * self.replicas + each) * self.beside + number
            for stage, each in places
            for number in range(self.beside)
        ]

    def replica_of(self, full: int) -> int:
        """Return the replica of a rank, numbered as when all are there."""
        return full // self.beside % self.replicas


def ranks_of_a_replica(flags: Sequence[str]) -> tuple[int, int]:
    """Return pipeline ranks, and tensor- times context-parallel ranks of each, that one copy of the model takes; the
    training program says what is wrong with the flags."""
    kinds = ("pipeline-model", "tensor-model", "context")
    pipeline, tensor, context = (max(1, number_of(flags, f"--{kind}-parallel-size") or 1) for kind in kinds)
    return pipeline, tensor * context


def number_of(flags: Sequence[str], name: str) -> int | None:
    """Return the whole number that a flag of the training program has; None if it is not given."""
    numbers = re.findall(rf"(?:^|\s){name}[= ](\d+)", " ".join(flags))
    return int(numbers[-1]) if numbers else None


@dataclass
class Roster:
    """The replicas that are there. rejoin: seconds after which one that has lost ranks is there again."""

    layout: RankLayout
    rejoin: float
    _until: dict[int, float] = field(default_factory=dict)
    _deaths: dict[int, tuple[Stamp, float]] = field(default_factory=dict)

    def lose(self, replicas: Collection[int], newest: Stamp, now: float) -> None:
        """Count replicas as lost. newest: the job's newest snapshot."""
        for replica in replicas:
            stamp, away = self._deaths.get(replica, (None, 0.0))
            away = max(2 * away, AWAY) if stamp is not None and newest.step <= stamp.step else 0.0
            self._deaths[replica] = newest, away
            self._until[replica] = now + max(away, self.rejoin)

    def is_back(self, replica: int, now: float) -> bool:
        """Whether a replica that has lost ranks may take part again."""
        return self._until.get(replica, now) <= now

    def members(self, now: float, ready: Collection[int] | None = None) -> list[int]:
        """Return the replicas that train: as many as can share out the batch. All, if none is there: nothing trains on
        without them. ready: those whose processes are; None: all."""
        there = [each for each in range(self.layout.replicas) if self.is_back(each, now)]
        there = [each for each in there if ready is None or each in ready]
        sizes = [size for size in self.layout.sizes if size <= len(there)]
        return there[: sizes[-1]] if sizes else list(range(self.layout.replicas))
