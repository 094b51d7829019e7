"""Ranks of jobs on the fake device: `run` starts one process that imports all once and forks for each rank."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helixpipe.costs.expert_loads import ALIKE
from helixpipe.fake_cuda.report import RankReport
from helixpipe.fake_cuda.sequences import differences

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """A training command: its flags, how many ranks it has, and those that are run, for so many steps. load: how
    experts are used, as --moe-load says."""

    name: str
    world_size: int
    flags: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: int = 2
    load: str = ALIKE


@dataclass
class Ran:
    """A job that was run. failures: what ranks that failed have printed."""

    job: Job
    reports: list[RankReport]
    failures: dict[int, str]

    def check(self) -> None:
        """All ranks ran, asked for what matches, did not wait for the device unexpectedly in a step, and, after the
        first two steps, or the one before the last, took memory for messages only where more were there at once than
        ever before."""
        assert not self.failures, "\n".join(f"rank {rank}: {text}" for rank, text in self.failures.items())
        assert [report.rank for report in self.reports] == list(self.job.ranks)
        against = differences([report.calls() for report in self.reports])
        assert not against, against
        for report in self.reports:
            assert len(report.steps) == self.job.steps, report.rank
            for number in range(min(2, self.job.steps - 1), self.job.steps):
                step, before = report.steps[number], report.steps[:number]
                more = step.message_bytes > max(each.message_bytes for each in before)
                assert more or step.message_allocations == 0, (self.job.name, report.rank, number)
            assert not report.steps[-1].waits, (self.job.name, report.rank, dict(report.steps[-1].waits))


def run(jobs: Sequence[Job]) -> dict[str, Ran]:
    """Run jobs, and return them by name."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "jobs", Path(folder) / "ran"
        asked.write_bytes(pickle.dumps(list(jobs)))
        command = [sys.executable, "-c", "from benchmarks import fake_jobs; fake_jobs.main()", str(asked), str(answer)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        limit = max(900, 300 * len(jobs))  # seconds, of a busy machine
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
        assert done.returncode == 0, done.stdout + done.stderr
        return {each.job.name: each for each in pickle.loads(answer.read_bytes())}


def main() -> None:
    """Be that process: run the pickled jobs of a file, and write to another one what came of them."""
    asked, answer = sys.argv[1:]
    from helixpipe.fake_cuda.device import install

    device = install()
    from helixpipe.model.device import prepare

    prepare()
    import megatron.pretrain.dry_run
    import megatron.pretrain.pretrain
    import megatron.pretrain.train  # noqa: F401  # and what it imports

    done = []
    with tempfile.TemporaryDirectory() as folder:
        for job in pickle.loads(Path(asked).read_bytes()):
            reports, failures = [], {}
            for rank in job.ranks:
                output, saved = Path(folder) / "output", Path(folder) / "report"
                saved.unlink(missing_ok=True)
                child = os.fork()
                if child == 0:
                    _rank(device, job, rank, output, saved)
                status = os.waitpid(child, 0)[1]
                report = RankReport.load(saved)
                if status or report is None:
                    failures[rank] = f"status {status}\n{output.read_text(errors='replace')}"
                else:
                    reports.append(report)
            done.append(Ran(job, reports, failures))
    Path(answer).write_bytes(pickle.dumps(done))


def _rank(device: object, job: Job, rank: int, output: Path, saved: Path) -> None:
    """Be one rank of a job, in a forked process, which ends here."""
    status = 1
    try:
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank % 8),
            WORLD_SIZE=str(job.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29999",
            HELIXPIPE_LAUNCHER="benchmarks",
        )
        from megatron.pretrain.dry_run import run_rank

        report = RankReport(rank)
        status = run_rank(device, job.flags, report, job.steps, job.load)  # type: ignore[arg-type]
        report.save(saved)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
