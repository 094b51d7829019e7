"""torch's private flash kernels of a GPU, which ring attention merges, against products that are written out."""

from __future__ import annotations

import pytest
import torch

from helixpipe.model.attention.log_sums import FlashOnCUDA, Plain
from tests.model.log_sum_cases import CASES, LogSumCase


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_of_a_gpu(case: LogSumCase) -> None:
    """The share of some of the keys: output and log-sums that the backward takes are over all of them."""
    query, keys, values, gradient = case.tensors("cuda")
    tensors = query, keys, values
    wide = query.double(), keys.double(), values.double()
    output, log_sum = FlashOnCUDA().forward(*tensors, case.causal, case.scale, case.reach)
    expected, expected_sum = Plain().forward(*wide, case.causal, case.scale, case.reach)
    torch.testing.assert_close(log_sum.double(), expected_sum, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)
    more = expected_sum + 1.0  # as if other keys had e - 1 times as much
    ours = FlashOnCUDA().backward(gradient, *tensors, output, more.float(), case.causal, case.scale, case.reach)
    theirs = Plain().backward(gradient.double(), *wide, output.double(), more, case.causal, case.scale, case.reach)
    for name in ours._fields:
        torch.testing.assert_close(getattr(ours, name).double(), getattr(theirs, name), rtol=3e-2, atol=3e-2)
