"""The peak of the rank with the head is the predicted one, with its logits whole and in slices."""

from __future__ import annotations

import pytest

from benchmarks.fake_jobs import Job, Ran, run
from tests.fake_cuda.cases import LLAMA, job

LOGITS = "--pipeline-schedule 1f1b --vocab-size 64000 --seq-length 1024 --max-position-embeddings 1024"
TIED = LLAMA.replace("--untie-embeddings-and-output-weights ", "")


def of_last_rank(name: str, flags: str, t: int = 1) -> Job:
    return job(name, f"{LOGITS} {flags} {'--sequence-parallel' * (t > 1)}", t=t, ranks=(2 * t - 1,))


JOBS = [
    of_last_rank("whole", LLAMA),
    of_last_rank("slices", f"{LLAMA} --loss-chunk-size 512"),
    of_last_rank("tensor parallel", LLAMA, t=2),
    of_last_rank("tensor parallel, tied, slices", f"{TIED} --loss-chunk-size 512", t=2),
    of_last_rank("divided", f"{LLAMA} --pipeline-vocab-parallel split"),
]


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    return run(JOBS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [job.name for job in JOBS])
def test_peak_of_the_rank_with_the_head(ran: dict[str, Ran], name: str) -> None:
    ran[name].check()
    (report,) = ran[name].reports
    assert report.predicted is not None
    assert report.predicted.total == pytest.approx(report.steps[-1].peak, rel=0.02)
