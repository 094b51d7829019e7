"""Kernels of core attention: what they take and keep, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.common.errors import UserError
from helixpipe.costs.attention_kernels import ATTENTION_KERNELS
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.program.stages import Piece
from schedules import Shape, build
from schedules.command import main

MODEL = MODELS["llama2-7b"]


def costs(kernel: str, hardware: str = "a100-80", tp: int = 1) -> ModelCosts:
    return ModelCosts(MODEL, HARDWARE[hardware], Layout(tp, tp > 1, attention_kernel=kernel), 2048)


def seconds(kernel: str, hardware: str = "a100-80", tokens: float = 2048, op: str = "F") -> float:
    return costs(kernel, hardware).piece_time("attn", op, Chunk(tokens))


@pytest.mark.parametrize(("channels", "share"), [(128, 0.30), (64, 0.29), (32, 0.18)])
def test_flash_attention_1_reaches_half_of_version_2(channels: int, share: float) -> None:
    assert HARDWARE["a100-80"].attention(channels, "fa1") == pytest.approx(share, abs=0.005)
    assert HARDWARE["a100-80"].attention(128, "fa2") == pytest.approx(189 / 312, abs=0.01)


def test_which_is_faster() -> None:
    assert seconds("unfused") > seconds("fa1") > seconds("fa2") == seconds("cudnn")
    assert seconds("fa2", "h100") > seconds("cudnn", "h100") > seconds("fa3", "h100")


def test_unfused_attention_computes_the_whole_square_and_passes_over_it() -> None:
    """6 passes over the scores of 16 bits in the forward and 11 in the backward, 14 more where softmax is not one
    kernel; twice a causal kernel's products."""
    hardware, square = HARDWARE["a100-80"], 2048**2 * 32.0
    bandwidth, rate = hardware.memory_bandwidth * 0.85, hardware.flops * 0.69
    assert seconds("unfused") == pytest.approx(6 * 2 * square / bandwidth + 4 * 128 * square / rate)
    assert seconds("unfused", op="I") == pytest.approx(11 * 2 * square / bandwidth + 8 * 128 * square / rate)
    long = 20 * 2 * 16 * square / bandwidth + 4 * 128 * 16 * square / rate
    assert seconds("unfused", tokens=8192) == pytest.approx(long)


@pytest.mark.parametrize("tp", [1, 4])
def test_unfused_attention_keeps_five_bytes_of_each_score(tp: int) -> None:
    pieces, chunk = [Piece("attn", 0)], Chunk(2048)
    fused, unfused = (costs(kernel, tp=tp).bytes.stash(pieces, chunk) for kernel in ("fa2", "unfused"))
    log_sum = 2048 * 32 / tp * 4
    assert unfused - fused == 5 * 2048**2 * 32 / tp - log_sum


def test_what_a_gpu_or_a_layout_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="--attention-kernel fa3 does not run on a100-80; valid there are unfused, fa1"):
        costs("fa3")
    layout = Layout(context_parallel=2, attention_kernel="unfused")
    with pytest.raises(UserError, match="--attention-kernel unfused cannot be had with --context-parallel 2"):
        ModelCosts(MODEL, HARDWARE["a100-80"], layout, 2048)


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_commands_take_a_kernel(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["1f1b", "-p", "2", "-m", "2", "--model", "llama2-7b", "--seq-length", "1024", "--hardware", "h100"]
    assert main(["simulate", *words, "--attention-kernel", kernel]) == 0
    assert "GiB allocated, about " in capsys.readouterr().out


def test_parts_of_hidden_states_are_sent_without_sequence_parallelism() -> None:
    """As Megatron-LM does; with it they are parts already."""
    for split, factor in ((False, 4), (True, 1)):
        layout = Layout(4, split)
        whole, parts = (
            ModelCosts(MODEL, HARDWARE["a100-80"], each, 2048).bytes.message(Piece("norm", 3), Chunk(2048))
            for each in (layout, replace(layout, scatters_messages=True))
        )
        assert whole == factor * parts


def test_programs_of_all_kernels_are_alike() -> None:
    programs = [build("1f1b", Shape(2, 4, 32, costs=costs(kernel))) for kernel in ("fa2", "unfused")]
    assert programs[0].ranks == programs[1].ranks
