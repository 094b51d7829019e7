"""The processes with which `helixpipe profile` measures."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helixpipe.cli.profile_options import ProfileOptions, model_shape
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.output import complain
from helixpipe.common.ports import free_port
from helixpipe.common.progress import ProgressLine
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.profile_costs import Profile

PROGRESS = re.compile(r"^measured (\d+) of (\d+)$", re.MULTILINE)
"""The line that the first process prints before each part."""


def measure(options: ProfileOptions) -> Profile:
    """Measure in processes of their own and write the file. Raises UserError for flags that do not fit, a file that
    cannot be written, and a process that fails."""
    model = model_shape(options)
    if options.hardware is not None:
        find_hardware(options.hardware)  # before minutes of measuring
    task = {
        "model": dataclasses.asdict(model),
        **{name: getattr(options, name) for name in ("micro_batch_size", "dtype", "processes", "threads", "repeats")},
        "seq_length": model.seq_length,
        "chunk_size": options.chunk_size or 0,
        "loss_chunk_size": options.loss_chunk_size or 0,
    }
    measured = _measure(task, max(options.processes or 0, 2), options.threads)
    measured.save(options.output)
    return measured


def _measure(task: dict[str, Any], world_size: int, threads: int) -> Profile:
    """Run the processes that measure. Raises UserError with the last line of the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        task_path, result = Path(folder, "task.json"), Path(folder, "profile.json")
        task_path.write_text(json.dumps(task), encoding="utf-8")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        command = python_command("helixpipe.profile.profiler", str(task_path), str(result))
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [Path(folder, f"output-{rank}") for rank in range(world_size)]
        try:
            for rank, path in enumerate(outputs):
                with path.open("wb") as output:
                    own = {**environment, "RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env=own, stdout=output, stderr=output))
            _wait(processes, outputs)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Profile.load(result)


def _wait(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> None:
    """Wait until all have ended; show the progress that the first one reports (`PROGRESS`), from when they start on."""
    codes: list[int | None] = [None]
    progress = ProgressLine("measuring", unit=" %")
    while None in codes:
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
        told = PROGRESS.findall(outputs[0].read_text(encoding="utf-8", errors="replace"))
        done, of = map(int, told[-1]) if told else (0, 1)
        progress.at(100 * done // of, 100)
        for code, output in zip(codes, outputs, strict=True):
            if code:
                text = PROGRESS.sub("", output.read_text(encoding="utf-8", errors="replace")).strip()
                *before, reason = [f"exit code {code}"] if code < 0 or not text else text.splitlines()
                if before:  # what led to it
                    complain(text)
                raise UserError(f"a process that measures failed: {reason}")
    progress.end()
