"""A torchrun node on each host of a lab, and how its rates and delays are written."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.ranks import result_in, write_call
from benchmarks.report import ROOT
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from netlab.hosts import Lab, LabError

PORT = 29500


class Job:
    """One torchrun node on each host of a lab. output: the lines of each so far; each is also given to `echo`.
    first_failure: after `wait`, the exit status of the node that failed first, 0 when none did."""

    def __init__(
        self,
        lab: Lab,
        arguments: Sequence[str],
        ranks_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        echo: Callable[[str], None] = lambda line: None,
    ):
        self.lab, self.echo = lab, echo
        self.output: list[list[str]] = [[] for _ in range(lab.hosts)]
        self.first_failure = 0
        own = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1"}
        own["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # else it warns of each connection from an address without a name
        self.nodes = [
            lab.start(
                host,
                [
                    *python_command("torch.distributed.run", f"--nnodes={lab.hosts}", f"--node-rank={host}"),
                    *(f"--nproc-per-node={ranks_per_host}", f"--local-addr={lab.address(host)}"),
                    *(f"--master-addr={lab.address(0)}", f"--master-port={PORT}", *arguments),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", **own, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
            )
            for host in range(lab.hosts)
        ]
        self._readers = [threading.Thread(target=self._read, args=(host,), daemon=True) for host in range(lab.hosts)]
        for reader in self._readers:
            reader.start()

    def _read(self, host: int) -> None:
        pipe = self.nodes[host].stdout
        assert pipe is not None
        for line in pipe:
            self.output[host].append(line.rstrip("\n"))
            self.echo(f"[host {host}] {line.rstrip()}")

    def text(self, host: int) -> str:
        return "\n".join(self.output[host])

    def wait_for(self, words: str, host: int, seconds: float = 120.0) -> None:
        """Until a line of a host holds these words; raises TimeoutError, and LabError when the node ends before."""
        deadline = time.monotonic() + seconds
        while words not in self.text(host):
            if self.nodes[host].poll() is not None:
                self._readers[host].join(5.0)
                if words in self.text(host):
                    return
                raise LabError(f"host {host} ended without {words!r}:\n{self.text(host)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"host {host} did not print {words!r} within {seconds:.0f} s:\n{self.text(host)}")
            time.sleep(0.02)

    def wait(self, grace: float = 30.0) -> list[int]:
        """The exit status of each node (−9 for one killed), once all have ended. Those that are still there `grace`
        seconds after the first has failed are ended."""
        deadline = None
        while (ended := [node.poll() for node in self.nodes]).count(None):
            if deadline is None and any(ended):
                self.first_failure = next(filter(None, ended))
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                self.end()
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(5.0)  # a process that outlives its torchrun may hold the pipe
        statuses = [node.wait() for node in self.nodes]
        self.first_failure = self.first_failure or next(filter(None, statuses), 0)
        return statuses

    def end(self, seconds: float = 10.0) -> None:
        """Ask all nodes to end, and kill those that do not."""
        for node in self.nodes:
            if node.poll() is None:
                node.terminate()
        deadline = time.monotonic() + seconds
        while any(node.poll() is None for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(0.05)
        for host in range(self.lab.hosts):
            self.lab.kill(host)
        for node in self.nodes:
            node.wait()


def returned(lab: Lab, function: str, *arguments: Any) -> Any:
    """Return what `module:function` returns on the first of a rank on each host. Raises UserError, with the last that
    ranks have said, where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(lab, write_call(folder, function, *arguments), environment={"PYTHONPATH": str(ROOT)})
        if any(job.wait()):
            said = "\n".join(job.text(host)[-3000:] for host in range(lab.hosts))
            raise UserError(f"{function}: the ranks failed:\n{said}")
        return result_in(folder)


def parse_rate(text: str) -> float | None:
    """`100mbit` as bits a second, None for `unlimited`. Raises UserError with what is valid."""
    if text == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    if match is None or float(match[1]) == 0:
        raise UserError(f"--rate {text!r} is not a rate such as 500kbit, 100mbit or 2.5gbit, nor `unlimited`.")
    return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def parse_delay(text: str) -> float:
    """`1.5ms` as seconds. Raises UserError with what is valid."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)|0", text.lower())
    if match is None:
        raise UserError(f"--delay {text!r} is not a time such as 50us, 1.5ms or 0.1s, nor 0.")
    return 0.0 if match[1] is None else float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
