"""Launch the training program as a user does, read what it prints, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "HELIXPIPE_INTEGRATION_TEST"

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --num-workers 0 --log-interval 1 --eval-iters 0"
)
MOCK = f"{MODEL} --mock-data --tokenizer-type NullTokenizer --vocab-size 100"


@dataclass(frozen=True)
class Launch:
    """A launch of pretrain_gpt.py, or another script: under torchrun with that many ranks, or (0) by plain python."""

    name: str
    flags: str
    ranks: int = 2
    script: str = "pretrain_gpt.py"
    folder: Path = ROOT  # where it is started

    def start(self, **paths: Path | str) -> Job:
        """Start it; `{name}` in the flags stands for a path given here."""
        return Job(self.filled_in(**paths))

    def filled_in(self, **paths: Path | str) -> Launch:
        """Itself, with the paths that stand for `{name}` in its flags."""
        return replace(self, flags=self.flags.format(**paths))

    def run(self, **paths: Path | str) -> Result:
        return self.start(**paths).wait()


@dataclass(frozen=True)
class Result:
    """How a launch ended: its exit status, all it printed, and the seconds it took."""

    status: int
    output: str
    seconds: float = field(compare=False)

    def done(self) -> Result:
        """Itself, once it is known to have ended well and quietly."""
        assert self.status == 0, self.output
        assert "Traceback" not in self.output and "Warning" not in self.output, self.output
        return self

    def losses(self) -> dict[int, tuple[str, str]]:
        """Iteration -> (loss, gradient norm) as printed."""
        found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)", self.output)
        return {int(iteration): (loss, norm) for iteration, loss, norm in found}

    def loss_values(self) -> dict[int, float]:
        return {iteration: float(loss) for iteration, (loss, _) in self.losses().items()}

    def sentence(self) -> str:
        """Return what it said of a mistake: once, without a traceback from our ranks, with a failing status."""
        said = re.findall(r"^helixpipe: (.*)$", self.output, re.MULTILINE)
        assert self.status != 0 and len(said) == 1, self.output
        ours, _, _ = self.output.partition("torch/distributed/run.py")  # torchrun's own words come after
        assert "megatron/pretrain" not in ours and "Error: " not in ours, self.output
        return said[0]


def marked_processes(mark: str, rank: str) -> dict[int, str]:
    """Return every living process with this mark in its environment: its number, and its value of the variable `rank`,
    which is empty for a launcher."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it is gone, or another user's
                words = (folder / "environ").read_text(errors="replace").split("\0")
                variables = dict(word.split("=", 1) for word in words if "=" in word)
                if variables.get(MARK) == mark and process_stat(folder.name)[0] != "Z":
                    found[int(folder.name)] = variables.get(rank, "")
    return found


def process_stat(number: int | str) -> list[str]:
    """Return a process's state, its parent and what follows in /proc. Raises OSError where it is gone."""
    return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()


class Job:
    """A launch that is running."""

    def __init__(self, launch: Launch):
        self._mark = uuid.uuid4().hex
        self._started = time.monotonic()
        self._launch = launch
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.ranks)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if launch.ranks else []), launch.script, *launch.flags.split()],
            cwd=launch.folder,
            env={**environment, MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._lines: list[str] = []

    def wait_for(self, words: str) -> None:
        """Read until a line holds these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if words in line:
                return
        raise AssertionError(f"{self._launch.name} ended without {words!r}:\n{''.join(self._lines)}")

    def wait(self, seconds: float = 280.0) -> Result:
        """Until it has ended by itself; fails when a process of it is left a little later."""
        try:
            rest, _ = self.process.communicate(timeout=seconds)
            deadline = time.monotonic() + 30.0  # a loader process looks for its rank every 5 s
            while (left := self.processes()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not left, f"{self._launch.name} left processes behind: {left}"
        finally:
            self.end()
        return Result(self.process.returncode, "".join(self._lines) + rest, time.monotonic() - self._started)

    def end(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> dict[int, str]:
        """Every living process of the launch: pid -> its RANK ('' for torchrun)."""
        return marked_processes(self._mark, "RANK")

    def rank(self, number: int) -> int:
        """The pid of a rank: the oldest process that has its number."""
        return min(pid for pid, rank in self.processes().items() if rank == str(number))
