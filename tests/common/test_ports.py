"""Ports that ranks are told of before one of them listens there."""

from __future__ import annotations

import socket

import pytest

from helixpipe.common import ports
from helixpipe.common.ports import free_port


def test_a_free_port_can_be_bound_and_is_none_that_connections_get() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port := free_port()))
    assert 1024 < port < 32768


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_LAST", port + 9)
        assert all(port < free_port() <= port + 9 for _ in range(20))
        monkeypatch.setattr(ports, "_LAST", port)
        with pytest.raises(OSError, match=f"no port from {port} to {port} "):
            free_port()
