"""The shim that lets megatron-core run without CUDA."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from helixpipe.model import device

device.prepare()


def test_importing_the_model_prints_nothing() -> None:
    command = [
        sys.executable,
        "-c",
        "import helixpipe.model, torch; print(torch.overrides._len_torch_function_stack())",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stderr == ""
    assert finished.stdout == "0\n", "a TorchFunctionMode is left active and slows every op"


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
