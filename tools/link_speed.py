"""Measures what one TCP connection between two hosts reaches: bytes a second and the round-trip time.

    python tools/link_speed.py serve              on one host; ends after one measurement
    python tools/link_speed.py ADDRESS BYTES       on the other; prints {"bits_per_second": …, "round_trip": …}

Bytes are those of the payload: Ethernet, IP and TCP headers take about 4 % of a link with frames of 1514 bytes. They
are counted where they arrive, from the first to the last, so what lies in buffers at either end does not count.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import time

PORT = 29400
PINGS = 20
SKIPPED = 0.3  # of the bytes, from the start: TCP finds the link's rate meanwhile
CONNECT_SECONDS = 20.0


def serve() -> None:
    """Answer one `measure`: send single bytes back, then count what comes and tell the rate."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        arrivals, received = [(time.perf_counter(), 0)], 0
        buffer = bytearray(1 << 18)
        (total,) = struct.unpack("!Q", connection.recv(8, socket.MSG_WAITALL))
        while received < total and (count := connection.recv_into(buffer)):
            received += count
            arrivals.append((time.perf_counter(), received))
        begun, before = next(arrival for arrival in arrivals if arrival[1] >= SKIPPED * total)
        ended, after = arrivals[-1]
        connection.sendall(struct.pack("!d", 8 * (after - before) / (ended - begun)))


def measure(address: str, total: int) -> dict[str, float]:
    """Send `total` bytes to a host that serves. Returns payload bits a second, and seconds there and back (median)."""
    with _connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = []
        for _ in range(PINGS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            pings.append(time.perf_counter() - start)
        connection.sendall(struct.pack("!Q", total))
        block = bytes(1 << 16)
        for sent in range(0, total, len(block)):
            connection.sendall(block[: total - sent])
        (rate,) = struct.unpack("!d", connection.recv(8, socket.MSG_WAITALL))
    return {"bits_per_second": rate, "round_trip": statistics.median(pings)}


def _connect(address: str) -> socket.socket:
    """Connect to the other host, which may still be starting."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=CONNECT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
