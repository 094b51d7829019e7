"""`helixpipe dry-run`: run some ranks of a training job on GPUs that compute nothing, and say what they would do.

Each rank is a process of its own in which the training program itself runs two steps (`megatron.pretrain.dry_run`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isinf
from pathlib import Path
from typing import NamedTuple

from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.output import complain
from helixpipe.common.progress import ProgressLine
from helixpipe.costs.expert_loads import ALIKE, FLAG, parse_loads
from helixpipe.costs.hardware import GIB
from helixpipe.costs.verdict import MemoryVerdict, tensor_limit
from helixpipe.draw.table import right_aligned
from helixpipe.fake_cuda.report import RankReport
from helixpipe.fake_cuda.sequences import differences
from helixpipe.simulate.memory import KINDS

_USAGE = """usage: helixpipe dry-run --world-size N [--ranks 0,15] [--moe-load FILE|zipf:S] [--json] -- [training flags]

Run some ranks of a training job on this host's CPU as if each had its GPU: the job's own program, two steps of it, on a
device that computes nothing and weighs nothing. Says whether the job would start, in the words of training, what each
rank allocates beside what is predicted, what it sends, and whether the ranks agree on that.
--world-size: GPUs of the job. --ranks: those that are run; the first, a middle and the last unless given. --moe-load:
how unevenly experts are used, as in `helixpipe simulate`; alike unless given."""

_PREFIX = "helixpipe: "
_OWN = ("--world-size", "--ranks", FLAG)


class _Asked(NamedTuple):
    """The command's own flags: the size of the job, the ranks to run in rising order, how experts are used, whether
    JSON is wanted; and the flags of the training program."""

    world_size: int
    ranks: list[int]
    load: str
    as_json: bool
    training: list[str]


class _Ran(NamedTuple):
    """A rank that was run: its status, its lines on standard error, and its report, if it came to an end."""

    status: int
    lines: list[str]
    report: RankReport | None


def run(arguments: Sequence[str]) -> int:
    """Run the ranks, print what they show, and return 0 if the job would train. Raises UserError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    asked = _split(arguments)
    at_once = max(1, min(len(asked.ranks), os.cpu_count() or 1))
    progress = ProgressLine("dry run", unit=" ranks")
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(at_once) as pool,
        progress.parts(len(asked.ranks)) as count,
    ):

        def one(rank: int) -> _Ran:
            ran = _run(rank, asked.world_size, (str(Path(folder) / str(rank)), asked.load, *asked.training))
            count()
            return ran

        ran = list(pool.map(one, asked.ranks))
    told = dict.fromkeys(line for each in ran for line in each.lines if line.startswith(_PREFIX))
    for line in dict.fromkeys(line for each in ran for line in each.lines):
        if line not in told:
            complain(line)
    reports = [each.report for each in ran if each.report is not None]
    against = differences([report.calls() for report in reports])
    if reports or asked.as_json:
        print(json.dumps(_figures(reports, against)) if asked.as_json else _text(asked.world_size, reports, against))
    for line in told:  # last, where they are seen
        complain(line)
    return next((each.status for each in ran if each.status), 1 if against else 0)


def _split(arguments: Sequence[str]) -> _Asked:
    """The command's own flags may stand before and after those of the training program. Raises UserError."""
    given: dict[str, str] = {}
    flags: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in _OWN:
            given[name] = value if equals else next(words, "")
        elif word not in ("--", "--json"):
            flags.append(word)
    size = given.get("--world-size", "")
    if not size.isdecimal() or int(size) < 1:
        raise UserError(f"--world-size: {size!r} is not a number of GPUs, which is 1 or more; dry-run needs it.")
    last = int(size) - 1
    named = given.get("--ranks", f"0,{last // 2},{last}")
    if not re.fullmatch(r"\d+(,\d+)*", named) or max(map(int, named.split(","))) > last:
        raise UserError(f"--ranks: {named!r} is not a list of ranks from 0 to {last}, such as 0,{last}.")
    load = given.get(FLAG, ALIKE)
    parse_loads(load)
    return _Asked(int(size), sorted(set(map(int, named.split(",")))), load, "--json" in arguments, flags)


