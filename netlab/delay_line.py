"""Links with a delay where the kernel has no netem: frames wait in this process.

A link is a pair of TAP devices, `eth0` on a host and a port of the switch. A thread passes frames between the two ends:
those from the host at once, those to the host when they are `delay` seconds old. Frames are passed as the kernel
holds them before it cuts them for the wire (up to 64 KiB, with the header that says how), so a link of 1 Gbit/s is some
thousand frames a second. What the thread adds to the delay itself is 0.2 to 0.3 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_LONGEST = (1 << 16) + 256


class DelayLine:
    """Made, joined to the hosts, started, closed. Raises OSError where TAP devices are not allowed."""

    def __init__(self, delay: float):
        self.delay = delay
        self._to_switch: dict[int, int] = {}  # TAP of a host -> of its port
        self._to_host: dict[int, int] = {}
        self._wake_read, self._wake = os.pipe()
        self._thread: threading.Thread | None = None

    def join(self, host: str, switch: str, port: str) -> None:
        """Make a link: `eth0` in the namespace `host`, `port` in the namespace `switch`."""
        own, other = _tap(host, "eth0"), _tap(switch, port)
        self._to_switch[own], self._to_host[other] = other, own

    def start(self) -> None:
        self._thread = threading.Thread(target=self._pass, name="delay line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._wake)
        if self._thread is not None:
            self._thread.join()
        for descriptor in (*self._to_switch, *self._to_host, self._wake_read):
            os.close(descriptor)

    def _pass(self) -> None:
        late: deque[tuple[float, int, bytes]] = deque()  # of one delay: first in, first out
        open_ends = [self._wake_read, *self._to_switch, *self._to_host]
        while True:
            timeout = max(0.0, late[0][0] - time.monotonic()) if late else None
            for descriptor in select.select(open_ends, [], [], timeout)[0]:
                if descriptor == self._wake_read:
                    return
                try:
                    frame = os.read(descriptor, _LONGEST)
                except OSError:  # its namespace is gone
                    open_ends.remove(descriptor)
                    continue
                if descriptor in self._to_switch:
                    _write(self._to_switch[descriptor], frame)
                else:
                    late.append((time.monotonic() + self.delay, self._to_host[descriptor], frame))
            while late and late[0][0] <= time.monotonic():
                _, descriptor, frame = late.popleft()
                _write(descriptor, frame)


def _write(descriptor: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the other end is down, or gone: frames get lost, as on a cable
        os.write(descriptor, frame)


def _tap(namespace: str, name: str) -> int:
    """Make a TAP device, move it to a namespace, and return the descriptor of its other end."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    try:
        request = struct.pack("16sH22x", b"tap%d", _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
        given = fcntl.ioctl(descriptor, _TUNSETIFF, request)[:16].rstrip(b"\0").decode()
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        command = ["ip", "link", "set", given, "netns", namespace, "name", name]
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
