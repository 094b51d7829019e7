"""Calls a function on ranks under torchrun, and has what it returned on rank 0.

python benchmarks/ranks.py CALL RESULT     (what each rank runs; both are files, see `write_call`)
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.json_values import parse_json


def own_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a process of this checkout with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(more or {})}


def run_module(module: str, *arguments: str, environment: Mapping[str, str] | None = None, quiet: bool = True) -> None:
    """A module of this checkout as a program. Raises UserError when it fails."""
    output = subprocess.DEVNULL if quiet else None
    command = python_command(module, *arguments)
    status = subprocess.run(command, env=own_environment(environment), cwd=ROOT, stdout=output).returncode
    if status:
        raise UserError(f"{module} ended with exit status {status}; what it said is above.")


def seconds_of_steps(trainer: Any, steps: int) -> float:
    """Run so many training steps on all ranks at once; the seconds until the last is done everywhere."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        trainer._iteration(record=False)
    dist.barrier()
    return time.perf_counter() - start


def on_ranks(function: str, *arguments: Any, ranks: int = 2, environment: Mapping[str, str] | None = None) -> Any:
    """Return what the function, `module:name`, returned on rank 0. Arguments and result are what JSON can carry."""
    with tempfile.TemporaryDirectory() as folder:
        program = write_call(folder, function, *arguments)
        torchrun = ("--standalone", "--nproc-per-node", str(ranks))
        run_module("torch.distributed.run", *torchrun, *program, environment=environment, quiet=False)
        return result_in(folder)


def write_call(folder: str | Path, function: str, *arguments: Any) -> list[str]:
    """The command line, for torchrun, that makes the call and leaves its result in the folder."""
    call = Path(folder, "call.json")
    call.write_text(json.dumps([function, arguments]), encoding="utf-8")
    return [__file__, str(call), str(Path(folder, "result.json"))]


def result_in(folder: str | Path) -> Any:
    return parse_json(Path(folder, "result.json").read_text(encoding="utf-8"))


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    call, result = map(Path, sys.argv[1:])
    function, arguments = parse_json(call.read_text(encoding="utf-8"))
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(*arguments)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(value), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
