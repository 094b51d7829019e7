"""`helixpipe simulate --model` and `helixpipe memory`: what they print, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedules import command as cli
from tests.cli.commands import run, run_json

LOGITS = "--model llama3-8b --seq-length 65536 --tensor-parallel 8 -p 2 -m 4 --nodes 2 -L 8 --chunk-size 4096"
"""On H100s; logits take more than the layers of a rank."""
LONG = "--model llama2-7b --seq-length 131072 --hardware h20 --nodes 8 --tensor-parallel 8"


def test_long_context_example(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, f"simulate 1f1b {LONG}")
    step = result["step"]
    assert (result["ranks"], result["microbatches"], result["layers"], result["unit"]) == (8, 16, 32, "s")
    assert (step["gpus"], step["data_parallel"], step["global_batch_size"]) == (64, 1, 16)
    assert step["simulated"] is True and step["fits"] is True
    assert step["parameters"] == 6_738_415_616
    tokens = 16 * 131072 / (step["step_time"] * 64)
    assert step["tokens_per_second_per_gpu"] == pytest.approx(tokens)
    assert 0.2 < step["mfu"] < 0.6
    totals = [memory["total"] for memory in step["memory"]]
    assert len(totals) == 8 and max(totals) == totals[0] <= step["memory_limit"]
    assert result["peak_activation_unit"] == "bytes"
    kept = [memory["activations"] for memory in step["memory"]]
    assert result["peak_activation"][:-1] == pytest.approx(kept[:-1])  # the last rank's total peaks elsewhere


def test_optimizer_state_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-2 7B on one A100: 12 bytes a weight go, the host holds 16."""
    one = "1f1b -p 1 -m 2 --model llama2-7b --hardware a100-80 --gpus-per-node 1"
    before = run_json(capsys, f"memory {one}")
    after = run_json(capsys, f"memory {one} --optimizer-cpu-offload")
    weights = 6_738_415_616
    assert (
        before["memory"][0]["total"] - after["memory"][0]["total"] == before["memory"][0]["optimizer"] == 12 * weights
    )
    assert after["memory"][0]["optimizer"] == 0 and "host_memory_limit" not in before
    assert (after["memory"][0]["host_optimizer"], after["host_memory_limit"]) == (16 * weights, 2048 * 2**30)
    assert (before["fits"], after["fits"]) == (False, True)
    half = run_json(capsys, f"memory {one} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert half["memory"][0]["host_optimizer"] == 8 * weights
    assert run_json(capsys, f"memory {one} --optimizer-cpu-offload --host-memory 100")["fits"] is False
    text = run(capsys, f"memory {one} --optimizer-cpu-offload --host-memory 50")
    assert "Host memory of each GPU: 100.4 GiB of 50.0, its part of the node's\n" in text
    assert "does NOT fit: 50.4 GiB of host memory too much (" in text and "fits" not in text
    both = run(capsys, f"memory {one} --optimizer-cpu-offload --host-memory 50 --memory-limit 10")
    assert re.search(r"^does NOT fit: [0-9.]+ GiB and 50\.4 GiB of host memory too much", both, re.MULTILINE)
    assert "fits" not in both and "WARNING" not in both
    assert "Host memory" not in run(capsys, f"memory {one}")
    step = run(capsys, f"simulate {one} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert "Adam, 50 % of it on the host" in step and "Host memory of each GPU: 50.2 GiB of 2048.0" in step


def test_text_says_that_it_is_simulated_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, f"simulate 1f1b {LONG}")
    for part in (
        "64 x h20 in 8 nodes: tensor parallel 8, sequence parallel, pipeline 8, data parallel 1",
        "Simulated, not measured:",
        "step time",
        "tokens a second and GPU",
        "MFU",
        "bubble",
        "Memory of each GPU, GiB (simulated):",
        "fits, with",
        "Assumed: 80 % of peak in matrix products, 70 % in attention",
    ):
        assert part in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("rank "))


