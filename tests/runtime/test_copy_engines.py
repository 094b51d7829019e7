"""What copies between device and host, and the host's memory: what each promises by itself, whoever asks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from helixpipe.runtime.arena import ALIGNMENT, Allocation, Arena
from helixpipe.runtime.copies import CopyEngine, StreamEngine, ThreadEngine
from tests.runtime.happens_before.cuda import Simulation

SIZE = 8


@contextmanager
def streams() -> Iterator[tuple[Simulation, StreamEngine]]:
    simulation = Simulation()
    with simulation.replaced():
        yield simulation, StreamEngine(torch.device("cuda", 0))


def pinned() -> torch.Tensor:
    return torch.empty(SIZE, pin_memory=True)


def waits_for_what_was_computed(engine: CopyEngine, right: bool) -> None:
    tensor, host = torch.ones(SIZE), pinned()
    tensor.add_(1)
    engine.start([(host, tensor)], False, None).wait()


def comes_in_after_its_own_copy_out(engine: CopyEngine, right: bool) -> None:
    """The stream that computes has not waited for the copy out, so knows nothing of it."""
    tensor, host, again = torch.ones(SIZE), pinned(), torch.empty(SIZE)
    out = engine.start([(host, tensor)], False, None)
    back = engine.start([(again, host)], True, out if right else None)
    out.wait()
    back.wait()
    again.mul(2)


def is_used_when_it_is_back(engine: CopyEngine, right: bool) -> None:
    host, tensor = pinned(), torch.empty(SIZE)
    copy = engine.start([(tensor, host)], True, None)
    if right:
        copy.wait()
    tensor.mul(2)
    copy.wait()


def is_changed_when_it_has_gone(engine: CopyEngine, right: bool) -> None:
    tensor, host = torch.ones(SIZE), pinned()
    copy = engine.start([(host, tensor)], False, None)
    if right:
        copy.wait()
    tensor.zero_()
    copy.wait()


PROGRAMS = [
    waits_for_what_was_computed,
    comes_in_after_its_own_copy_out,
    is_used_when_it_is_back,
    is_changed_when_it_has_gone,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_streams_order_what_is_waited_for(program: Callable[[CopyEngine, bool], None]) -> None:
    """Each right here, and wrong where a wait of the caller's is left out."""
    with streams() as (simulation, engine):
        program(engine, True)
    assert not simulation.world.findings, simulation.world.findings
    if program is not waits_for_what_was_computed:
        with streams() as (simulation, engine):
            program(engine, False)
        assert simulation.world.findings


def test_streams_tell_when_all_has_ended() -> None:
    """The host may then let go of any memory."""
    with streams() as (simulation, engine):
        tensor, host = torch.ones(SIZE), pinned()
        engine.start([(host, tensor)], False, None)
        engine.start([(torch.empty(SIZE), pinned())], True, None)
        engine.finish()
        del tensor, host
        simulation.memories.settle()
    assert not simulation.world.findings


def test_the_copies_of_a_stream_run_in_it_and_are_timed_there() -> None:
    with streams() as (simulation, engine):
        at: list[str] = []
        engine.start([], False, None, 7, lambda: at.append(simulation.world.stream.name))
        engine.start([], True, None, 8, lambda: at.append(simulation.world.stream.name))
        assert [each.task for each in engine.timed] == [7, 8]
        assert len(set(at)) == 2 and "compute" not in at
        assert simulation.world.stream is simulation.world.compute


# ------------------------------------------------------------------------------------------------------------- threads


@contextmanager
def held_up() -> Iterator[tuple[ThreadEngine, threading.Event]]:
    """No copy is made before the event."""
    go = threading.Event()
    engine = ThreadEngine(delay=lambda: 0.0 * go.wait(10.0))
    try:
        yield engine, go
    finally:
        go.set()
        engine.close()


def test_a_thread_copies_behind_the_caller() -> None:
    source, target = torch.ones(SIZE), torch.zeros(SIZE)
    with held_up() as (engine, go):
        copy = engine.start([(target, source)], False, None)
        assert target.sum() == 0
        go.set()
        copy.wait()
        assert target.sum() == SIZE


