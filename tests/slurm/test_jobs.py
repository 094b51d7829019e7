"""A batch script of examples/ on a real SLURM: two nodes in network namespaces, a tiny model, one rank a node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launching import ROOT
from tests.slurm.cluster import Cluster, freezer, losses, unavailable, wait_for, wait_until

pytestmark = pytest.mark.slurm

SCRIPT = "examples/slurm/try_cpu.sbatch"
NUMBERED = re.compile(r" iteration +(\d+)/")
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


def resumed(log: Path, times: int) -> int:
    """Wait until a job has resumed so many times, and trained since. Return the iteration from which it resumed."""
    loaded = "successfully loaded checkpoint"
    start = int(re.findall(rf"{loaded} .*at iteration (\d+)", wait_for(log, loaded, times))[-1])
    wait_until(lambda: start + 3 in losses(log.read_text().rpartition(loaded)[2]), log.read_text)
    return start


@pytest.fixture(autouse=True)
def _no_job_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not cluster.run("squeue", "--noheader"), lambda: cluster.run("squeue"))


def test_a_job_goes_back_to_the_queue_and_resumes_to_the_digit_until_it_is_cancelled(
    cluster: Cluster, tmp_path: Path
) -> None:
    again = "was asked to end; back to the queue"
    flags = "--save-interval 10"
    more = ("--time=20", "--signal=B:TERM@170")
    job, log = submit(cluster, tmp_path, *more, flags=flags, SRUN_FLAGS="--wait=20 --job-name=contained")
    wait_for(log, " iteration        3/")
    assert "contained" in cluster.run("squeue", "--steps", "--noheader", "--format=%j"), "SRUN_FLAGS"
    environments = [Path(f"/proc/{process}/environ").read_bytes() for process in cluster.processes()]
    assert any(b"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600" in text for text in environments), "saving may take long"

    # A signal to the steps, as many scripts ask for it: nothing is computed twice.
    cluster.run("scancel", "--signal=USR1", str(job))
    first = max(losses(wait_for(log, again)))
    assert saved(tmp_path) == first == resumed(log, 1)
    assert [int(number) for number in NUMBERED.findall(log.read_text())[: first + 3]] == list(range(1, first + 4))

    # A power cut: it costs the iterations since the newest checkpoint.
    cluster.cut_power(2)
    cluster.restore(2)
    second = resumed(log, 2)

    # The time limit is near. SLURM looks twice a minute; meanwhile the ranks take only time that nothing else needs.
    for process in cluster.processes():
        os.setpriority(os.PRIO_PROCESS, process, 19)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=3")
    third = max(losses(wait_for(log, again, times=2)))
    cluster.wait(job, "PENDING")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    assert saved(tmp_path) == third == resumed(log, 3)

    # Cancelled, it saves once more and does not go back.
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    wait_until(lambda: not cluster.processes(), lambda: "processes are left")
    assert cluster.state(job) == "CANCELLED"
    text = log.read_text()
    assert saved(tmp_path) == max(losses(text)) and text.count(again) == 2 and "Traceback" not in text, text

    # Undisturbed, another job has the same losses.
    other = tmp_path / "other"
    other.mkdir()
    undisturbed, other_log = submit(cluster, other, flags=f"--exit-interval {second + 3}", MASTER_ADDR="localhost")
    assert cluster.wait(undisturbed) == "COMPLETED", other_log.read_text()
    expected = losses(other_log.read_text())
    assert expected == {number: loss for number, loss in losses(text).items() if number <= second + 3}


def test_hosts_on_which_ranks_fail_are_left_out_until_none_is_left(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks of a host die at once: after two attempts the job waits for other hosts. If all hosts are such, it ends."""
    jobs = []
    for broken in ("node2", "node1 node2"):
        folder = tmp_path / broken.replace(" ", "-")
        folder.mkdir()
        (folder / "python").write_text(f"""#!/usr/bin/env bash
for host in {broken}; do [ "$(hostname) $1" != "$host tools/torchrun.py" ] || exit 9; done
exec {ROOT}/.venv/bin/python "$@"
""")
        (folder / "python").chmod(0o755)
        restarts = "3" if broken == "node2" else "1"
        jobs.append(submit(cluster, folder, BIN=str(folder), RESTARTS=restarts, SRUN_FLAGS="--wait=1"))
    (one, log), (both, other_log) = jobs
    text = wait_for(log, "from now on without node2")
    assert text.count("lost a rank or a host") == 2
    assert "ExcNodeList=node2" in cluster.run("scontrol", "show", "job", str(one))
    assert cluster.wait(both) == "FAILED"
    assert f"launch.sh: job {both} failed 2 times, RESTARTS=1: not tried again" in other_log.read_text()


def test_the_preflight_ends_a_job_with_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    """After a wrong flag, or where gloo has an interface that does not reach the other node, no training starts and
    nothing is tried again."""
    seconds = "--preflight-seconds 1 --preflight-timeout 15"
    cases = {"--global-batch-size": ("--micro-batch-size 3", {}), "2 links, 2 dead": ("", {"GLOO_SOCKET_IFNAME": "lo"})}
    jobs = {}
    for number, (sentence, (flags, more)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs[sentence] = submit(cluster, folder, flags=flags, PREFLIGHT=seconds, **more)
    for sentence, (job, log) in jobs.items():
        assert cluster.wait(job) == "FAILED"
        text = log.read_text()
        assert sentence in text and "back to the queue" not in text and "Traceback" not in text, text
        assert "pretrain_gpt.py" not in text and not losses(text)


def test_srun_may_start_one_task_a_rank(cluster: Cluster, tmp_path: Path) -> None:
    """Users of Megatron-LM write it so: no torchrun, but SLURM's own variables; and some sites have --export=NONE."""
    log, script = tmp_path / "log.txt", tmp_path / "job.sh"
    script.write_text(
        f"#!/usr/bin/env bash\nexport OMP_NUM_THREADS=1 MASTER_ADDR=localhost\ncd {ROOT}\n"
        f"srun --export=ALL .venv/bin/python pretrain_gpt.py {DIRECT} --save {tmp_path}/run\n"
    )
    job = cluster.submit("--nodes=2", "--ntasks=3", "--export=NONE", f"--output={log}", str(script))
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert NUMBERED.findall(log.read_text()) == ["1", "2", "3"], "one job of three ranks, not three jobs"


DIRECT = (
    "--pipeline-model-parallel-size 3 --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
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
