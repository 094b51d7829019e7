"""Hosts as network namespaces on one machine, joined by links with a rate and a delay; see tools/netlab.py.

Each host has one interface, eth0, that a pair of virtual Ethernet devices joins to a bridge in a further namespace, the
switch. Nothing of this is in the machine's own namespace, and none has a way out. At both ends of a link a token bucket
holds back what is sent beyond the rate; what goes from the switch to a host is also delayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from helixpipe.common.errors import UserError
from netlab.delay_line import DelayLine

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "netlab"
FRAME = 1514
"""Bytes of the longest frame: 1500 and the Ethernet header. The bucket counts frames."""

BURST_SECONDS = 0.002
"""What a link that was idle lets through at once: short, or small messages would not notice the rate."""

QUEUE_SECONDS, QUEUE_BYTES = 0.05, 1 << 18
"""What waits before a link at most: so long at its rate, and no less than some TCP windows. TCP itself keeps little in
the queue of its own host; where several hosts send to one, the switch drops what is beyond, and they slow down."""

PAIR_PACKET = 4 * FRAME
"""The longest packet before it is cut into frames, where a rate is of pairs of hosts."""


class LabError(UserError):
    """Network namespaces or links cannot be made here."""


@dataclass(frozen=True)
class Speed:
    """Speeds measured between two hosts: payload bits a second one way, and seconds there and back."""

    bits_per_second: float
    round_trip: float

    def __str__(self) -> str:
        return f"payload {self.bits_per_second / 1e6:.1f} Mbit/s, round trip {self.round_trip * 1e3:.2f} ms"


class Lab:
    """Hosts 0 … hosts−1, made on entry, removed on exit. rate: bits a second of each link in each direction, None for
    all that the machine can do; delay: seconds from host to host. pairs: the rate is what each host sends to each other
    one, whatever else it sends and receives. Raises LabError, and leaves nothing behind."""

    def __init__(self, hosts: int, rate: float | None = None, delay: float = 0.0, pairs: bool = False):
        if hosts < 2 or hosts > 200:
            raise UserError(f"--hosts {hosts} must be from 2 to 200.")
        self.hosts, self.rate, self.delay, self.pairs = hosts, rate, delay, pairs
        self._name = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(2)}"
        self._made: list[str] = []
        self._delay_line: DelayLine | None = None

    def __enter__(self) -> Lab:
        _check_rights()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs on the hosts and remove them. May be called twice."""
        while self._made:
            remove_namespace(self._made[-1])
            self._made.pop()
        if self._delay_line is not None:
            self._delay_line.close()
            self._delay_line = None

    def namespace(self, host: int) -> str:
        return f"{self._name}-host{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host; options are those of Popen. Its pid is the command's own."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command], text=True, start_new_session=True, **options
        )

    def processes(self, host: int) -> list[int]:
        """The pids of all that runs on a host."""
        return namespace_processes(self.namespace(host))

    def kill(self, host: int) -> None:
        """SIGKILL to all that runs on a host."""
        kill_namespace(self.namespace(host))

    def measure(self, source: int = 0, target: int = 1, seconds: float = 1.0) -> Speed:
        """Send from one host to another for about so long. Raises LabError when nothing arrives."""
        program = [sys.executable, str(ROOT / "tools/link_speed.py")]
        total = int(seconds * (self.rate or 8e9) / 8)
        server = self.start(target, [*program, "serve"])
        try:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            client = self.start(source, [*program, self.address(target), str(total)], **pipes)
            printed, errors = client.communicate(timeout=30 + 10 * seconds)
            if client.returncode:
                raise LabError(f"host {source} cannot send to host {target}: {errors.strip().splitlines()[-1]}.")
            return Speed(**json.loads(printed))
        finally:
            server.kill()
            server.wait()

    def plug(self, host: int, in_: bool) -> None:
        """Join a host to the switch again, or part it: nothing reaches it, and what it sends is lost."""
        _ip(f"-n {self._name}-switch link set port{host} {'up' if in_ else 'down'}")

    def set_pair_rate(self, source: int, target: int, rate: float) -> None:
        """Change the rate, in bits a second, of what one host sends to another, where rates are those of pairs."""
        assert self.pairs and self.rate is not None
        _run(f"tc -n {self.namespace(source)} class change {_pair_class(target, rate)}")

    # ------------------------------------------------------------------------------------------------------- building

    def _make(self) -> None:
        switch = self._add_namespace(f"{self._name}-switch")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        if self.delay and not self._kernel_delays(switch):
            self._delay_line = DelayLine(self.delay)
        for host in range(self.hosts):
            name, port = self._add_namespace(self.namespace(host)), f"port{host}"
            self._link(name, switch, port)
            for namespace, device in ((name, "eth0"), (switch, port)):
                _ip(f"-n {namespace} link set {device} addrgenmode none")  # no IPv6: gloo would take either address
            if self.pairs:
                self._shape_pairs(name, host)
            else:
                self._shape(name, "eth0")
            self._shape(switch, port, delay=0.0 if self._delay_line else self.delay)
            _ip(f"-n {switch} link set {port} master bridge up")
            _ip(f"-n {name} address add {self.address(host)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        if self._delay_line is not None:
            self._delay_line.start()

    def _link(self, name: str, switch: str, port: str) -> None:
        if self._delay_line is None:
            _ip(f"-n {switch} link add {port} type veth peer name eth0 netns {name}")
            return
        try:
            self._delay_line.join(name, switch, port)
        except OSError as error:
            raise LabError(f"a delay needs netem in the kernel or TAP devices, and has neither: {error}.") from None

    def _add_namespace(self, name: str) -> str:
        self._made.append(name)  # before it is there: a signal may come in between
        _ip(f"netns add {name}")
        return name

    def _kernel_delays(self, switch: str) -> bool:
        """Whether the kernel has netem, tried on an interface that is up for nothing else."""
        try:
            _run(f"tc -n {switch} qdisc add dev bridge root netem delay 1ms")
        except LabError:
            return False
        _run(f"tc -n {switch} qdisc del dev bridge root")
        return True

    def _shape(self, namespace: str, device: str, delay: float = 0.0) -> None:
        """Rate, and behind the switch delay, of what leaves by this interface. The delay is there and not on the host,
        because TCP looks at the queue of its own host to decide how much to send."""
        parent, tc = "root", f"tc -n {namespace} qdisc add dev {device}"
        if delay:
            packets = 1000 + int(2 * delay * (self.rate or 40e9) / 8 / FRAME)
            _run(f"{tc} root handle 1: netem delay {delay * 1e6:.0f}us limit {packets}")
            parent = "parent 1:1"
        if self.rate is not None and not self.pairs:
            bytes_per_second = self.rate / 8
            burst = max(2 * FRAME, round(bytes_per_second * BURST_SECONDS))
            limit = max(QUEUE_BYTES, round(bytes_per_second * QUEUE_SECONDS))
            _run(f"{tc} {parent} handle 2: tbf rate {self.rate:.0f}bit burst {burst} limit {limit}")

    def _shape_pairs(self, namespace: str, host: int) -> None:
        """A rate to each other host, of what leaves by this host's interface. Packets are small there: a class lets
        one through as soon as it has paid for the one before. The smallest, which say that something has come or may
        come, wait for none."""
        if self.rate is None:
            return
        _ip(f"-n {namespace} link set eth0 gso_max_size {PAIR_PACKET}")
        _run(f"tc -n {namespace} qdisc add dev eth0 root handle 1: htb")
        # In the header's second word the length: below 256 bytes. What has no class is not held back.
        short = "protocol ip prio 1 u32 match u16 0x0000 0xff00 at 2 flowid 1:0"
        _run(f"tc -n {namespace} filter add dev eth0 parent 1: {short}")
        for other in range(self.hosts):
            if other != host:
                _run(f"tc -n {namespace} class add {_pair_class(other, self.rate)}")
                to = f"protocol ip prio 2 u32 match ip dst {self.address(other)}/32 flowid 1:{other + 1:x}"
                _run(f"tc -n {namespace} filter add dev eth0 parent 1: {to}")


def _pair_class(other: int, rate: float) -> str:
    """The class of what a host sends to another one, for tc."""
    burst = f"burst {PAIR_PACKET} cburst {PAIR_PACKET} quantum {FRAME}"
    return f"dev eth0 parent 1: classid 1:{other + 1:x} htb rate {rate:.0f}bit {burst}"


def unavailable() -> str | None:
    """Why a lab cannot be made here, None when it can: found out by making a small one."""
    try:
        with Lab(2, rate=1e9):
            return None
    except LabError as error:
        return str(error)


def _check_rights() -> None:
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise LabError(f"netlab needs the command {command}, which is not here: install iproute2.")
    if os.geteuid() != 0:
        raise LabError("netlab makes network namespaces, which needs root: run it with sudo.")


def _ip(arguments: str) -> str:
    return _run(f"ip {arguments}")


def _run(command: str) -> str:
    # A session of its own: Ctrl-C must not stop a command half-way.
    done = subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LabError(f"network namespaces or links are not allowed here: `{command}` says: {said}")
    return done.stdout


# ------------------------------------------------------------------------------------------------------------ removing


def namespaces() -> list[str]:
    """All namespaces that any netlab has made and not removed."""
    names = re.findall(rf"^({PREFIX}-\d+-\d+-\w+-\w+)", _ip("netns list"), re.MULTILINE)
    return sorted(names)


def namespace_processes(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, start_new_session=True)
    return [int(pid) for pid in done.stdout.split()]


def kill_namespace(name: str) -> None:
    """SIGKILL to every process in it, until there is none: one may be starting another."""
    while pids := namespace_processes(name):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_namespace(name: str) -> None:
    """Kill what runs in it and remove it, with its interfaces and their other ends; nothing when it is not there."""
    kill_namespace(name)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, start_new_session=True)


def clean() -> list[str]:
    """Remove the namespaces of netlabs that are gone; those of running ones stay. Returns their names."""
    _check_rights()
    removed = []
    for name in namespaces():
        pid, started = name.split("-")[1:3]
        if _started(int(pid)) != int(started):  # also when the number belongs to another process by now
            remove_namespace(name)
            removed.append(name)
    return removed


def _started(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0
