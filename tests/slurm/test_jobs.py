"""The batch scripts of examples/ on a real SLURM: two nodes in network namespaces, a tiny model, one rank a node."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launching import ROOT
from tests.slurm.cluster import Cluster, freezer, unavailable

pytestmark = pytest.mark.slurm

SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 100 --seq-length 32 --max-position-embeddings 32 --tensor-model-parallel-size 1 "
    "--no-sequence-parallel --no-bf16 --global-batch-size 8 --eval-iters 0 --num-workers 0 --lr-warmup-fraction 0"
)
SCRIPT = "examples/slurm/pretrain_llama_a800.sbatch"
LONG = 120  # iterations of a run that is interrupted


@pytest.fixture(scope="module", params=["linuxproc", "cgroup"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM that signals every process of a step (linuxproc), and one that signals the first alone (cgroup)."""
    if reason := unavailable():
        pytest.skip(reason)
    if request.param == "cgroup" and not freezer():
        pytest.skip("proctrack/cgroup needs the freezer of cgroups v1")
    with Cluster(tmp_path_factory.mktemp("slurm"), request.param) as started:
        yield started


def variables(folder: Path, flags: str, **more: str) -> dict[str, str]:
    """Return the variables of a batch script that trains a tiny model on the CPU, one rank a node."""
    return {
        "RUN": str(folder / "run"),
        "GPUS": "1",
        "SCHEDULE": "1f1b",
        "PREFLIGHT": "skip",
        "OMP_NUM_THREADS": "1",
        "EXTRA": f"{SMALL} {flags}",
        **more,
    }


def submit(cluster: Cluster, folder: Path, *sbatch: str, flags: str, **more: str) -> tuple[int, Path]:
    """Submit the batch script for two nodes, with further flags of sbatch, and return the job and its log."""
    log = folder / "log.txt"
    job = cluster.submit(
        "--nodes=2", f"--output={log}", *sbatch, SCRIPT, environment=variables(folder, flags, **more)
    )
    return job, log


def losses(log: str) -> dict[int, str]:
    """Return the loss of each iteration, as it was printed last."""
    return {int(number): loss for number, loss in re.findall(r" iteration +(\d+)/.*?lm loss: (\S+)", log)}


