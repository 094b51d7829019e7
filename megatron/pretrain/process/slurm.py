"""Ranks that srun starts: one task is one rank, and SLURM's variables say which."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def adopt_task(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from SLURM's, where srun started this process as one of several tasks.

    Nothing changes where RANK is set, or where this process is no task of a step, as in a batch script.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environ or not tasks.isdecimal() or int(tasks) < 2:
        return
    environ["RANK"], environ["LOCAL_RANK"] = environ["SLURM_PROCID"], environ["SLURM_LOCALID"]
    environ["WORLD_SIZE"] = tasks
    environ.setdefault("LOCAL_WORLD_SIZE", _first_count(environ.get("SLURM_STEP_TASKS_PER_NODE", tasks)))
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    if environ.get("MASTER_ADDR", "localhost") in _LOOPBACK:  # a login shell may have left it there
        environ["MASTER_ADDR"] = first_host(nodes)
    environ.setdefault("MASTER_PORT", str(port_of_job(int(environ["SLURM_JOB_ID"]))))


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's compact list, such as `gpu-03` of `gpu-[03-05,7],head`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def port_of_job(job: int) -> int:
    """Return the port of rank 0's store, by the number of the job, so that jobs on one node do not share it.

    examples/launch.sh computes the same. It uses the next port for the preflight.
    """
    return 20000 + 2 * (job % 5000)


def _first_count(counts: str) -> str:
    """Return the first number of SLURM's compact list of counts, such as `8` of `8(x3),4`."""
    found = re.match(r"\d+", counts)
    return found[0] if found else "1"
