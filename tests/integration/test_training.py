"""Whole runs: logs, files written, stopping and resuming, under each kind of parallelism."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from helixpipe.program.timeline import Timeline
from tests.integration.forked import run_forked
from tests.integration.launching import MOCK, MODEL, Launch, Result
from tests.integration.tensors import assert_same_tensors
from tests.selection import graded

ITERATIONS = 8
DATA = f"{MODEL} --data-path {{data}} --split 90,10,0 --tokenizer-type ByteLevelTokenizer --data-cache-path {{cache}}"
DROPOUT = f"{DATA} --train-iters {ITERATIONS} --attention-dropout 0.1 --hidden-dropout 0.1"
PLAIN = f"{MOCK} --train-iters {ITERATIONS} --attention-dropout 0 --hidden-dropout 0"
P2 = "--pipeline-model-parallel-size 2"

WHOLE = Launch(
    "with everything that can be written",
    f"{DROPOUT} {P2} --pipeline-schedule 1f1b --save {{save}} --eval-interval 4 --eval-iters 2 --log-throughput "
    "--timing-log-level 2 --tensorboard-dir {out}/tensorboard --record-timeline {out}/timeline.json "
    "--timeline-png {out}/timeline.png --profile --profile-step-start 3 --profile-step-end 4 --log-params-norm "
    "--log-arguments",
)
STOPPED = Launch("stopped by --exit-interval", f"{DROPOUT} {P2} --save {{save}} --exit-interval 5")
RESUMED = [
    Launch("resumed as it was", f"{DROPOUT} {P2} --load {{save}} --save {{again}}"),
    Launch("resumed on one process, without torchrun", f"{DROPOUT} --load {{save}}", ranks=0),
]

INTERLEAVED = Launch(
    "interleaved, saved half-way",
    f"{PLAIN} {P2} --num-layers-per-virtual-pipeline-stage 1 --save {{save}} --save-interval 4",
)
OTHERWISE = [
    Launch(
        "tensor and sequence parallel",  # the padded vocabulary must stay what it was
        "--tensor-model-parallel-size 2 --sequence-parallel --ckpt-step 4",
    ),
    Launch("data parallel, distributed optimizer", "--use-distributed-optimizer --ckpt-step 4"),
    Launch("a schedule of one's own", f"{P2} --pipeline-schedule {{csv}} --ckpt-step 4"),
    Launch("gpipe, after the newest was truncated", f"{P2} --pipeline-schedule gpipe"),
    Launch("heads on both ranks, and back", f"{P2} --pipeline-schedule helix --ckpt-step 4 --save {{again}}"),
    Launch("weights round the ring, and back", f"{P2} --pipeline-schedule weipipe --ckpt-step 4 --save {{again}}"),
]
"""What is added to PLAIN to resume the interleaved run from iteration 4 in another way."""

CSV = (
    ",".join([f"0F{m}" for m in range(8)] + [f"0B{m}" for m in range(8)])
    + "\n"
    + ",".join(f"1F{m},1B{m}" for m in range(8))
    + "\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path, corpus: Path) -> Result:
    return WHOLE.run(data=corpus, cache=folder / "cache", save=folder / "whole", out=folder).done()


@pytest.fixture(scope="module")
def stopped(folder: Path, corpus: Path) -> Result:
    return run_forked(STOPPED, data=corpus, cache=folder / "cache", save=folder / "stopped").done()


@pytest.fixture(scope="module")
def interleaved(folder: Path) -> Result:
    return run_forked(INTERLEAVED, save=folder / "interleaved").done()


# -------------------------------------------------------------------------------------------------- what a run prints


def test_log_lines_are_those_of_megatron(whole: Result, folder: Path) -> None:
    lines = whole.output.splitlines()
    step = (
        (
            r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {8}\d/ {7}8 \| consumed samples: {12}\d{1,2} \| "
            r"elapsed time per iteration \(ms\): \d+\.\d \| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \| "
            r"learning rate: \d\.\d{6}E[-+]\d\d \| global batch size: {5}8 \| "
            r"lm loss: \d\.\d{6}E\+\d\d \| loss scale: 1\.0 \| "
            r"grad norm: \d+\.\d{3} \| params norm: \d+\.\d{3} \| number of skipped iterations:   0 \| "
            r"number of nan iterations:   0 \| tokens per second per GPU: \d+\.\d \| time left: [\d:]+ \|"
        )
        .replace(" {12}", " +")
        .replace(" {5}", " +")
    )
    assert len([line for line in lines if re.fullmatch(step, line)]) == ITERATIONS, whole.output
    assert sum(line.startswith("[Rank ") for line in lines if "memory (MB)" in line) == 2
    memory = r"\[Rank [01]\] \(after 1 iterations\) memory \(MB\)( \| (max )?(allocated|reserved): \d+\.\d\d){4}"
    assert len([line for line in lines if re.fullmatch(memory, line)]) == 2
    for rank in range(2):
        start = f" > number of parameters on (tensor, pipeline) model parallel rank (0, {rank}): "
        assert any(re.fullmatch(re.escape(start) + r"\d+", line) for line in lines)
    kernels = "attention torch CPU (without a fused kernel for dropout), norm torch LayerNorm, linear megatron-core, "
    assert f" > kernels: {kernels}activation not fused, transport gloo, gradients float32" in lines
    loss = r"lm loss value: \d\.\d{6}E[-+]\d\d \| lm loss PPL: \d\.\d{6}E[-+]\d\d \| "
    validations = [line for line in lines if re.fullmatch(rf" validation loss at .* \| {loss}", line)]
    assert [line.split(" | ")[0] for line in validations] == [
        " validation loss at iteration 4",
        " validation loss at iteration 8",
        " validation loss at iteration 8 on validation set",
    ]
    assert f"  successfully saved checkpoint from iteration       8 to {folder}/whole [ t 1/1, p 1/2 ]" in lines
    assert f"  num_layers {'.' * 38} 4" in lines
    assert any("forward-backward" in line for line in lines), "timings of level 1"


def test_a_run_says_little_before_its_first_step(interleaved: Result, folder: Path) -> None:
    lines = interleaved.output.splitlines()
    first = next(i for i, line in enumerate(lines) if " iteration        1/" in line)
    summary = [line for line in lines[:first] if line.startswith(" > ")]
    assert len(lines[:first]) <= 25 and not any(line.startswith("  num_layers ") for line in lines)
    assert re.fullmatch(r" > model: [\d,]+ parameters; 4 layers of width \d+, MLP \d+, \d+ heads, .*", summary[0])
    assert summary[2].startswith(" > ranks: tensor 1 x pipeline 2 x data 1, ")
    file = folder / "interleaved" / "arguments.txt"
    assert f" > all arguments: {file} (--log-arguments prints them)" in summary
    assert f"  num_layers {'.' * 38} 4" in file.read_text().splitlines()


def test_a_run_says_nothing_else(stopped: Result) -> None:
    dump = re.compile(r"-+ (end of )?arguments -+|  \w+ \.+ .*|-----.*")
    rest = [line for line in stopped.output.splitlines() if not dump.fullmatch(line)]
    starts = (" > ", "[Rank ", " [", "saving checkpoint", "  successfully saved", "exiting program at iteration 5")
    assert [line for line in rest if not line.startswith(starts)] == []


def test_tensorboard_timeline_and_profile(whole: Result, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"lm loss", "learning-rate", "grad-norm", "batch-size", "iteration-time", "throughput"}
    assert tags >= {"lm loss vs samples", "lm loss validation", "params-norm"}
    printed = whole.loss_values()
    assert {event.step: event.value for event in events.Scalars("lm loss")} == pytest.approx(printed, rel=1e-6)

    timeline = Timeline.load(folder / "timeline.json")
    cells = sorted(str(event.op) for event in timeline.ops)
    assert cells == sorted(f"{s}{k}{m}" for s in range(2) for k in "FB" for m in range(8))
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")

    with gzip.open(folder / "tensorboard/trace-rank0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"PP:0F0", "PP:0B7"} <= names


# ---------------------------------------------------------------------------------------------- stopping and resuming


def test_exit_interval_saves_and_exits(stopped: Result, whole: Result) -> None:
    assert "exiting program at iteration 5" in stopped.output
    assert stopped.losses() == {i: whole.losses()[i] for i in range(1, 6)}


@pytest.mark.parametrize("launch", graded(RESUMED, RESUMED[:1]), ids=lambda launch: launch.name)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    launch: Launch, whole: Result, stopped: Result, folder: Path, corpus: Path
) -> None:
    run = run_forked if launch.ranks else Launch.run
    result = run(launch, data=corpus, cache=folder / "cache", save=folder / "stopped", again=folder / "again").done()
    expected = {i: whole.losses()[i] for i in range(6, ITERATIONS + 1)}
    if launch.ranks:
        assert result.losses() == expected
        assert_same_tensors(folder / "again", folder / "whole", ITERATIONS)
    else:
        assert result.loss_values() == pytest.approx({i: float(loss) for i, (loss, _) in expected.items()}, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("launch", OTHERWISE, ids=lambda launch: launch.name)
def test_a_run_may_resume_in_another_way(launch: Launch, interleaved: Result, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(CSV)
    saved = tmp_path / "saved"
    shutil.copytree(folder / "interleaved", saved)
    truncated = "truncated" in launch.name
    if truncated:
        shard = next((saved / "iter_0000008").glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:1000])
    flags = f"{PLAIN} --load {saved} {launch.flags}"
    again = tmp_path / "again"
    flags += " --save-interval 2" * ("{again}" in flags)
    result = run_forked(Launch(launch.name, flags), csv=tmp_path / "mine.csv", again=again).done()
    expected = {i: loss for i, loss in interleaved.loss_values().items() if i > 4}
    assert result.loss_values() == pytest.approx(expected, rel=2e-5)
    assert ("iter_0000008 is not usable: " in result.output) == truncated
    assert f"successfully loaded checkpoint from {saved}" in result.output
    if again.exists():
        back = f"{PLAIN} --load {again} {P2} --pipeline-schedule 1f1b --ckpt-step 6"
        losses = run_forked(Launch("back", back)).done().loss_values()
        assert losses == pytest.approx({i: loss for i, loss in expected.items() if i > 6}, rel=2e-5)


@pytest.mark.thorough
def test_sigterm_saves_then_a_time_limit_stops_the_next_run(tmp_path: Path) -> None:
    flags = f"{MOCK} {P2} --train-iters 100000 --num-workers 1 --save {tmp_path} --load {tmp_path}"
    job = Launch("stopped by SIGTERM", flags).start()
    job.wait_for("iteration        3/")
    job.process.send_signal(signal.SIGTERM)
    result = job.wait()
    assert "exiting program after receiving SIGTERM." in result.output, result.output
    assert "[Rank" not in re.sub(r"\[Rank \d\] \(after", "", result.output), result.output
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert saved == max(result.losses())
    after = run_forked(
        Launch("stopped by its duration", f"{flags} --num-workers 0 --exit-duration-in-mins 0.001")
    ).done()
    assert list(after.losses()) == [saved + 1]
    assert "exiting program after 0." in after.output
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) == saved + 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags",
    [
        f"{P2} --bf16 --use-distributed-optimizer",
        "--pipeline-model-parallel-size 4 --pipeline-schedule weipipe",  # at first with fewer microbatches than ranks
    ],
    ids=["two pipelines in bf16", "a ring"],
)
def test_four_ranks_with_a_growing_batch(flags: str, tmp_path: Path) -> None:
    launch = Launch("growing", f"{PLAIN} {flags} --rampup-batch-size 2 2 12 --save {tmp_path}", ranks=4)
    result = run_forked(launch).done()
    sizes = [int(size) for size in re.findall(r"global batch size: +(\d+)", result.output)]
    assert sizes[0] == 2 and sizes[-1] == 8 and sizes == sorted(sizes)
    losses = result.loss_values()
    assert losses[ITERATIONS] < losses[1]


@pytest.mark.thorough
def test_a_killed_rank_ends_the_job_and_the_next_launch_resumes(
    whole: Result, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    flags = f"{DROPOUT} {P2} --num-workers 1 --save {tmp_path} --load {tmp_path} --save-interval 2"
    job = Launch("killed", flags).start(data=corpus, cache=folder / "cache")
    job.wait_for("successfully saved checkpoint from iteration       2")
    os.kill(job.rank(1), signal.SIGKILL)
    result = job.wait()
    assert result.status != 0, "and it has ended by itself"
    again = run_forked(Launch("relaunched", f"{flags} --num-workers 0"), data=corpus, cache=folder / "cache").done()
    assert "successfully loaded checkpoint" in again.output
    assert {**result.losses(), **again.losses()} == whole.losses()
    assert_same_tensors(tmp_path, folder / "whole", ITERATIONS)
