"""A flipped bit changes a tensor's digest, and the balance of what was sent and received."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.lowering.lower import lower
from megatron.pretrain.resilience.digests import PRIME, StepDigests, digest, digests
from schedules import Shape, build

SIZES = st.integers(1, 40)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8])


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one of all bits of a tensor."""
    octets = tensor.view(-1).view(torch.uint8)
    octets[bit // 8] ^= 1 << bit % 8


@settings(max_examples=200)
@given(st.integers(0, 1 << 30), SIZES, TYPES, st.integers(0, 7))
def test_any_flipped_bit_changes_the_digest_also_modulo_the_prime(
    seed: int, size: int, dtype: torch.dtype, before: int
) -> None:
    """Wherever in its memory the tensor begins: on both sides of a message that may differ."""
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    tensor = octets.view(dtype)
    elsewhere = torch.empty(before + size, dtype=dtype)[before:]
    elsewhere.view(torch.uint8).copy_(octets)
    whole = digest(tensor)
    assert whole == digest(elsewhere) and whole.dtype == torch.int64
    flip(elsewhere, seed % (8 * octets.numel()))
    assert (whole - digest(elsewhere)) % PRIME and digests([tensor, elsewhere]).unique().numel() == 2


@pytest.mark.parametrize("name", ["1f1b", "seq1f1b", "helix", "weipipe", "wzb2"])
def test_what_all_ranks_sent_and_received_balances_unless_a_bit_has_flipped(name: str) -> None:
    """Weights that ranks pass on count for each of them, with the digest of where they come from."""
    lowered, rng = lower(build(name, Shape(4, 8, 8, chunks=2 if name == "seq1f1b" else 1))), Random(name)
    messages = lowered.messages
    for _ in range(20):
        chosen, bit = rng.choice(messages), rng.randrange(64)
        payloads = {message.number: torch.tensor(rng.getrandbits(63)).view(1) for message in messages}
        for flipped in (False, True):
            ranks = [StepDigests(lowered.graph) for _ in range(4)]
            for message in messages:
                root = ranks[0].root(message)
                came = payloads[root.number].clone()
                if message is root:
                    ranks[message.source].send(message, [came])
                if flipped and message is chosen:
                    flip(came, bit)
                ranks[message.target].receive(message, [came])
            parts = [part for rank in ranks if (part := rank.balance()) is not None]
            assert bool(sum(float(part) for part in parts) % PRIME) == flipped
