"""A real SLURM on this machine: a controller and two nodes, each in a network namespace with a host name of its own.

Needs root and the packages that `tools/slurm.sh` installs. Nothing is written outside the given folder except the
namespaces, and no traffic leaves the machine: the nodes are joined by a bridge that leads nowhere. Every process of a
cluster runs in a namespace whose name has the number of the process that started it: the next start ends what a killed
one left.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.launching import ROOT

REQUEUE = 10
"""Seconds for which a credential of a job's step is valid, so that long a requeued job waits."""

SECONDS = 240.0
"""The longest wait for anything; only a failure takes as long."""

FINISHED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
_COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "nsenter", "unshare")
_SBIN = ("/usr/sbin", "/sbin")
_FREEZER = Path("/sys/fs/cgroup/freezer")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/pid/slurmctld
SlurmdPidFile={folder}/pid/slurmd-%n
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
MailProg=/bin/true
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_setup_env_fail,bf_interval=1
GresTypes=gpu
NodeName=node[1-{nodes}] CPUs=64 RealMemory=20000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Return why no SLURM can be started here, or None if it can."""
    if os.geteuid() != 0:
        return "a SLURM with network namespaces needs root"
    path = os.pathsep.join([os.environ.get("PATH", ""), *_SBIN])
    missing = [command for command in _COMMANDS if shutil.which(command, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tools/slurm.sh installs them)"
    if subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "root may not make network namespaces here"
    return None


def freezer() -> bool:
    """Return whether proctrack/cgroup can run here: it needs the freezer of the first version of cgroups."""
    return os.access(_FREEZER, os.W_OK)


@dataclass
class Cluster:
    """A controller and its nodes. A context: entering it starts them, leaving it ends all that ran on them.

    Several may run at once, except with proctrack/cgroup, whose cgroups have the names of the nodes.

    Attributes:
        folder: where configuration, state and logs lie.
        proctrack: `linuxproc` or `cgroup`, which decides whom a signal of SLURM's reaches.
        nodes: how many nodes there are.
    """

    folder: Path
    proctrack: str = "linuxproc"
    nodes: int = 2
    _prefix: str = field(default_factory=lambda: f"slurm-{os.getpid()}-{secrets.token_hex(2)}", init=False)

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    # ------------------------------------------------------------------------------------------------------------ jobs

    def run(self, *command: str, environment: dict[str, str] | None = None) -> str:
        """Run a command on the controller's host, in the checkout, and return what it printed on both streams.

        Raises AssertionError, with the output, if it fails.
        """
        done = subprocess.run(
            [*self._entered(), *command],
            cwd=ROOT,
            env=self.environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def environment(self, variables: dict[str, str] | None = None) -> dict[str, str]:
        """Return a login shell's environment on the controller, with the given variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
        path = os.pathsep.join([os.environ["PATH"], *_SBIN])
        return {**kept, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), **(variables or {})}

    def submit(self, *words: str, environment: dict[str, str] | None = None) -> int:
        """Submit a batch script, with sbatch's flags before its path, and return the number of the job."""
        return int(self.run("sbatch", "--parsable", *words, environment=environment).split(";")[0])

    def state(self, job: int) -> str:
        """Return the state of a job, such as RUNNING."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job))
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)["JobState"]

    def wait(self, job: int, *states: str) -> str:
        """Wait until a job is in one of the states, by default in one that ends it, and return that state."""
        wanted = states or FINISHED
        wait_until(lambda: self.state(job) in wanted, lambda: f"not {' or '.join(wanted)}:\n{self.run('squeue')}")
        return self.state(job)

    def processes(self) -> list[int]:
        """Return the processes of jobs on all nodes: all but the daemons."""
        nodes = [f"node{number + 1}" for number in range(self.nodes)]
        daemons = {int((self.folder / "pid" / f"slurmd-{node}").read_text()) for node in nodes}
        return [pid for node in nodes for pid in self._on_host(node) if pid not in daemons]

    def _on_host(self, host: str) -> list[int]:
        return _processes(self._netns(host))

    def cut_power(self, node: int) -> None:
        """End every process on a node at once."""
        _kill_all(self._netns(f"node{node}"))

    def restore(self, node: int) -> None:
        """Start a lost node's daemon again once the controller knows of the loss, and wait until it is in service."""
        self._wait_for_node(node, "down")
        self._on(f"node{node}", "slurmd")
        self._wait_for_node(node, "idle", "mixed", "allocated")

    def _wait_for_node(self, node: int, *states: str) -> None:
        def state() -> str:
            return self.run("sinfo", "--noheader", f"--nodes=node{node}", "--format=%T").strip()

        wait_until(lambda: state().startswith(states), lambda: f"node{node} is {state()}, not {' or '.join(states)}")

    # --------------------------------------------------------------------------------------------------- start and end

    def _start(self) -> None:
        folder = self.folder
        end_leftovers()
        for name in ("state", "log", "pid", *(f"spool/node{n + 1}" for n in range(self.nodes))):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(8):  # GRES wants a device file for each pretended GPU; these are /dev/null
            os.mknod(folder / f"state/gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        self._join_hosts()
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, proctrack=self.proctrack, nodes=self.nodes, requeue=REQUEUE)
        )
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\n"
        )
        (folder / "gres.conf").write_text(f"NodeName=node[1-{self.nodes}] Name=gpu File={folder}/state/gpu[0-7]\n")
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._on(
            "head",
            "munged",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/pid/munged",
            f"--log-file={folder}/log/munged",
            f"--seed-file={folder}/state/munge.seed",
            "--force",
        )
        self._on("head", "slurmctld")
        for number in range(self.nodes):
            self._on(f"node{number + 1}", "slurmd")
        wait_until(lambda: self._idle() == self.nodes, lambda: self.run("sinfo"))

    def _idle(self) -> int:
        with suppress(AssertionError, FileNotFoundError, ValueError):  # the controller is not up yet
            return sum(map(int, self.run("sinfo", "--noheader", "--states=idle", "--format=%D").split()))
        return 0

    def _join_hosts(self) -> None:
        """Make the hosts: a bridge in the controller's namespace, which is itself a host on it."""
        lines = ["127.0.0.1 localhost", "10.88.0.254 head"]
        head = self._add("head")
        _do("ip", "-n", head, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", head, "address", "add", "10.88.0.254/24", "dev", "br0")
        for link in ("br0", "lo"):
            _do("ip", "-n", head, "link", "set", link, "up")
        for number in range(1, self.nodes + 1):
            name = self._add(f"node{number}")
            port = f"port{number}"
            _do("ip", "-n", head, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "-n", head, "link", "set", port, "addrgenmode", "none")
            _do("ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none")
            _do("ip", "-n", head, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", name, "address", "add", f"10.88.0.{number}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _do("ip", "-n", name, "link", "set", link, "up")
            lines.append(f"10.88.0.{number} node{number}")
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _add(self, host: str) -> str:
        """Add the network namespace of a host and return its name."""
        _do("ip", "netns", "add", self._netns(host))
        return self._netns(host)

    def _netns(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _on(self, host: str, *daemon: str) -> None:
        """Start a daemon on a host, in namespaces of its own for network, host name and mounts."""
        start = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; shift 2; exec "$@"'
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{self._netns(host)}", "unshare", "--uts", "--mount", "bash", "-c", start]
            + ["start", host, str(self.folder), *daemon],
            check=True,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _entered(self) -> list[str]:
        pid = (self.folder / "pid/slurmctld").read_text().strip()
        return ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--wd=."]

    def _end(self) -> None:
        _remove(self._prefix)
        if self.proctrack == "cgroup":
            for folder in sorted(_FREEZER.glob("slurm_node*/**"), reverse=True):
                with suppress(OSError):
                    folder.rmdir()


def end_leftovers() -> None:
    """End the clusters of processes that are gone without having ended them."""
    for prefix in {name.rpartition("-")[0] for name in _namespaces()}:
        if not Path(f"/proc/{prefix.split('-')[1]}").exists():
            _remove(prefix)


def _remove(prefix: str) -> None:
    """Remove the namespaces of a cluster, and end all that runs there."""
    for name in _namespaces():
        if name.startswith(prefix):
            _kill_all(name)
            _do("ip", "netns", "del", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _out("ip", "netns", "list").splitlines() if re.match(r"slurm-\d+-", line)]


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in _out("ip", "netns", "pids", namespace).split()]


def _kill_all(namespace: str) -> None:
    def none() -> bool:
        processes = _processes(namespace)
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes  # one of them may just have started another

    wait_until(none, lambda: f"processes are left in {namespace}")


def wait_until(holds: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait until a condition holds. Raises AssertionError, with what `otherwise` returns, after SECONDS."""
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, f"after {SECONDS:.0f} s: {otherwise()}"
        time.sleep(0.1)


def wait_for(log: Path, text: str, times: int = 1) -> str:
    """Wait until a log has the text so many times, and return the log."""

    def said() -> str:
        return log.read_text() if log.exists() else ""

    wait_until(lambda: said().count(text) >= times, lambda: f"{log} has no {text!r}, or not {times} times:\n{said()}")
    return said()


def losses(log: str) -> dict[int, str]:
    """Return the loss of each iteration, as it was printed last."""
    return {int(number): loss for number, loss in re.findall(r" iteration +(\d+)/.*?lm loss: (\S+)", log)}


def _do(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_with_sbin())


def _out(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=_with_sbin()).stdout


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([os.environ["PATH"], *_SBIN])}
