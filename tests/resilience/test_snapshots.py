"""Snapshots in memory: whenever a rank dies, and with or without what its host had, all go on from one step."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.common.host_memory import Stamp, folder_of, newest, remove
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.resilience.slots import Slot, TwoSlots
from megatron.pretrain.resilience.snapshot_choice import Offer, TakenBy, choose
from megatron.pretrain.resilience.snapshots import HostSnapshots, Member, Snapshots, folder_of_rank, identity
from tests.training.helpers import config

# ------------------------------------------------------------------------------------- a job of ranks that are threads


class Dead(Exception):
    """This rank has been killed, or has lost one that was."""


class Job:
    """What ranks share: messages, and who is to be killed before which of its operations."""

    def __init__(self, ranks: int, victims: dict[int, int]):
        self.ranks, self.victims = ranks, victims
        self.counts = [0] * ranks
        self.changed = threading.Condition()
        self.messages: dict[Any, Any] = {}
        self.ended: set[int] = set()

    def operation(self, rank: int) -> None:
        """Count an operation of a rank; it is killed before the one that is meant."""
        self.counts[rank] += 1
        if self.counts[rank] == self.victims.get(rank):
            self.end(rank)
            raise Dead

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def put(self, key: Any, value: Any) -> None:
        with self.changed:
            self.messages[key] = value
            self.changed.notify_all()

    def take(self, key: Any, sender: int) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: key in self.messages or sender in self.ended, timeout=5.0)
            if key not in self.messages:
                raise Dead
            return self.messages[key]


class Arrival:
    """A message that arrives half by half, when it is waited for."""

    def __init__(self, job: Job, rank: int, values: Tensor | None, take: Callable[[], Tensor]):
        self._job, self._rank, self._values, self._take = job, rank, values, take

    def wait(self) -> None:
        if self._values is None:
            return
        sent, half = self._take(), self._values.numel() // 2
        self._job.operation(self._rank)
        self._values[:half] = sent[:half]
        self._job.operation(self._rank)
        self._values[half:] = sent[half:]


class Network:
    """The network of one rank of a `Job`."""

    def __init__(self, job: Job, rank: int):
        self._job, self._rank, self._number = job, rank, 0
        self._sent: dict[Any, int] = {}

    def gather(self, value: Any) -> list[Any]:
        self._job.operation(self._rank)
        self._number += 1
        self._job.put((self._number, self._rank), pickle.dumps(value))
        values = [self._job.take((self._number, rank), rank) for rank in range(self._job.ranks)]
        return [pickle.loads(each) for each in values]

    def least(self, number: int) -> int:
        return min(self.gather(number))

    def send(self, values: Tensor, rank: int) -> Arrival:
        key = self._key(self._rank, rank)
        self._job.operation(self._rank)
        self._job.put(key, values.clone())
        return Arrival(self._job, self._rank, None, lambda: values)

    def receive(self, values: Tensor, rank: int) -> Arrival:
        key = self._key(rank, self._rank)
        return Arrival(self._job, self._rank, values, lambda: self._job.take(key, rank))

    def _key(self, source: int, target: int) -> Any:
        self._sent[source, target] = self._sent.get((source, target), 0) + 1
        return "message", source, target, self._sent[source, target]


class State:
    """A state of a few numbers: those of a place from `part` on, each place and step its own. Writing it takes several
    operations. shared: ranks of a place have a part each. run: which run's it is."""

    ELEMENTS = 12

    def __init__(self, job: Job, rank: int, by: TakenBy, run: str = ""):
        self._job, self._rank, self._by, self._run = job, rank, by, run
        count = self.ELEMENTS if by.complete else self.ELEMENTS // by.parts
        self.start, self.values = (0 if by.complete else by.part * count), torch.zeros(count, dtype=torch.int64)
        self.size = 512 + 8 * count

    def train(self, step: int) -> None:
        """Make the values those of a step."""
        self.values = expected(self._by.place, step)[self.start : self.start + len(self.values)]

    def write(self, body: Tensor, progress: TrainingProgress) -> None:
        head = pickle.dumps((self._by, self.start, progress.iteration, self._run))
        body[:512] = torch.frombuffer(bytearray(head.ljust(512, b"\0")), dtype=torch.uint8)
        for index, value in enumerate(self.values):
            self._job.operation(self._rank)
            body[512:].view(torch.int64)[index] = value

    def taken_by(self, body: Tensor) -> TakenBy | None:
        by: TakenBy
        by, _, _, run = self._read(body)
        return by if run == self._run else None

    def restore(self, bodies: Sequence[Tensor]) -> TrainingProgress:
        whole = torch.full((self.ELEMENTS,), -1)
        for body in bodies:
            _, start, step, _ = self._read(body)
            held = body[512:].view(torch.int64)
            whole[start : start + len(held)] = held
        self.values = whole[self.start : self.start + len(self.values)].clone()
        return TrainingProgress(iteration=step)

    def _read(self, body: Tensor) -> Any:
        return pickle.loads(body[:512].numpy().tobytes())


