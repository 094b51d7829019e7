"""`helixpipe train`: start pretrain_gpt.py on each rank of this host, and say last what went wrong.

torchrun does the same on several hosts; here the ranks' sentence is the last thing on the screen. With snapshots in
memory (`--in-memory-checkpoint-interval`) a job outlives ranks that a signal ends (`outlive.py`).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Sequence

from helixpipe.cli.outlive import OutlivingJob
from helixpipe.cli.ranks import Ranks
from helixpipe.cli.replicas import RankLayout, Roster, ranks_of_a_replica
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.installed import require_training

PIPELINE_FLAG = "--pipeline-model-parallel-size"

_USAGE = """usage: helixpipe train [-p P] [--ranks N] [--rejoin-after SECONDS] [flags of pretrain_gpt.py]

Train on this host: N ranks, by default one a GPU, or without GPUs as many as -p, --tensor-model-parallel-size and
--context-parallel-size need.
-p is --pipeline-model-parallel-size. With --in-memory-checkpoint-interval N the job goes on when ranks are killed, from
snapshots in memory, and a replica that has lost ranks takes part again after SECONDS (default: 0, at once)."""


def run(arguments: Sequence[str]) -> int:
    """Start the ranks, forward signals to them, and return the status of the first that failed, or 0. Raises
    UserError."""
    asked = next((at for at, word in enumerate(arguments) if word in ("-h", "--help", "--help-all")), None)
    if asked is not None:
        command = python_command("megatron.pretrain", *arguments[asked:])
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            print(f"{_USAGE}\n\nThe flags of pretrain_gpt.py:\n\n{done.stdout}", end="")
        return done.returncode
    require_training("train")
    ranks, rejoin, flags = _split(arguments)
    command = python_command("megatron.pretrain", *flags)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "HELIXPIPE_LAUNCHER": str(os.getpid()),
    }
    if any(flag.startswith("--in-memory-checkpoint-interval") for flag in flags):
        with Ranks(command, environment, outlives=True) as job:
            return OutlivingJob(job, Roster(RankLayout.of(flags, ranks), rejoin)).run()
    with Ranks(command, environment) as job:
        job.begin(range(ranks))
        end = job.wait()
        assert end is not None
        return job.tell(end)


def _split(arguments: Sequence[str]) -> tuple[int, float, list[str]]:
    """Return the number of ranks, the seconds after which lost ones join, and the flags of the training program. Raises
    UserError."""
    flags: list[str] = []
    given: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("-p", "--ranks", "--rejoin-after"):
            flags.append(word)
            continue
        given[name] = value if equals else next(words, "")
        if name == "--rejoin-after" and not given[name].isdecimal():
            raise UserError(f"{name}: {given[name]!r} is not a number of seconds, which is whole and 0 or more.")
        if name != "--rejoin-after" and (not given[name].isdecimal() or int(given[name]) < 1):
            raise UserError(f"{name}: {given[name]!r} is not a number of ranks, which is 1 or more.")
    if "-p" in given:
        for place, word in enumerate(flags):
            name, equals, value = word.partition("=")
            value = value if equals else "".join(flags[place + 1 : place + 2])
            if name == PIPELINE_FLAG and value != given["-p"]:
                raise UserError(f"-p {given['-p']} and {PIPELINE_FLAG} {value} both give the pipeline ranks; give one.")
        flags += [PIPELINE_FLAG, given["-p"]]
    ranks = int(given["--ranks"]) if "--ranks" in given else gpus() or math.prod(ranks_of_a_replica(flags))
    return ranks, float(given.get("--rejoin-after", 0)), flags


def gpus() -> int:
    """Return the number of this host's GPUs that its processes may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
