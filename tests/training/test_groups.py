"""How a rank leaves its group: which connections are closed, and what becomes of one that is held up."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from helixpipe.common.groups_channel import JOIN, LEAVE, WAITS
from megatron.pretrain.process import groups
from megatron.pretrain.process.groups import RankGroups, close_connections


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as ours, listener.accept()[0] as theirs:
            yield ours, theirs
        socket.create_connection(listener.getsockname()).close()  # it still listens


def test_connections_are_closed_and_nothing_else(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams, socket.socket(type=socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        datagrams.connect(receiver.getsockname())
        before = set(os.listdir("/proc/self/fd"))
        close_connections()
        assert len(set(os.listdir("/proc/self/fd"))) == len(before)
        assert datagrams.send(b"x") == 1
    with pytest.raises(BrokenPipeError):
        ours.send(b"x")


def test_descriptors_that_have_run_out(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: str) -> list[str]:
        raise OSError

    monkeypatch.setattr(os, "listdir", none_left)
    close_connections()
    assert pair[0].send(b"x") == 1


@pytest.mark.parametrize("word", [LEAVE, JOIN])
def test_who_does_not_leave_ends_where_ranks_have_died(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, closings = threading.Event(), threading.Semaphore(0)
    kills: list[tuple[int, int]] = []

    def kill(process: int, number: int) -> None:
        kills.append((process, number))
        ended.set()

    monkeypatch.setattr(groups, "_STUCK", 0.0)
    monkeypatch.setattr(groups, "close_connections", closings.release)
    monkeypatch.setattr(os, "kill", kill)
    launcher, channel = socket.socketpair()
    with launcher, launcher.makefile() as lines:
        rank = RankGroups(channel)
        launcher.sendall(f"{word}\n".encode())
        assert rank.leaving(60.0)
        assert word == JOIN or closings.acquire(blocking=False), "closed before it is told"
        for _ in range(3):
            assert closings.acquire(timeout=60.0)
        assert ended.is_set() == (word == LEAVE)
        assert set(kills) <= {(os.getpid(), signal.SIGKILL)}
        launcher.sendall(b"{}\n")
        assert rank.next() == {}
        assert lines.readline().strip() == WAITS and not rank.leaving()
