"""Every launcher of examples/ on a real SLURM, with a tiny model in place of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.example_scripts import STARTED
from tests.slurm.cluster import Cluster, losses, unavailable, wait_for

pytestmark = pytest.mark.slurm

ON_A_CPU = (
    "--tensor-model-parallel-size 1 --context-parallel-size 1 --no-sequence-parallel --no-bf16 --global-batch-size 8 "
    "--eval-iters 0 --num-workers 0 --lr-warmup-fraction 0 --log-interval 1"
)
TINY = (
    f"{ON_A_CPU} --num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 100 "
    "--micro-batch-size 1 --seq-length 32 --max-position-embeddings 32 --train-iters 2"
)
GROUPED = f"{TINY} --num-query-groups 2"
BY_HAND = "unset SLURM_JOB_ID; NODE_RANK=$SLURM_PROCID MASTER_ADDR=node1 INTERFACE=eth0 exec examples/{}"


@dataclass(frozen=True)
class Launcher:
    """A script of examples/ and how a job starts it.

    Attributes:
        name: its path below examples/, and its arguments.
        extra: flags that make its model tiny.
        variables: what it takes from the environment.
        job: what the batch script runs; empty for a script that is one itself.
        output: a file that it leaves in RUN.
    """

    name: str
    extra: str = TINY
    variables: dict[str, str] = field(default_factory=dict)
    job: str = ""
    output: str = "timeline.json"


TRACKER = "checkpoints/latest_checkpointed_iteration.txt"
ON_TWO_RANKS = "--pipeline-model-parallel-size 2"
LAUNCHERS = [
    Launcher("slurm.sh helixpipe", variables={"MODEL": "1.3b", "SEQ": "32k"}),
    Launcher("slurm.sh sppo", f"{TINY} {ON_TWO_RANKS}", {"CHUNKS": "2"}),
    Launcher("slurm.sh seq1f1b", f"{TINY} {ON_TWO_RANKS}", {"CHUNKS": "2"}),
    Launcher("slurm.sh weipipe"),
    Launcher("slurm.sh infinipipe", f"{TINY} {ON_TWO_RANKS}"),
    Launcher("one_node.sh", GROUPED, {"GPUS": "2", "TENSOR": "1", "PIPELINE": "2"}, "exec examples/{}", TRACKER),
    Launcher("two_hosts.sh", GROUPED, {"SCHEDULE": "1f1b"}, f"srun bash -c '{BY_HAND}'", TRACKER),
    Launcher("laptop.sh", "", {"SCHEDULES": "1f1b", "ITERATIONS": "2", "SEQ": "32"}, "exec examples/{}", "1f1b.png"),
    Launcher("slurm/pretrain_llama_a800.sbatch", GROUPED, output=TRACKER),
    Launcher("slurm/pretrain_llama_h20.sbatch", GROUPED, output=TRACKER),
]
ELSEWHERE = {
    "quickstart.sh": "one machine, no nodes: `make quickstart`",
    "slurm/try_cpu.sbatch": "test_jobs.py",
    "slurm/continue_hf_h100.sbatch": "below",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := unavailable():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def test_every_launcher_is_here() -> None:
    published = {f"slurm.sh {Path(name).parent}" if name.endswith("/train.sh") else name for name in STARTED}
    assert {*(launcher.name for launcher in LAUNCHERS), *ELSEWHERE} == published


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_launchers_train(launcher: Launcher, cluster: Cluster, tmp_path: Path) -> None:
    """Nobody makes a folder for it."""
    log, run = tmp_path / "log.txt", tmp_path / "runs/here"
    variables = {"RUN": str(run), "GPUS": "1", "PREFLIGHT": "skip", "OMP_NUM_THREADS": "1", "EXTRA": launcher.extra}
    script = ["--wrap", launcher.job.format(launcher.name)] if launcher.job else f"examples/{launcher.name}".split()
    job = cluster.submit(
        "--nodes=2", "--ntasks-per-node=1", f"--output={log}", *script, environment={**variables, **launcher.variables}
    )
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert (run / launcher.output).exists() and "Traceback" not in log.read_text()
    assert "dead, " not in log.read_text(), "PREFLIGHT=skip"
    logged = run / "1f1b.log" if launcher.name == "laptop.sh" else log
    assert sorted(losses(logged.read_text())) == [1, 2]


def test_continued_training_survives_a_requeue_and_ends_with_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    """The job tries its links and reads the folder's weights once, resumes, and writes perplexities and a folder with
    YaRN's scaling."""
    import torch
    from safetensors.torch import load_file

    from tests.huggingface.test_folder import make
    from tests.inference.test_huggingface import write_documents
    from tests.training.tokenizers import huggingface_folder

    folder, log, run, iterations = tmp_path / "model", tmp_path / "log.txt", tmp_path / "run", 30
    weights = make(folder)
    huggingface_folder(folder, words=10)
    documents = write_documents(tmp_path / "data", [[2, 3, 4] * 60] * 20)
    variables = {"HF": str(folder), "DATA": str(documents), "SEQ": "128", "FACTOR": "2", "ITERATIONS": str(iterations)}
    variables |= {"RUN": str(run), "GPUS": "1", "PREFLIGHT": "--preflight-seconds 1", "OMP_NUM_THREADS": "1"}
    variables |= {"EXTRA": f"{ON_A_CPU} --save-interval 1000"}
    script = "examples/slurm/continue_hf_h100.sbatch"
    job = cluster.submit("--nodes=2", f"--output={log}", script, environment=variables)
    wait_for(log, " iteration        3/")
    cluster.run("scancel", "--batch", "--signal=TERM", str(job))
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    text = log.read_text()
    for once in ("2 links, 0 dead", "loaded the weights of the Hugging Face folder", "back to the queue"):
        assert text.count(once) == 1, text
    found = [int(number) for number in re.findall(r" iteration +(\d+)/", text)]
    assert found == list(range(1, iterations + 1)) and "Traceback" not in text
    rows = json.loads((run / "perplexity.json").read_text())
    assert sum(row["tokens"] for row in rows) == 20 * 127 and all(row["perplexity"] > 1 for row in rows)
    exported = run / f"hf-{iterations}"
    scaling = json.loads((exported / "config.json").read_text())["rope_parameters"]
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 2) and (exported / "tokenizer.json").exists()
    trained = load_file(exported / "model.safetensors")
    assert trained.keys() == weights.keys() and all(tensor.isfinite().all() for tensor in trained.values())
    assert not any(torch.equal(trained[name], weights[name]) for name in weights if "proj" in name)