def test_a_copy_in_is_made_after_its_own_copy_out() -> None:
    """Two threads: the one that copies out comes late."""
    go, device, host, again = threading.Event(), torch.ones(SIZE), torch.zeros(SIZE), torch.zeros(SIZE)
    out = ThreadEngine(delay=lambda: 0.0 * go.wait(10.0))
    engine = ThreadEngine()
    first = out.start([(host, device)], False, None)
    second = engine.start([(again, host)], True, first)
    assert not second.ended.wait(0.05)
    go.set()
    second.wait()
    assert again.sum() == SIZE
    out.close()
    engine.close()


def test_a_copy_that_fails_is_told_to_who_waits() -> None:
    engine = ThreadEngine()
    failed = engine.start([(torch.ones(2), torch.ones(3))], False, None)
    with pytest.raises(RuntimeError, match="between device and host failed"):
        failed.wait()
    behind = engine.start([(torch.ones(2), torch.ones(2))], True, failed)
    with pytest.raises(RuntimeError, match="between device and host failed"):
        behind.wait()
    engine.finish()
    engine.close()


# -------------------------------------------------------------------------------------------------------------- memory


def test_a_block_is_page_locked_in_place_and_no_larger_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own page-locked memory would be 8,192 bytes."""
    locked: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: locked.update({address: nbytes}) or 0,
        cudaHostUnregister=lambda address: 0 if locked.pop(address) else 1,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None if status == 0 else pytest.fail(str(status)))
    with streams() as (_, engine):
        arena = Arena(5120, engine.host_memory)
        part = arena.take(100)
        assert locked == {part.tensor.data_ptr(): 5120}
        engine.close()
    assert not locked


def test_memory_stays_page_locked_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is no longer locked would fail, or read what others write there."""
    with streams() as (simulation, engine):
        known: list[bool] = []

        def unregister(address: int) -> int:
            main = simulation.world.main
            known.append(all(main.knows(each.actor.number, each.actor.time) for each in engine._streams.values()))  # type: ignore[attr-defined]
            return 0

        cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
        host = Arena(4 * SIZE, engine.host_memory).take(4 * SIZE)
        engine.start([(host.tensor, torch.ones(4 * SIZE, dtype=torch.uint8))], False, None)
        engine.start([(torch.empty(SIZE), pinned())], True, None)
        engine.close()
    assert known == [True]


@pytest.mark.parametrize("seed", range(20))
def test_parts_lie_apart_and_come_back(seed: int) -> None:
    """Random parts, taken and given back in any order: what is written into one is in no other; afterwards all of the
    memory is one gap again."""
    rng = random.Random(seed)
    arena = Arena(rng.choice((0, 4000, 40000)))
    taken: list[tuple[Allocation, int]] = []
    most = 0
    for number in range(120):
        if taken and rng.random() < 0.45:
            part, value = taken.pop(rng.randrange(len(taken)))
            assert torch.all(part.tensor == value)
            arena.give_back(part)
        else:
            nbytes = rng.choice((1, 511, 512, 513, rng.randint(1, 9000)))
            part = arena.take(nbytes)
            assert part.tensor.nbytes == nbytes and part.offset % ALIGNMENT == 0
            part.tensor.fill_(number)
            taken.append((part, number))
        used = sum(-(-part.tensor.nbytes // ALIGNMENT) * ALIGNMENT for part, _ in taken)
        most = max(most, used)
        assert (arena.used, arena.peak) == (used, most) and arena.reserved >= used
    for part, value in taken:
        assert torch.all(part.tensor == value)
        arena.give_back(part)
    assert arena.used == 0
    assert [len(gaps) for gaps in arena._gaps] == [1] * len(arena._blocks)
    assert sum(end - start for gaps in arena._gaps for start, end in gaps) == arena.reserved


def test_a_step_gets_the_places_of_the_one_before() -> None:
    arena, sizes = Arena(10_000), (3000, 700, 1200, 700)
    places = []
    for _ in range(2):
        parts = [arena.take(size) for size in sizes]
        places.append([(part.block, part.offset) for part in parts])
        for part in (parts[1], parts[0], parts[3], parts[2]):
            arena.give_back(part)
    assert places[0] == places[1] and arena.reserved == 10_240


def test_what_is_beyond_the_first_block_makes_another() -> None:
    arena = Arena(2048)
    assert arena.reserved == 0
    arena.take(1024)
    assert arena.reserved == 2048
    arena.take(2000)  # not beside the first
    assert arena.reserved == 4096
    arena.take(100_000)
    assert arena.reserved == 4096 + 100_352
