"""A batch script of examples/ on a real SLURM: two nodes in network namespaces, a tiny model, one rank a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launching import ROOT
from tests.slurm.cluster import Cluster, freezer, losses, unavailable, wait_for, wait_until

pytestmark = pytest.mark.slurm

SCRIPT = "examples/slurm/try_cpu.sbatch"
ITERATIONS = 200  # of a run that is interrupted
PROCTRACK = "linuxproc"  # test_jobs_in_cgroups.py runs the same tests with the other


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM that signals every process of a step (linuxproc), and one that signals the first alone (cgroup)."""
    if reason := unavailable():
        pytest.skip(reason)
    if request.module.PROCTRACK == "cgroup" and not freezer():
        pytest.skip("proctrack/cgroup needs the freezer of cgroups v1")
    with Cluster(tmp_path_factory.mktemp("slurm"), request.module.PROCTRACK) as started:
        yield started


def variables(folder: Path, flags: str = "", **more: str) -> dict[str, str]:
    return {"RUN": str(folder / "run"), "PREFLIGHT": "skip", "OMP_NUM_THREADS": "1", "EXTRA": flags, **more}


def submit(cluster: Cluster, folder: Path, *sbatch: str, flags: str = "", **more: str) -> tuple[int, Path]:
    """Submit the batch script, with further flags of sbatch, and return the job and its log."""
    log = folder / "log.txt"
    return cluster.submit(f"--output={log}", *sbatch, SCRIPT, environment=variables(folder, flags, **more)), log


def saved(folder: Path) -> int:
    return int((folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())


@pytest.fixture(autouse=True)
def _no_job_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not cluster.run("squeue", "--noheader"), lambda: cluster.run("squeue"))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nobody interrupts; the preflight comes before it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    values = {"PREFLIGHT": "--preflight-seconds 1", "MASTER_ADDR": "localhost", "ITERATIONS": str(ITERATIONS)}
    job, log = submit(cluster, folder, **values)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "2 links, 0 dead" in log.read_text()
    return losses(log.read_text())


def test_a_job_resumes_to_the_digit_after_a_signal_and_a_power_cut(
    cluster: Cluster, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """SIGUSR1 goes to the steps, as many scripts ask for it: nothing is computed twice. A lost host costs the
    iterations since the newest checkpoint."""
    job, log = submit(cluster, tmp_path, flags="--save-interval 10", ITERATIONS=str(ITERATIONS), SRUN_FLAGS="--wait=20")
    wait_for(log, " iteration        3/")
    cluster.run("scancel", "--signal=USR1", str(job))
    text = wait_for(log, "was asked to end; back to the queue")
    first = saved(tmp_path)
    assert first == max(losses(text)) < ITERATIONS, text
    wait_for(log, f" iteration {first + 3:8d}/")
    assert re.findall(r" iteration +(\d+)/", log.read_text())[: first + 3] == [str(n + 1) for n in range(first + 3)]
    cluster.cut_power(2)
    cluster.restore(2)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    text = log.read_text()
    assert losses(text) == undisturbed and "Traceback" not in text, text


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """Flags for srun, such as those of a container, reach its steps."""
    job, log = submit(cluster, tmp_path, SRUN_FLAGS="--job-name=contained")
    wait_for(log, " iteration        3/")
    assert "contained" in cluster.run("squeue", "--steps", "--noheader", "--format=%j")
    cluster.run("scancel", str(job))
    wait_for(log, "successfully saved checkpoint")
    assert cluster.wait(job) == "CANCELLED"
    wait_until(lambda: not cluster.processes(), lambda: "processes are left")
    text = log.read_text()
    assert cluster.state(job) == "CANCELLED" and "back to the queue" not in text and "Traceback" not in text, text


def test_a_job_near_its_time_limit_goes_back(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM looks at time limits twice a minute."""
    job, log = submit(cluster, tmp_path, "--time=10", "--signal=B:TERM@40")
    wait_for(log, " iteration        3/")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    text = wait_for(log, "was asked to end; back to the queue")
    cluster.wait(job, "PENDING")
    assert saved(tmp_path) == max(losses(text)) and "Traceback" not in text


def test_a_host_on_which_ranks_fail_twice_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks of node2 die at once: after two attempts the job waits for other hosts, and does not end."""
    broken = tmp_path / "bin"
    broken.mkdir()
    python = ROOT / ".venv/bin/python"
    (broken / "python").write_text(
        f'#!/usr/bin/env bash\n[ "$(hostname) $1" != "node2 tools/torchrun.py" ] || exit 9\nexec {python} "$@"\n'
    )
    (broken / "python").chmod(0o755)
    job, log = submit(cluster, tmp_path, BIN=str(broken), SRUN_FLAGS="--wait=1")
    text = wait_for(log, "from now on without node2")
    assert text.count("lost a rank or a host") == 2
    assert "ExcNodeList=node2" in cluster.run("scontrol", "show", "job", str(job))


def test_a_wrong_flag_ends_the_job_with_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    """The preflight refuses it; training does not start, and nothing is tried again."""
    job, log = submit(cluster, tmp_path, flags="--micro-batch-size 3", PREFLIGHT="--preflight-seconds 1")
    assert cluster.wait(job) == "FAILED"
    text = log.read_text()
    assert "--global-batch-size" in text and "back to the queue" not in text and "Traceback" not in text, text
    assert "pretrain_gpt.py" not in text


def test_srun_may_start_one_task_a_rank(cluster: Cluster, tmp_path: Path) -> None:
    """Users of Megatron-LM write it so: no torchrun, but SLURM's own variables; and some sites have --export=NONE."""
    log, script = tmp_path / "log.txt", tmp_path / "job.sh"
    script.write_text(
        f"#!/usr/bin/env bash\nexport OMP_NUM_THREADS=1 MASTER_ADDR=localhost\ncd {ROOT}\n"
        f"srun --export=ALL --ntasks-per-node=2 .venv/bin/python pretrain_gpt.py {DIRECT} --save {tmp_path}/run\n"
    )
    job = cluster.submit("--nodes=2", "--ntasks=4", "--export=NONE", f"--output={log}", str(script))
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    found = re.findall(r" iteration +(\d+)/", log.read_text())
    assert found == ["1", "2", "3"], "one job of four ranks, not four jobs"


DIRECT = (
    "--pipeline-model-parallel-size 4 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --eval-iters 0 "
    "--num-workers 0 --lr 1e-3 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def test_arrays_and_chains_and_sites_that_hand_on_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Two tasks of an array share the nodes, each with a folder of its own; another job waits for both and resumes."""
    values = variables(tmp_path, RUN=f"{tmp_path}/run-$SLURM_ARRAY_TASK_ID", ITERATIONS="5")
    exports = "\n".join(f'export {name}="{value}"' for name, value in values.items())
    script, log = tmp_path / "job.sh", tmp_path / "log"
    script.write_text(f"#!/usr/bin/env bash\n{exports}\ncd {ROOT}\n. {SCRIPT}\n")
    wide = ("--nodes=2", "--ntasks-per-node=2", "--export=NONE")
    array = cluster.submit(*wide, "--array=0-1", f"--output={log}-%a.txt", str(script))
    values = variables(tmp_path, RUN=f"{tmp_path}/run-1", ITERATIONS="8")
    after = cluster.submit(f"--dependency=afterok:{array}", f"--output={log}-2.txt", SCRIPT, environment=values)
    assert cluster.wait(after) == "COMPLETED"
    for number, expected in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 7, 8])):
        assert sorted(losses(Path(f"{log}-{number}.txt").read_text())) == expected