def _run(rank: int, world_size: int, arguments: Sequence[str]) -> _Ran:
    """Run a rank. arguments: of `megatron.pretrain.dry_run`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 8),
        "LOCAL_WORLD_SIZE": str(min(world_size, 8)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody listens there
        "HELIXPIPE_LAUNCHER": str(os.getpid()),
    }
    command = python_command("megatron.pretrain.dry_run", *arguments)
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    lines = done.stderr.decode(errors="replace").splitlines()
    if done.returncode == -signal.SIGKILL:  # it could not say so itself
        why = "as a host does that is out of memory: run fewer ranks at a time (--ranks)"
        lines.append(f"{_PREFIX}rank {rank} was killed, {why}.")
    return _Ran(status, lines, RankReport.load(Path(arguments[0])))


def _figures(reports: Sequence[RankReport], against: Sequence[str]) -> dict[str, object]:
    return {"ranks": [report.figures() for report in reports], "differences": list(against)}


def _text(world_size: int, reports: Sequence[RankReport], against: Sequence[str]) -> str:
    lines = [f"{len(reports)} of {world_size} ranks came through two steps on a device that computes nothing.", ""]
    lines += [*_memory_lines(reports), "", *_call_lines(reports)]
    lines += ["", *(against or ["The ranks' collectives and messages match: members, sizes, types and order."])]
    return "\n".join([*lines, *_verdict(reports)])


def _verdict(reports: Sequence[RankReport]) -> list[str]:
    """Return whether the step fits by prediction, over all ranks, and at last whether the fullest rank that ran does,
    as counted; nothing where the GPU's memory is unknown."""
    fullest = max(reports, key=lambda report: report.steps[-1].peak)
    peak, predicted = fullest.steps[-1].peak, fullest.verdict
    if isinf(fullest.gpu):
        return []
    known = predicted or MemoryVerdict(peak, 0.0, fullest.gpu, tensor_limit(fullest.gpu))
    lines = [f"By prediction the step {predicted.sentence}."] if predicted is not None else []
    return [*lines, f"{replace(known, allocated=peak).sentence}, as counted on rank {fullest.rank}"]


def _memory_lines(reports: Sequence[RankReport]) -> list[str]:
    """Return a table of the bytes that the ranks allocate and of those that are predicted."""
    headers = ("rank", "pipeline rank", "kept", "predicted", "peak", "predicted", "difference", "allocations")
    rows = []
    for report in reports:
        last, predicted = report.steps[-1], report.predicted
        kept = total = difference = "-"
        if predicted is not None:
            kept, total = _gib(sum(getattr(predicted, kind) for kind in KINDS[:3])), _gib(predicted.total)
            difference = f"{100 * (predicted.total / last.peak - 1):+.1f} %"
        ends = (difference, f"{last.allocations:,}")
        rows.append(
            (str(report.rank), str(report.pipeline_rank), _gib(last.allocated), kept, _gib(last.peak), total, *ends)
        )
    what = [
        "GiB of each GPU as counted, in torch's blocks of 512 bytes, and as predicted; a step's number of allocations.",
        "kept: between steps, predicted for weights, gradients and optimizer alone; peak: the most in a step.",
    ]
    return [*what, *_table(headers, rows)]


def _call_lines(reports: Sequence[RankReport]) -> list[str]:
    """Return a table of the collectives and messages of a step, and lines on where the host waits for its GPU."""
    rows = []
    for report in reports:
        counts, elements = report.steps[-1].counts(), report.steps[-1].traffic()
        for kind, dtype in sorted(counts):
            number, size = counts[kind, dtype], elements[kind, dtype]
            rows.append((str(report.rank), f"{number:,}", kind, f"{size:,}" if dtype else "-", dtype or "-"))
    headers = ("rank", "calls", "of", "elements of all", "type")
    lines = ["Collectives and messages of a step:", *_table(headers, rows)] if rows else ["No rank sends anything."]
    for report in reports:
        for wait, number in sorted(report.steps[-1].waits.items()):
            lines.append(f"rank {report.rank} waits for its GPU {number} times a step: {wait}")
    return lines


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) + 2 for column in zip(headers, *rows, strict=True)]
    return right_aligned(headers, rows, widths)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
