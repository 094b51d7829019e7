"""examples/torch_llama.py trains as the whole Hugging Face model does in one process."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
import torch

from tests.integration.launching import ROOT, Launch

SCRIPT = ROOT / "examples" / "torch_llama.py"


@pytest.mark.thorough
def test_llama_trains_as_one_process_would() -> None:
    from transformers import LlamaForCausalLM  # here: it takes a second, which every process that collects tests would

    assert len(SCRIPT.read_text().splitlines()) <= 60
    done = Launch("llama", "zbv", script=str(SCRIPT)).run()
    assert done.status == 0, done.output
    losses = [float(text) for text in re.findall(r"^step \d: loss (\S+)$", done.output, re.MULTILINE)]
    example: dict[str, Any] = runpy.run_path(str(SCRIPT))
    torch.manual_seed(1)
    model = LlamaForCausalLM(example["CONFIG"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = example["MICROBATCHES"] * example["BATCH"]
    tokens = (torch.arange(example["LENGTH"] + 1) + torch.arange(samples)[:, None]) % example["CONFIG"].vocab_size
    expected = []
    for _ in range(example["STEPS"]):
        loss = example["loss_fn"](model(tokens[:, :-1]).logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=2e-4)
    assert len(losses) == 5 and expected[-1] < 0.9 * expected[0]