def expected(place: tuple[int, int], step: int) -> Tensor:
    return torch.arange(State.ELEMENTS) + 1000 * step + 100 * place[0]


@dataclass
class Life:
    """A rank in one life of a job. start: the step whose snapshots it went on from. known: the last of which it knows
    that all ranks have it. right: whether what it restored is what was there after that step. begun: whether it came to
    its first step."""

    start: int = 0
    known: int = 0
    right: bool = True
    begun: bool = False


def live(
    folder: Path,
    pipeline: int,
    replicas: Sequence[int],
    shared: bool,
    steps: int,
    victims: dict[int, int] | None = None,
    run: str = "",
) -> list[Life]:
    """Run a job until it ends or a rank is killed; see `Life`. Ranks are numbered as megatron-core does, replicas side
    by side; a rank's folder is named after its pipeline rank and replica."""
    count = len(replicas)
    job = Job(pipeline * count, victims or {})
    lives = [Life() for _ in range(job.ranks)]

    def work(rank: int) -> None:
        stage, replica = divmod(rank, count)
        group = [stage * count + each for each in range(count)] if count > 1 else list(range(pipeline))
        own, place, life = group.index(rank), (stage, 0), lives[rank]
        state = State(job, rank, TakenBy(place, replica, count, not shared), run)
        ring = (None, None) if len(group) == 1 else (group[(own + 1) % len(group)], group[own - 1])
        member = Member(rank, place, *ring)
        try:
            snapshots = Snapshots(folder / f"{stage}.{replicas[replica]}", member, state, Network(job, rank))
            if (progress := snapshots.restore()) is not None:
                life.start = life.known = progress.iteration
                values = expected(place, life.start)[state.start : state.start + len(state.values)]
                life.right = torch.equal(state.values, values)
            life.begun = True
            for step in range(life.start + 1, life.start + steps + 1):
                job.operation(rank)  # the step
                state.train(step)
                snapshots.take(TrainingProgress(iteration=step))
                life.known = step
        except Dead:
            pass
        finally:
            job.end(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(job.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lives


@settings(max_examples=60)
@given(data=st.data())
def test_a_job_goes_on_from_the_last_step_that_all_have(data: st.DataObject) -> None:
    """Kill a rank before any of its operations; go on without its replica, or with all ranks, with the memory of its
    host or without; three times. No step that all had is lost, unless what was alone in the lost memory was newer than
    its neighbour's copy: then one is."""
    pipeline, count = data.draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3), (3, 2), (3, 1)]), "sizes")
    shared = data.draw(st.booleans(), "shared") and count > 1
    alone = shared or count == 1  # no other rank has a rank's state
    everybody = list(range(count))
    with TemporaryDirectory() as name:
        folder, last = Path(name), 0
        for _ in range(3):
            victim = data.draw(st.integers(0, pipeline * count - 1), "victim")
            lives = live(folder, pipeline, everybody, shared, 4, {victim: data.draw(st.integers(1, 120), "moment")})
            assert all(each.right for each in lives)
            assert len({each.start for each in lives if each.begun}) <= 1
            assert all(each.start >= last for each in lives if each.begun)
            last = max([last, *(each.known for each in lives)])
            if not all(each.begun for each in lives):
                continue  # a host that is lost while a job goes on from another loss may take what is needed with it
            stage, replica = divmod(victim, count)
            lost = data.draw(st.sampled_from(["nothing", "its memory", "its replica"]), "lost")
            if lost == "its memory":
                remove(folder / f"{stage}.{replica}")
                last -= alone and last > 0
            if lost == "its replica" and count > 1:
                last -= alone and last > 0
                lives = live(folder, pipeline, [each for each in everybody if each != replica], shared, 1)
                assert all(each.begun and each.right and each.start >= last for each in lives)
                last = lives[0].known
        lives = live(folder, pipeline, everybody, shared, 1)
        assert all(each.begun and each.right for each in lives)
        assert len({each.start for each in lives}) == 1 and lives[0].start >= last


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hosts_lost", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2), (2, 3), (4, 1)])
def test_other_numbers_of_replicas(tmp_path: Path, before: int, after: int, hosts_lost: bool, shared: bool) -> None:
    """Those that are there have all that is needed, in parts of other sizes, and what lost ranks left on their host."""
    live(tmp_path, 2, range(before), shared, 3)
    for replica in range(after, before if hosts_lost else 0):
        for stage in range(2):
            remove(tmp_path / f"{stage}.{replica}")
    lives = live(tmp_path, 2, range(after), shared, 2)
    if hosts_lost and shared and before == 4:  # what the second and the third had is with neither of those left
        assert {each.start for each in lives} == {0}
    else:  # the copies of the last step had not been waited for
        assert all(each.right and each.start >= 3 - (hosts_lost and shared and after < before) for each in lives)
        assert all(each.known == each.start + 2 for each in lives)


