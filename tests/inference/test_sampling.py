"""The next token of a distribution."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretrain.inference.generation import SamplingOptions, kept, pick

LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()[:, [2, 0, 3, 1]]  # probabilities .15 .5 .1 .25


def shares(**options: float) -> list[float]:
    left = kept(LOGITS, SamplingOptions(**options))[0]
    return [round(float(each / left.sum()), 4) for each in left]


def test_what_may_be_drawn() -> None:
    assert shares() == [0.15, 0.5, 0.1, 0.25]
    assert shares(top_k=2) == [0, 0.6667, 0, 0.3333]
    assert shares(top_p=0.5) == [0, 1, 0, 0]
    assert shares(top_p=0.51) == [0, 0.6667, 0, 0.3333]
    assert shares(top_p=0.75) == [0, 0.6667, 0, 0.3333]
    assert shares(top_k=3, top_p=0.85) == [0.1667, 0.5556, 0, 0.2778]  # of what three have together
    assert shares(temperature=0.5) == [0.0652, 0.7246, 0.029, 0.1812]


def test_greedy_takes_the_likeliest() -> None:
    assert pick(torch.cat((LOGITS, -LOGITS)), SamplingOptions(greedy=True)).tolist() == [1, 2]


@given(st.integers(0, 2**31), st.integers(0, 4), st.floats(0.01, 1.0))
def test_only_what_is_kept_is_drawn(seed: int, top_k: int, top_p: float) -> None:
    options = SamplingOptions(top_k=top_k, top_p=top_p)
    generator = torch.Generator().manual_seed(seed)
    token = pick(LOGITS, options, generator)
    assert kept(LOGITS, options)[0, token] > 0
    assert torch.equal(token, pick(LOGITS, options, torch.Generator().manual_seed(seed)))