def test_a_peak_of_ones_own_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, f"simulate 1f1b {LONG} --peak-tflops 100")
    assert "64 x h20 with a peak of 100 TFLOP/s in 8 nodes" in text
    assert "64 x h20 in 8 nodes" in run(capsys, f"simulate 1f1b {LONG} --peak-tflops 148")


def test_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, f"memory 1f1b {LONG}")
    assert text.startswith("Memory of each GPU") and "step time" not in text
    assert len(text.splitlines()) == 2 + 8 + 1  # the verdict
    many = run(capsys, "memory gpipe --model llama2-70b --hardware a100-80 --tensor-parallel 4 -p 20 --nodes 10")
    assert "least and most of all ranks" in many and len(many.splitlines()) == 5
    assert "does NOT fit" in run(capsys, "memory none --model llama2-70b")
    result = run_json(capsys, f"memory 1f1b {LONG} --memory-limit 6")
    assert result["fits"] is False and result["memory_limit"] == 6 * 2**30


def test_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_json(capsys, f"simulate 1f1b {LONG}")["step"]
    fast = run_json(capsys, f"simulate 1f1b {LONG} --matmul-efficiency 0.95 --attention-efficiency 0.95")["step"]
    assert fast["step_time"] < plain["step_time"] and fast["efficiency"]["matmul"] == 0.95
    batch = run_json(capsys, "simulate 1f1b --model llama2-7b --nodes 2 -p 4 --global-batch-size 64")
    assert (batch["step"]["data_parallel"], batch["microbatches"]) == (4, 16)
    whole = run_json(capsys, f"memory 1f1b {LONG} --disable-sequence-parallel")
    assert whole["memory"][0]["activations"] > plain["memory"][0]["activations"]
    sliced = run_json(capsys, f"simulate 1f1b {LONG} --chunk-size 4096")["step"]
    assert (plain["chunk_size"], sliced["chunk_size"]) == (0, 4096)
    assert sliced["step_time"] > plain["step_time"]
    for kind in ("activations", "workspace"):
        assert all(0 < s[kind] < p[kind] for s, p in zip(sliced["memory"][:-1], plain["memory"][:-1], strict=True))
    assert "MLP over slices of 4096 tokens" in run(capsys, f"simulate 1f1b {LONG} --chunk-size 4096")
    assert run_json(capsys, "simulate 1f1b --model llama3-8b -p 4 --forward-only")["step"]["optimizer_time"] == 0


MIXTRAL = "1f1b -p 4 -m 8 --model mixtral-8x7b --seq-length 8192 --nodes 4 --expert-parallel 8"