@pytest.mark.parametrize("shared", [False, True])
def test_what_another_run_left_is_not_taken(tmp_path: Path, shared: bool) -> None:
    """Nor by ranks that do not write over all of it; the run itself goes on from its own, beside the other's."""
    live(tmp_path, 2, range(3), shared, 9, run="before")
    lives = live(tmp_path, 2, range(2), shared, 1, run="after")
    assert [(each.start, each.known) for each in lives] == [(0, 1)] * 4
    again = live(tmp_path, 2, range(2), shared, 1, run="after")
    assert all(each.start == 1 and each.right for each in again)


def test_what_a_run_is_depends_on_flags_and_data_and_not_on_ranks() -> None:
    flags = (
        "--micro-batch-size 1 --global-batch-size 8 --in-memory-checkpoint-interval 1 --pipeline-model-parallel-size 2"
    )
    data = {"data_identity": "a", "tokenizer_identity": "b"}
    own = identity(config(flags, world=8, rank=3), data)
    assert identity(config(flags, world=4), data) == own
    for changed in ("--lr 1e-2", "--seed 7", "--num-layers 8", "--split 1,1,1 --train-iters 9", "--load there"):
        assert identity(config(f"{flags} {changed}", world=8), data) != own, changed
    assert identity(config(flags, world=8), {**data, "data_identity": "c"}) != own
    assert identity(config(flags.replace("size 2", "size 1"), world=8), data) != own


