"""Every command judges a step's memory alike: `memory`, `simulate`, `plan` and training."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.costs.verdict import MemoryVerdict
from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.plan.programs import step_verdict
from schedules.command import main
from tests.training.helpers import BASE


@pytest.fixture
def fused_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for Transformer Engine's Adam, as the planning commands do, whichever is installed here."""
    monkeypatch.setattr("megatron.pretrain.plan.costs._fused_adam", lambda: True)


@st.composite
def jobs(draw: Callable[[Any], Any]) -> tuple[str, dict[str, int], str]:
    """Draw a schedule, the sizes of a job, and flags that training and planning have alike."""
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb1p", "interleaved-1f1b", "seq1f1b", "sppo", "helix"]))
    p, tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    cut = schedule in ("seq1f1b", "sppo")
    sizes = {
        "p": p if schedule != "interleaved-1f1b" else max(p, 2),
        "tp": tp,
        "m": 2 * max(p, 2) * draw(st.integers(1, 2)),
        "layers": 2 * max(p, 2),
        "hidden": draw(st.sampled_from([1024, 4096])),
        "seq": draw(st.sampled_from([4096, 16384, 65536])),
    }
    flags = [f"--hardware {draw(st.sampled_from(['h100', 'a800', 'h20']))}", f"--pipe-sp-splits {4 if cut else 1}"]
    flags += draw(st.sampled_from([[], ["--recompute-granularity full"], ["--recompute-granularity selective"]]))
    flags += draw(st.sampled_from([[], ["--offload-activations auto"], ["--offload-activations 0.5"]])) * (not cut)
    flags += draw(st.sampled_from([[], ["--memory-limit 20"], ["--memory-limit 500"]]))
    flags += ["--no-recompute-early"] * draw(st.booleans())
    return schedule, sizes, " ".join(flags)


def trained(schedule: str, sizes: dict[str, int], flags: str) -> MemoryVerdict | None:
    """Return training's verdict."""
    words = (
        f"{BASE} --train-iters 10 {flags} --pipeline-schedule {schedule} --bf16 --vocab-size 32767 "
        f"--num-layers {sizes['layers']} --hidden-size {sizes['hidden']} --num-attention-heads 32 "
        f"--seq-length {sizes['seq']} --max-position-embeddings {sizes['seq']} --micro-batch-size 1 "
        f"--global-batch-size {sizes['m']} --pipeline-model-parallel-size {sizes['p']} --attention-dropout 0 "
        f"--tensor-model-parallel-size {sizes['tp']} --hidden-dropout 0 --loss-chunk-size 0"
    )
    words += " --sequence-parallel" * (sizes["tp"] > 1)
    words += f" --num-layers-per-virtual-pipeline-stage {sizes['layers'] // sizes['p'] // 2}" * ("inter" in schedule)
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(sizes["p"] * sizes["tp"])}
    return step_verdict(*parse_and_plan(words.split(), environ=environ))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs())
def test_commands_and_training_agree(
    capsys: pytest.CaptureFixture[str], fused_adam: None, job: tuple[str, dict[str, int], str]
) -> None:
    schedule, sizes, flags = job
    try:
        verdict = trained(*job)
    except UserError as error:  # nothing fits, say
        words = str(error)
        verdict = None
    size = (
        f"{schedule} -p {sizes['p']} -m {sizes['m']} -L {sizes['layers']} --hidden-size {sizes['hidden']} "
        f"--num-attention-heads 32 --seq-length {sizes['seq']} --vocab-size 32768 --tensor-parallel {sizes['tp']} "
        f"--nodes 1 --gpus-per-node {sizes['p'] * sizes['tp']} {flags}"
    )
    size += " -v 2" * ("inter" in schedule)
    status = main([*f"memory {size} --json".split()])
    printed = capsys.readouterr()
    if verdict is None:
        assert status == 2 and words.split()[0] in printed.err
        return
    assert status == 0, printed.err
    memory = json.loads(printed.out)
    assert memory["fits"] == verdict.fits
    assert memory["memory_allocated"] == pytest.approx(verdict.allocated, rel=1e-9)
    assert memory["memory_reserved"] == pytest.approx(verdict.reserved, rel=1e-9)
    assert max(rank["total"] for rank in memory["memory"]) == pytest.approx(verdict.allocated, rel=1e-9)
    assert not memory["fits"] or memory["memory_reserved"] <= verdict.gpu
    assert main([*f"simulate {size} --json".split()]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert {name: step[name] for name in memory} == memory
    assert main([*f"memory {size}".split()]) == main([*f"simulate {size}".split()]) == 0
    assert capsys.readouterr().out.count(verdict.sentence) == 2


@pytest.mark.parametrize("limit", ["", "--memory-limit 24"])
def test_a_plan_fits_where_it_is_trained(capsys: pytest.CaptureFixture[str], fused_adam: None, limit: str) -> None:
    """A plan's figures are those of training with its command."""
    words = f"plan --model llama3-8b --num-layers 4 --gpus 4 --seq-length 8192 --global-batch-size 16 {limit} --json"
    assert main([*words.split(), "--jobs", "1", "--top", "2", "--schedule", "1f1b,seq1f1b,zb1p"]) == 0
    for plan in json.loads(capsys.readouterr().out)["plans"]:
        command = shlex.split(plan["command"].replace("\\\n", " "))
        environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
        verdict = step_verdict(*parse_and_plan(command[command.index("pretrain_gpt.py") + 1 :], environ=environ))
        assert verdict is not None and plan["fits"] is verdict.fits is True
        assert plan["memory"] == pytest.approx(verdict.allocated, rel=1e-6)
        assert plan["memory_reserved"] == pytest.approx(verdict.reserved, rel=1e-6)