def test_experts_that_are_used_unevenly(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By a law and as a run has printed; a rank whose experts get three times the mean keeps more tokens of them."""
    log = tmp_path / "run.log"
    log.write_text(
        "".join(f" > layer {n:3d} | experts max/mean: 3.00 | tokens: 3 0 0 0 1 1 1 2 |\n" for n in range(32))
    )
    even, law, run_loads = (
        run_json(capsys, f"simulate {MIXTRAL} --moe-load {load}")["step"] for load in ("zipf:0", "zipf:1", log)
    )
    assert even == run_json(capsys, f"simulate {MIXTRAL}")["step"]
    assert even["step_time"] < law["step_time"] < 1.1 * run_loads["step_time"]
    assert even["mfu"] * even["step_time"] == pytest.approx(law["mfu"] * law["step_time"])
    kept = [max(memory["activations"] for memory in step["memory"]) for step in (even, law)]
    assert kept[0] < kept[1]
    assert "experts over 8, the busiest with 3 times the mean" in run(capsys, f"simulate {MIXTRAL} --moe-load {log}")


def test_further_tokens_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    """Each a layer, three norms, and a linear layer that joins two hidden states; their time is the head's."""
    one = "simulate 1f1b -p 2 -m 4 --model llama2-7b --nodes 1"
    none, two = (run_json(capsys, f"{one} {flags}")["step"] for flags in ("", "--mtp-num-layers 2"))
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert two["parameters"] - none["parameters"] == 2 * (layer + 2 * 4096**2 + 3 * 4096)
    assert two["step_time"] > none["step_time"]
    deepseek = "simulate 1f1b -p 2 -m 4 -L 4 --model deepseek-v3 --nodes 4 --expert-parallel 8 --mtp-num-layers"
    with_one, without = (run_json(capsys, f"{deepseek} {count}")["step"]["parameters"] for count in (1, 0))
    assert with_one > without + 256 * 3 * 7168 * 2048


def test_loss_over_slices(capsys: pytest.CaptureFixture[str]) -> None:
    """Logits are not among what is kept, and of one slice in the workspace, of the rank with the head alone."""
    setup = f"1f1b {LOGITS} --hardware h100"
    plain, sliced = (run_json(capsys, f"simulate {setup} {flag}")["step"] for flag in ("", "--loss-chunk-size 4096"))
    assert (plain["loss_chunk_size"], sliced["loss_chunk_size"]) == (0, 4096)
    assert plain["memory"][0] == sliced["memory"][0]
    assert plain["memory"][1]["activations"] - sliced["memory"][1]["activations"] == 65536 * (129024 // 8 * 4 + 9)
    assert plain["memory"][1]["workspace"] == 65536 * (129024 // 8 * 2 + 4096 * 2)  # with the gradient of what it takes
    of_layers = plain["memory"][0]["workspace"]
    assert 0.9 * of_layers < sliced["memory"][1]["workspace"] <= of_layers < 0.6 * plain["memory"][1]["workspace"]
    assert sliced["step_time"] == pytest.approx(plain["step_time"], rel=0.01) and sliced["mfu"] < 1
    assert sliced["mfu"] * sliced["step_time"] == pytest.approx(plain["mfu"] * plain["step_time"])
    assert "loss over slices of 4096 tokens" in run(capsys, f"simulate {setup} --loss-chunk-size 4096")
    evaluated = [
        run_json(capsys, f"simulate {setup} --forward-only {flag}")["makespan"]
        for flag in ("", "--loss-chunk-size 4096")
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=0.01)


def test_what_loss_slices_would_save_is_said_where_a_step_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    setup = f"memory 1f1b {LOGITS} --hardware h100"
    hint, short = "with --loss-chunk-size 4096 a rank needs", "--memory-limit 10"
    assert hint in run(capsys, f"{setup} {short}")
    assert hint not in run(capsys, setup)
    assert hint not in run(capsys, f"{setup} {short} --loss-chunk-size 2048")
    assert "--loss-chunk-size 1024" in run(capsys, f"{setup} --micro-batch-size 4 --memory-limit 30")


def test_file_and_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program, picture = tmp_path / "mine.csv", tmp_path / "both.json"
    first = run_json(capsys, f"simulate 1f1b --model llama3-8b -p 4 -m 3 --save-program {program}")
    again = run_json(capsys, f"simulate {program} --model llama3-8b")
    assert again["step"]["step_time"] == first["step"]["step_time"]
    run(capsys, f"draw 1f1b gpipe --model llama3-8b -p 4 -o {picture}")
    assert picture.exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("memory 1f1b", "memory needs --model"),
        ("simulate 1f1b --nodes 2", "--nodes needs --model"),
        ("simulate 1f1b --disable-sequence-parallel", "--disable-sequence-parallel needs --model"),
        ("simulate 1f1b --model llama", "--model llama is unknown: did you mean llama"),
        ("simulate 1f1b --model llama2-7b --hardware b100", "--hardware b100 is unknown: did you mean h100"),
        ("simulate 1f1b --model llama2-7b -p 3", "-p 3 times --tensor-parallel 1 must divide the 8 GPUs"),
        ("simulate 1f1b --model llama2-7b -p 0", "-p 0 must be"),
        ("simulate 1f1b --model llama2-7b --tensor-parallel 24", "--tensor-parallel 24 must divide the 32 heads"),
        ("simulate 1f1b --model llama2-7b --nodes 0", "--nodes 0 must be at least 1"),
        ("simulate 1f1b --model llama2-7b --chunk-size -4", "--chunk-size -4 must be at least 0"),
        ("simulate 1f1b --chunk-size 4", "--chunk-size needs --model"),
        ("simulate 1f1b --model llama2-7b --loss-chunk-size -4", "--loss-chunk-size -4 must be at least 0"),
        ("simulate 1f1b --model llama2-7b --loss-chunk-size 0.5", "--loss-chunk-size"),
        ("simulate 1f1b --loss-chunk-size 4", "--loss-chunk-size needs --model"),
        ("simulate 1f1b --model llama2-7b --nodes 99999999", "--nodes 99999999 must be at most 1000000"),
        ("simulate 1f1b --model llama2-7b -p 4 --global-batch-size 7", "values are 6 and 8"),
        ("simulate 1f1b --model llama2-7b -p 8 -m 4 --global-batch-size 8", "-m 4 does not fit"),
        ("simulate 1f1b --model llama2-7b --matmul-efficiency 75", "more than 0 and at most 1"),
        ("simulate 1f1b --model llama2-7b --memory-limit nan", "not a finite number"),
        (
            "simulate 1f1b --model llama2-7b --host-memory -1",
            "--host-memory -1 must be at least 0 GiB",
        ),
        ("simulate 1f1b --model llama2-7b --host-efficiency 2", "must be more than 0 and at most 1"),
        ("simulate 1f1b --host-memory 512", "--host-memory needs --model"),
        ("memory 1f1b --optimizer-cpu-offload", "--optimizer-cpu-offload needs --model"),
        ("memory 1f1b --model llama2-7b --optimizer-offload-fraction 1", "fraction 1 needs --optimizer-cpu-offload"),
        (
            "memory 1f1b --model llama2-7b --optimizer-cpu-offload --optimizer-offload-fraction -1",
            "--optimizer-offload-fraction -1 must be at least 0 and at most 1",
        ),
        (
            "memory 1f1b --model llama2-7b --optimizer-cpu-offload --disable-distributed-optimizer",
            "--optimizer-cpu-offload cannot be combined with --disable-distributed-optimizer",
        ),
        ("simulate 1f1b --model llama2-7b --copy-time 1", "--copy-time cannot be given beside --model"),
        ("simulate 1f1b --model llama2-7b --message-time 1", "--message-time cannot be given beside --model"),
        ("simulate 1f1b --model llama2-7b --tensor-parallel 8 --nodes 8 --seq-length 1001", "multiple of"),
        ("simulate 1f1b --model llama2-7b --modl x", "did you mean --model?"),
        (
            "simulate 1f1b --model llama2-7b --moe-load zipf:1",
            "--moe-load zipf:1 is of experts, and llama2-7b has none",
        ),
        ("simulate 1f1b --model mixtral-8x7b --moe-load zipf", "such as zipf:1"),
        (f"simulate {MIXTRAL} --expert-tensor-parallel 3", "--expert-tensor-parallel 3 must divide the width 14336"),
        (f"simulate {MIXTRAL} --expert-tensor-parallel 2", "and both together the 8 GPUs of each pipeline rank"),
        (f"simulate {MIXTRAL} --tensor-parallel 2", "must divide the 8 experts of a layer and the 4 data-parallel"),
    ],
)
def test_refused_in_one_sentence(capsys: pytest.CaptureFixture[str], command: str, says: str) -> None:
    assert cli.main(command.split()) == cli.USER_ERROR
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert output.out == "" and says in line
