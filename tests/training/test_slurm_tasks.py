"""Ranks that srun starts take their numbers and their meeting place from SLURM's variables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.pretrain.process.slurm import adopt_task, first_host, meeting_place


@st.composite
def compact_lists(draw: st.DrawFn) -> tuple[str, str]:
    """SLURM's compact list of hosts, and its first host."""
    parts, first = list[str](), ""
    for number in range(draw(st.integers(1, 3))):
        name = draw(st.from_regex(r"[a-z]([a-z0-9-]{0,6}[a-z])?", fullmatch=True))
        ranges = draw(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 9)), max_size=3))
        width = draw(st.integers(1, 4))
        words = [f"{low:0{width}d}" + (f"-{low + more:0{width}d}" if more else "") for low, more in ranges]
        suffix = draw(st.sampled_from(["", "-ib"]))
        parts.append(f"{name}[{','.join(words)}]{suffix}" if words else name)
        if number == 0:
            first = f"{name}{words[0].partition('-')[0]}{suffix}" if words else name
    return ",".join(parts), first


@given(
    hosts=compact_lists(),
    tasks=st.integers(2, 4096),
    job=st.integers(0, 10**7),
    local=st.integers(1, 8),
    others=st.sampled_from(["", "(x3),4"]),
    loopback=st.sampled_from(["localhost", "127.0.1.1", "::1"]),
)
def test_a_task_is_a_rank(hosts: tuple[str, str], tasks: int, job: int, local: int, others: str, loopback: str) -> None:
    nodes, first = hosts
    assert first_host(nodes) == first
    variables = {
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{local}{others}",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": str(job),
        "SLURM_PROCID": str(tasks - 1),
        "SLURM_LOCALID": str(local - 1),
        "MASTER_ADDR": loopback,
    }
    environ = dict(variables)
    adopt_task(environ)
    found = [environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert found == [str(tasks - 1), str(tasks), str(local - 1), str(local), first]
    port, of_next = (int(meeting_place({**variables, "SLURM_JOB_ID": str(number)})[1]) for number in (job, job + 1))
    assert int(environ["MASTER_PORT"]) == port and 20000 <= port < 29999
    assert of_next not in (port, port + 1), "nor do the preflight of a job and the next job share one"
    for changed in ({"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}):  # torchrun started it, or it is the only task
        environ = {**variables, **changed}
        adopt_task(environ)
        assert environ == {**variables, **changed}
    for address in ("10.0.0.7", "head"):
        environ = {**variables, "MASTER_ADDR": address, "MASTER_PORT": "7"}
        adopt_task(environ)
        assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == (address, "7")


def test_outside_a_step_nothing_is_taken() -> None:
    """A batch script has the job's variables, and is no task."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[1-2]"}
    before = dict(environ)
    adopt_task(environ)
    assert environ == before
