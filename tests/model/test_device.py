"""The shim that lets megatron-core run without CUDA."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from helixpipe.model import device
from tests.distributed import run_ranks

device.prepare()

from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPT = """
import gc, sys, torch
compiler = torch.compile
import helixpipe.model
assert torch.overrides._len_torch_function_stack() == 0, "a TorchFunctionMode is left active and slows every op"
assert torch.compile is compiler and gc.isenabled()

from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
values, bias = torch.linspace(-2, 2, 12).view(3, 4), torch.tensor([0.5, -0.5, 1.0, 0.0])
left, right = (values + bias).chunk(2, dim=-1)
assert torch.equal(bias_swiglu_impl(values, bias), torch.nn.functional.silu(left) * right)
assert bias_gelu_impl(values, bias).allclose(torch.nn.functional.gelu(values + bias, approximate="tanh"))
assert "torch._inductor.compile_fx" not in sys.modules, "torch's compiler, half of the start-up, that nothing needs"

from megatron.pretrain.data.tokenizer import build_tokenizer
build_tokenizer("NullTokenizer", vocab_size=8)
assert "transformers" not in sys.modules, "a second that tokens which are numbers do not need"
"""


@pytest.mark.thorough
def test_importing_the_model_is_quick_and_quiet_and_leaves_nothing_behind() -> None:
    """Functions that megatron-core hands to torch's compiler work without it."""
    finished = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_later_warnings_are_seen() -> None:
    with pytest.warns(UserWarning, match="something real"):
        warnings.warn("something real", UserWarning, stacklevel=1)


def test_cuda_functions_mean_the_cpu() -> None:
    assert device.device() == torch.device("cpu")
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    torch.cuda.synchronize()
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    draw = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2), draw)


def test_redirect_reads_cuda_as_cpu() -> None:
    with device.redirect():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).to("cuda:0").device.type == "cpu"
        assert (
            torch.zeros(2).to(device=torch.device("cuda"), dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        )
    assert torch.zeros(2).type() == "torch.FloatTensor"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("fraction", "moved"), [(0.0, 0), (0.5, 12), (1.0, 20)])
def test_an_optimizer_with_state_on_the_host(fraction: float, moved: int, overlap: bool) -> None:
    """Whole weights go until the share is reached; updates are those of Adam on float32 copies of all."""
    start = [torch.linspace(-1, 1, size).bfloat16() for size in (4, 8, 8)]
    weights = [torch.nn.Parameter(value.clone()) for value in start]
    copies = [torch.nn.Parameter(value.float()) for value in start]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "fused": True}
    optimizer = HybridDeviceOptimizer(
        weights,
        fraction,
        torch.optim.AdamW,
        torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        **settings,
    )
    plain = torch.optim.AdamW(copies, **settings)
    assert sum(weight.numel() for weight in optimizer.gpu_params_map_cpu_copy) == moved
    assert (optimizer.gpu_optimizer is None) == (moved == 20)
    for _ in range(3):
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = torch.full_like(weight, 0.5)
            copy.grad = weight.grad.float()
        optimizer.step()
        plain.step()
    for weight, copy, before in zip(weights, copies, start, strict=True):
        assert torch.equal(weight, copy.bfloat16()) and not torch.equal(weight, before)
        assert torch.equal(optimizer.state[weight]["master_param"], copy)


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def one_rank(rank: int, world_size: int) -> tuple[list[int], list[float], list[float]]:
    reads, norms, expected = [], [], []
    for count in (0, 1, 40):
        gradients = [torch.randn(3, 1 + index) for index in range(count)]
        with Reads() as counted, device.redirect():
            norms.append(get_grad_norm_fp32(gradients))
        reads.append(counted.count)
        expected.append(float(torch.cat([torch.zeros(1), *map(torch.flatten, gradients)]).norm()))
    return reads, norms, expected


def test_the_norm_of_gradients_is_read_once() -> None:
    """On a GPU each number that the host reads waits for all kernels before it."""
    ((reads, norms, expected),) = run_ranks(one_rank, 1)
    assert reads == [1, 1, 1]
    assert norms == pytest.approx(expected, rel=1e-6)
