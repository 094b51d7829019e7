"""Ranks that srun starts: one task is one rank, and SLURM's variables say which."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


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
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = meeting_place(environ)


def meeting_place(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return address and port of rank 0's store: of a job's first host, unless MASTER_ADDR and MASTER_PORT say others.

    Jobs that share a node have ports of their own. examples/node.sh takes the next one for the preflight.
    """
    address = environ.get("MASTER_ADDR", "localhost")
    if address in ("localhost", "::1") or address.startswith("127."):  # a login shell may have left it there
        address = first_host(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    return address, environ.get("MASTER_PORT") or str(20000 + 2 * (int(environ["SLURM_JOB_ID"]) % 5000))


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's compact list, such as `gpu-03` of `gpu-[03-05,7],head`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _first_count(counts: str) -> str:
    """Return the first number of SLURM's compact list of counts, such as `8` of `8(x3),4`."""
    found = re.match(r"\d+", counts)
    return found[0] if found else "1"


if __name__ == "__main__":
    print(*meeting_place(os.environ))