def saved(folder: Path) -> int:
    return int((folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())


def release(cluster: Cluster, job: int, seconds: float = 90.0) -> None:
    """Let a job that went back to the queue start now: SLURM makes it wait for two minutes.

    Asked more than once, because a node that is found lost puts the job back a second time.
    """
    cluster.wait(job, "PENDING")
    cluster.wait_for_end(job)
    until = time.monotonic() + seconds
    while cluster.state(job) == "PENDING":
        assert time.monotonic() < until, cluster.run("squeue")
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")  # at once a node still refuses it
        time.sleep(5.0)


@pytest.fixture(autouse=True)
def _no_job_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--user=root")
    until = time.monotonic() + 60
    while cluster.run("squeue", "--noheader"):
        assert time.monotonic() < until, cluster.run("squeue")
        time.sleep(0.2)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nobody interrupts; the preflight comes before it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job, log = submit(
        cluster, folder, flags=f"--train-iters {LONG}", PREFLIGHT="--preflight-seconds 1", MASTER_ADDR="localhost"
    )
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "2 links, 0 dead" in log.read_text()
    return losses(log.read_text())


@pytest.mark.parametrize("how", ["batch", "steps"])
def test_a_signal_saves_and_requeues_and_the_job_resumes_to_the_digit(
    how: str, cluster: Cluster, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """SIGTERM to the batch script comes before a time limit, SIGUSR1 to the steps is what many scripts ask for."""
    job, log = submit(cluster, tmp_path, flags=f"--train-iters {LONG} --save-interval 1000")
    cluster.wait_for(log, "iteration        5/")
    cluster.run("scancel", *(["--batch", "--signal=TERM"] if how == "batch" else ["--signal=USR1"]), str(job))
    release(cluster, job)
    assert 5 <= saved(tmp_path) < LONG
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    text = log.read_text()
    assert "was asked to end; back to the queue" in text and "Traceback" not in text, text
    assert losses(text) == undisturbed


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    job, log = submit(cluster, tmp_path, flags=f"--train-iters {LONG} --save-interval 1000")
    cluster.wait_for(log, "iteration        5/")
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    cluster.wait_for(log, "successfully saved checkpoint")
    time.sleep(2.0)
    assert cluster.state(job) == "CANCELLED" and "back to the queue" not in log.read_text()


def test_a_job_near_its_time_limit_goes_back(cluster: Cluster, tmp_path: Path) -> None:
    job, log = submit(
        cluster, tmp_path, "--time=1", "--signal=B:TERM@20", flags="--train-iters 5000 --save-interval 5000 --save-retain-interval 5000"
    )
    cluster.wait(job, "RUNNING")
    cluster.wait_for(log, "back to the queue")
    cluster.wait(job, "PENDING")
    assert saved(tmp_path) > 0


def test_a_lost_host_and_a_crashed_rank_do_not_end_the_job(
    cluster: Cluster, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    flags = f"--train-iters {LONG} --save-interval 4"
    job, log = submit(cluster, tmp_path, flags=flags, SRUN_FLAGS="--wait=3")
    cluster.wait_for(log, "saved checkpoint from iteration       4")
    cluster.kill(2, "pretrain_gpt.py")
    cluster.wait_for(log, "lost a rank or a host")
    release(cluster, job)
    number = saved(tmp_path) + 4
    cluster.wait_for(log, f"saved checkpoint from iteration {number:7d}")
    cluster.kill(2)
    cluster.restore(2)
    release(cluster, job)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert losses(log.read_text()) == undisturbed


def test_a_host_on_which_ranks_fail_twice_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks of node2 die at once: after two attempts the job waits for other hosts, and does not end."""
    broken = tmp_path / "bin"
    broken.mkdir()
    python = ROOT / ".venv/bin/python"
    (broken / "python").write_text(
        f'#!/usr/bin/env bash\n[ "$(hostname) $1" != "node2 tools/torchrun.py" ] || exit 9\nexec {python} "$@"\n'
    )
    (broken / "python").chmod(0o755)
    job, log = submit(cluster, tmp_path, flags="--train-iters 5", BIN=str(broken), SRUN_FLAGS="--wait=3")
    cluster.wait_for(log, "back to the queue")
    release(cluster, job)
    text = cluster.wait_for(log, "from now on without node2")
    assert text.count("lost a rank or a host") == 2
    assert "ExcNodeList=node2" in cluster.run("scontrol", "show", "job", str(job))


def test_a_wrong_flag_ends_the_job_with_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    job, log = submit(cluster, tmp_path, flags="--train-iters 5 --micro-batch-size 3")
    assert cluster.wait(job) == "FAILED"
    text = log.read_text()
    assert "--global-batch-size" in text and "back to the queue" not in text and "Traceback" not in text, text


def test_srun_may_start_one_task_a_rank(cluster: Cluster, undisturbed: dict[int, str], tmp_path: Path) -> None:
    """As users of Megatron-LM write it: no torchrun, ranks from SLURM's own variables, and some sites' --export=NONE."""
    log, script = tmp_path / "log.txt", tmp_path / "job.sh"
    flags = DIRECT + f" --pipeline-model-parallel-size 4 --num-layers 4 --train-iters 5 --save {tmp_path}/run"
    script.write_text(
        f"#!/usr/bin/env bash\nexport OMP_NUM_THREADS=1 MASTER_ADDR=localhost\n"
        f"cd {ROOT}\nsrun --export=ALL --ntasks=4 --ntasks-per-node=2 .venv/bin/python pretrain_gpt.py {flags}\n"
    )
    job = cluster.submit("--nodes=2", "--ntasks=4", "--export=NONE", f"--output={log}", str(script))
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert sorted(losses(log.read_text())) == [1, 2, 3, 4, 5]
    assert log.read_text().count(" iteration        5/") == 1, "one job of four ranks, not four jobs"


DIRECT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --eval-iters 0 --num-workers 0 --lr 1e-3 --log-interval 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def test_arrays_and_chains_and_sites_that_hand_on_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Two tasks of an array share the nodes, each with a folder of its own; a further job waits for both and resumes."""
    values = variables(tmp_path, "--train-iters 5", RUN=f"{tmp_path}/run-$SLURM_ARRAY_TASK_ID")
    exports = "\n".join(f'export {name}="{value}"' for name, value in values.items())
    script, log = tmp_path / "job.sh", tmp_path / "log"
    script.write_text(f"#!/usr/bin/env bash\n{exports}\ncd {ROOT}\n. {SCRIPT}\n")
    wide = ("--nodes=2", "--ntasks-per-node=2", "--export=NONE")
    array = cluster.submit(*wide, "--array=0-1", f"--output={log}-%a.txt", str(script))
    values = variables(tmp_path, "--train-iters 8", RUN=f"{tmp_path}/run-1")
    after = cluster.submit(
        "--nodes=2", f"--dependency=afterok:{array}", f"--output={log}-after.txt", SCRIPT, environment=values
    )
    assert cluster.wait(after) == "COMPLETED"
    for number in range(2):
        assert sorted(losses(Path(f"{log}-{number}.txt").read_text())) == [1, 2, 3, 4, 5]
    assert sorted(losses(Path(f"{log}-after.txt").read_text())) == [6, 7, 8]