@pytest.mark.parametrize("variable", [None, "TORCHELASTIC_RUN_ID", "HELIXPIPE_LAUNCHER"])
def test_a_rank_that_no_launcher_starts_again_has_a_folder_of_its_own(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shell, all runs are children."""
    for each in ("TORCHELASTIC_RUN_ID", "HELIXPIPE_LAUNCHER"):
        monkeypatch.delenv(each, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "x")
    assert folder_of_rank().parent == folder_of(os.getpid() if variable is None else os.getppid())


@pytest.mark.parametrize(
    ("error", "leaving", "kept"),
    [(UserError("NaN"), False, False), (UserError("NaN"), True, True), (RuntimeError(), False, True)],
    ids=["a run that would fail again", "others were lost", "a lost connection"],
)
def test_a_run_that_failed_by_itself_leaves_nothing(tmp_path: Path, error: Any, leaving: bool, kept: bool) -> None:
    folder = tmp_path / "job" / "0"
    job = Job(1, {})
    state = State(job, 0, TakenBy((0, 0), 0, 1, True))
    snapshots = Snapshots(folder, Member(0, (0, 0), None, None), state, Network(job, 0))
    snapshots.take(TrainingProgress(iteration=1))
    follower = HostSnapshots(config())
    follower._snapshots, follower._leaving = snapshots, lambda: leaving
    follower.close(error)
    assert folder.exists() == kept


def test_a_snapshot_is_whole_or_says_that_it_is_not(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "own-0")
    assert slot.stamp is None
    slot.reserve(100)
    assert slot.stamp is None and slot.body.numel() == 100
    slot.body.fill_(7)
    slot.complete(Stamp(2, 5))
    again = Slot(tmp_path / "own-0")
    assert again.stamp == Stamp(2, 5) and again.body.unique().tolist() == [7]
    again.begin()
    assert slot.stamp is None and Slot(tmp_path / "own-0").body.numel() == 0
    again.complete(Stamp(2, 6))
    again.reserve(100)
    assert again.stamp == Stamp(2, 6), "room that is there is not given up"
    again.reserve(50)
    assert again.stamp is None and again.body.numel() == 50


def test_the_one_that_is_kept_is_not_written_over(tmp_path: Path) -> None:
    two = TwoSlots(tmp_path, "own")
    for step in range(1, 6):
        slot = two.other
        assert slot is not two.kept
        slot.reserve(8)
        slot.begin()
        assert step < 3 or [stamp.step for stamp, _, _ in two.whole()] == [step - 1]
        slot.complete(Stamp(1, step))
        two.kept = slot
    again = TwoSlots(tmp_path, "own")
    again.keep(Stamp(1, 4))
    assert again.kept is not None and again.kept.stamp == Stamp(1, 4) and again.other.stamp == Stamp(1, 5)
    again.keep(Stamp(1, 3))
    assert again.kept is None


def test_the_newest_of_a_job(tmp_path: Path) -> None:
    assert newest(tmp_path) == Stamp(0, 0)
    for rank, stamp in enumerate([Stamp(1, 9), Stamp(2, 4), Stamp(2, 3)]):
        (tmp_path / str(rank)).mkdir()
        slot = Slot(tmp_path / str(rank) / "own-1")
        slot.reserve(8)
        slot.complete(stamp)
    assert newest(tmp_path) == Stamp(2, 4)


def offer(step: int, place: int, part: int = 0, parts: int = 1, life: int = 1, size: int = 8) -> Offer:
    return Offer(Stamp(life, step), TakenBy((place, 0), part, parts, parts == 1), size, ("own", step % 2))


def test_the_newest_step_that_is_whole_is_chosen() -> None:
    places = {(0, 0), (1, 0)}
    choice = choose([[offer(3, 0), offer(4, 0)], [offer(3, 1)]], places)
    assert choice is not None and choice.stamp == Stamp(1, 3)
    assert {place: [dict(each.holders) for each in own] for place, own in choice.sources.items()} == {
        (0, 0): [{0: ("own", 1)}],
        (1, 0): [{1: ("own", 1)}],
    }
    assert choose([[offer(3, 0)], [offer(4, 1)]], places) is None
    later = choose([[offer(9, 0), offer(5, 0, life=2)], [offer(9, 1), offer(5, 1, life=2)]], places)
    assert later is not None and later.stamp == Stamp(2, 5), "an older life's further steps are another history"
    mixed = choose([[offer(9, 0), offer(8, 0)], [offer(9, 1, life=2), offer(8, 1)]], places)
    assert mixed is not None and mixed.stamp == Stamp(1, 8), "steps of two lives do not mix"


def test_snapshots_of_other_sizes_are_not_taken_for_each_other() -> None:
    choice = choose([[offer(3, 0, size=9)], [offer(3, 0, size=8)], [offer(3, 0, size=9)]], {(0, 0)})
    assert choice is not None
    assert [(each.size, sorted(each.holders)) for each in choice.sources[0, 0]] == [(9, [0, 2])]


def test_a_state_that_is_shared_out_needs_all_parts() -> None:
    places = {(0, 0)}
    assert choose([[offer(3, 0, 0, 3), offer(3, 0, 2, 3)]], places) is None
    choice = choose([[offer(3, 0, 0, 3), offer(3, 0, 2, 3, size=4)], [offer(3, 0, 1, 3), offer(3, 0, 0, 3)]], places)
    assert choice is not None
    assert [(each.size, sorted(each.holders)) for each in choice.sources[0, 0]] == [(8, [0, 1]), (8, [1]), (4, [0])]


@pytest.mark.parametrize("others", ["", "0"], ids=["the job's folder", "the rank's"])
def test_what_another_user_left_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str) -> None:
    (tmp_path / "job" / "0").mkdir(parents=True)
    theirs, real = tmp_path / "job" / others, Path.lstat

    def owned(path: Path) -> Any:
        return SimpleNamespace(st_uid=os.getuid() + 1) if path == theirs else real(path)

    monkeypatch.setattr(Path, "lstat", owned)
    job = Job(1, {})
    state = State(job, 0, TakenBy((0, 0), 0, 1, True))
    with pytest.raises(UserError, match="belongs to another user; remove it"):
        Snapshots(tmp_path / "job" / "0", Member(0, (0, 0), None, None), state, Network(job, 0))


def test_a_host_without_memory_is_named_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(slot: Slot, size: int) -> None:
        if slot.path.parent.name == "1":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Slot, "reserve", full)
    job, told = Job(2, {}), list[str]()

    def work(rank: int) -> None:
        state = State(job, rank, TakenBy((rank, 0), 0, 1, True))
        snapshots = Snapshots(
            tmp_path / str(rank), Member(rank, (rank, 0), 1 - rank, 1 - rank), state, Network(job, rank)
        )
        with pytest.raises(CheckpointError) as error:
            snapshots.take(TrainingProgress(iteration=1))
        told.append(str(error.value))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 2 and told[0] == told[1] and "(No space left on device)" in told[0] and "needs 0 MiB" in told[0]
