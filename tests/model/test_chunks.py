"""Sequences that run chunk by chunk give the loss and every gradient of whole ones; the store of keys and values."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right

from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.attention.kernels import LowerRight
from helixpipe.model.attention.kv_store import KeyValueStore, UnitKeyValues
from tests.distributed import run_ranks
from tests.model import chunks
from tests.model.common import make_config

CHUNKS = [len(lengths) for lengths in chunks.LENGTHS]


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for results in run_ranks(chunks.compare, 2, timeout=300.0):
        for case, result in results.items():
            merged[case] = max(merged.get(case, result), result)
    return merged


@pytest.mark.parametrize("what", ["whole", "every-piece", "before-attention"])
@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("model", chunks.MODELS)
def test_loss_and_gradients_equal_those_of_whole_sequences(
    differences: dict[str, Any], model: str, number: int, what: str
) -> None:
    for quantity in ("loss", "gradients"):
        difference, name = differences[f"{model}-{number}-{what}-{quantity}"]
        assert difference < 1e-9, name


@pytest.mark.parametrize("what", ["all-recomputed", "attention-recomputed", "some-recomputed"])
@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("model", chunks.MODELS)
def test_recomputation_changes_nothing(differences: dict[str, Any], model: str, number: int, what: str) -> None:
    for quantity in ("loss", "gradients"):
        difference, name = differences[f"{model}-{number}-{what}-{quantity}"]
        assert difference < 1e-9, name
    assert differences[f"{model}-{number}-{what}-memory"] == (0, 0)


@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("model", chunks.MODELS)
def test_weight_gradients_may_come_later(differences: dict[str, Any], model: str, number: int) -> None:
    difference, name = differences[f"{model}-{number}-split-gradients"]
    assert difference < 1e-9, name


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_dropout_repeats_in_recomputation(differences: dict[str, Any], model: str) -> None:
    assert differences[f"{model}-dropout"] == (0.0, 0.0)


@pytest.mark.parametrize("what", ["every-piece", "attention-recomputed"])
@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("model", chunks.MODELS)
def test_gradients_of_keys_and_values_arrive_in_every_layer(
    differences: dict[str, Any], model: str, number: int, what: str
) -> None:
    difference, where = differences[f"{model}-{number}-{what}-relay"]
    assert difference < 1e-9, where


@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("model", chunks.MODELS)
def test_one_copy_of_keys_values_and_their_gradients(differences: dict[str, Any], model: str, number: int) -> None:
    """All microbatches are alive at once; at the end nothing is left."""
    for what in ("whole", "every-piece", "before-attention"):
        assert differences[f"{model}-{number}-{what}-memory"] == (0, 0)


@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("model", chunks.MODELS)
def test_chunks_of_the_head_see_their_labels_and_loss_mask(
    differences: dict[str, Any], model: str, number: int
) -> None:
    assert differences[f"{model}-{number}-own-loss"][0] < 1e-6


@pytest.mark.parametrize(
    "case",
    [
        f"{model}-tp2-{sp}"
        for model in ("gpt", "llama")
        for sp in ("nosp-2", "nosp-3", "nosp-4", "sp-2", "sp-3", "sp-6")
    ],
)
def test_tensor_parallel_equals_one_process(differences: dict[str, Any], case: str) -> None:
    difference, name = differences[case]
    assert difference < 1e-9, name


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_evaluation_keeps_one_sequence(differences: dict[str, Any], model: str) -> None:
    assert differences[f"{model}-evaluation"][0] < 1e-6
    assert differences[f"{model}-evaluation-memory"] == (0, 0)


# ------------------------------------------------------------------------------------------------- attention of a chunk


@pytest.mark.parametrize(("earlier", "length", "batch"), [(0, 6, 2), (5, 1, 2), (3, 9, 1), (70, 90, 3), (600, 520, 1)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_of_a_chunk_equals_rows_of_the_whole(groups: int, earlier: int, length: int, batch: int) -> None:
    """In float64 to 1e-12, output and every gradient; in float32 and bfloat16 to their precision."""
    torch.manual_seed(0)
    query = torch.randn(earlier + length, batch, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, earlier + length, batch, groups, 8, dtype=torch.float64).unbind()
    gradient = torch.randn(length, batch, 32, dtype=torch.float64)

    def attend(dtype: torch.dtype, rows: slice) -> list[torch.Tensor]:
        attention = CoreAttention(make_config("llama", num_query_groups=groups, params_dtype=dtype))
        leaves = [tensor.clone().to(dtype).requires_grad_() for tensor in (query[rows], key, value)]
        output = attention(*leaves, training=True)[-length:]
        output.backward(gradient.to(dtype))
        assert output.dtype == dtype
        gradients = [leaf.grad.double() for leaf in leaves if leaf.grad is not None]
        return [output.detach().double(), gradients[0][-length:], *gradients[1:]]

    expected = attend(torch.float64, slice(None))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        for ours, theirs in zip(attend(dtype, slice(earlier, None)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_attention_of_a_chunk_without_a_fused_kernel_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = CoreAttention(make_config("llama"))
    query = torch.randn(5, 2, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 9, 2, 2, 8, dtype=torch.float64).unbind()
    fused = attention(query, key, value, training=True)
    monkeypatch.setattr("helixpipe.model.attention.kernels._ChunkAttention", None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        masked = attention(query, key, value, training=True)
    torch.testing.assert_close(masked, fused, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from((1, 2, 4)))
def test_the_mask_of_a_chunk_is_torchs_and_takes_no_memory(length: int, earlier: int, groups: int) -> None:
    """Output and gradients equal to the last bit; torch's own mask takes 8 bytes a score."""
    query = torch.randn(2, 4, length, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, groups, earlier + length, 8, dtype=torch.float64).unbind()

    def attend(mask: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask, enable_gqa=groups < 4)
        output.sin().sum().backward()
        return [output, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    ours, theirs = LowerRight(length, earlier + length), causal_lower_right(length, earlier + length)
    assert ours.untyped_storage().nbytes() == 0
    for one, other in zip(attend(ours), attend(theirs), strict=True):
        assert torch.equal(one, other)


def test_no_scores_are_kept_of_a_chunk() -> None:
    """What attention saves: queries, keys, values, output and log-sums, all of one size a token."""
    kept: list[torch.Tensor] = []
    query, key, value = (torch.randn(n, 1, 4, 8, requires_grad=True) for n in (300, 1000, 1000))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        CoreAttention(make_config("gpt", params_dtype=torch.float32))(query, key, value, training=True)
    assert sorted(tensor.numel() for tensor in kept) == [300 * 4, 300 * 32, 300 * 32, 1000 * 32, 1000 * 32]


def test_attention_dropout_of_a_chunk_keeps_the_mean_and_the_mask() -> None:
    torch.manual_seed(0)
    attention = CoreAttention(make_config("gpt", attention_dropout=0.25))
    ones = torch.ones(64, 8, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(ones[40:], ones, ones, training=False), ones[40:].flatten(2))
    dropped = attention(ones[40:], ones, ones, training=True)
    assert dropped.var() > 0
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.05)
    future = ones.clone()
    future[:41] = 0.0
    dropped = attention(ones[40:], ones, future, training=True)
    assert not dropped[0].any() and dropped[1:].any()


# ---------------------------------------------------------------------------------------------------------- the store


SPANS = ((0, 4), (4, 3), (7, 2))
"""Offset and length of the chunks of a sequence of 9 tokens."""


def make_rows(offset: int, length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """A chunk's key and value as leaves [length, 2, 3, 4]."""
    generator = torch.Generator().manual_seed(offset)
    rows = torch.randn(2, length, 2, 3, 4, generator=generator, dtype=torch.float64).to(dtype)
    return [tensor.clone().requires_grad_() for tensor in rows]


def make_units(store: KeyValueStore) -> list[UnitKeyValues]:
    return [store.unit(0, offset, length, 9) for offset, length in SPANS]


def combine(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A scalar whose graph saves keys and values."""
    return (keys**3).sum() + (keys * values).sum()


def backward(unit: UnitKeyValues, output: torch.Tensor) -> None:
    unit.begin_backward([0])
    output.backward()
    unit.finish([0])


def expected_gradients() -> list[list[torch.Tensor]]:
    """Of the sum of `combine` over all chunks, for each chunk, without a store."""
    chunks = [make_rows(*span) for span in SPANS]
    keys, values = (torch.cat([chunk[which] for chunk in chunks]) for which in range(2))
    torch.stack([combine(keys[:end], values[:end]) for end in (4, 7, 9)]).sum().backward()
    return [[tensor.grad for tensor in chunk if tensor.grad is not None] for chunk in chunks]


def test_later_chunks_do_not_disturb_what_earlier_ones_saved() -> None:
    """Products save the joined rows, and autograd refuses a backward when what it saved has a new version."""
    units = make_units(KeyValueStore())
    leaves, joined, outputs = [], [], []
    for unit, span in zip(units, SPANS, strict=True):
        leaves.append(make_rows(*span))
        joined.append(unit.join(0, *leaves[-1]))
        outputs.append(combine(*joined[-1]))
        assert torch.equal(joined[-1][0], torch.cat([make_rows(*before)[0] for before in SPANS[: len(joined)]]))
    first, copy = joined[0][0], make_rows(*SPANS[0])[0]
    assert torch.equal(first, copy) and first._version == 0
    assert len({keys.untyped_storage().data_ptr() for keys, _ in joined}) == 1
    for unit, output in zip(reversed(units), reversed(outputs), strict=True):
        backward(unit, output)
    for chunk, expected in zip(leaves, expected_gradients(), strict=True):
        for leaf, gradient in zip(chunk, expected, strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)


def test_joining_again_neither_appends_nor_changes_rows() -> None:
    """As recomputation does: first without a graph, then with one, the later chunks' rows being there already."""
    store = KeyValueStore()
    units = make_units(store)
    with torch.no_grad():
        for unit, span in zip(units, SPANS, strict=True):
            unit.join(0, *make_rows(*span))
    nbytes = store.bytes_alive()
    leaves = []
    for unit, span in zip(reversed(units), reversed(SPANS), strict=True):
        for _ in range(2):
            leaves.append(make_rows(*span))
            keys, values = unit.join(0, *leaves[-1])
            assert keys.size(0) == values.size(0) == sum(span)
        assert store.bytes_alive() <= 2 * nbytes
        backward(unit, combine(keys, values))
        assert leaves[-2][0].grad is None  # its graph was given up
    for chunk, expected in zip(reversed(leaves[1::2]), expected_gradients(), strict=True):
        for leaf, gradient in zip(chunk, expected, strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)
    assert store.bytes_alive() == 0


def test_rows_that_later_chunks_saw_are_never_written_again() -> None:
    units = make_units(KeyValueStore())
    for unit, span in zip(units, SPANS, strict=True):
        seen = unit.join(0, *make_rows(*span))
    other = make_rows(*SPANS[1])
    again = units[1].join(0, *(2 * tensor for tensor in other))
    for which in range(2):
        assert torch.equal(again[which], seen[which][:7])
        assert torch.equal(again[which][4:], other[which])


def test_bytes_alive_at_every_moment() -> None:
    """Keys and values from the first chunk's forward to its backward; gradients from the last chunk's backward on."""
    store = KeyValueStore()
    units, outputs, alive = make_units(store), [], []
    for unit, span in zip(units, SPANS, strict=True):
        outputs.append(combine(*unit.join(0, *make_rows(*span))))
        alive.append(store.bytes_alive())
    for unit, output in zip(reversed(units), reversed(outputs), strict=True):
        backward(unit, output)
        alive.append(store.bytes_alive())
    token = 2 * 2 * 3 * 4 * 8
    assert alive == [9 * token] * 3 + [(9 + 7) * token] * 2 + [0]
    assert store.peak_bytes() == (9 + 7) * token


def test_a_chunk_keeps_no_memory_of_its_own() -> None:
    """A leaf moves into the buffers; of a tensor with a graph nothing is kept but the graph."""
    store = KeyValueStore()
    units = make_units(store)
    key, value = make_rows(*SPANS[0])
    keys, values = units[0].join(0, key, value)
    for leaf, buffer in ((key, keys), (value, values)):
        assert leaf.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert torch.equal(leaf, buffer)
    made = [2 * tensor for tensor in make_rows(*SPANS[1])]
    alive = [weakref.ref(tensor) for tensor in made]
    output = combine(*units[1].join(0, *made))
    del made
    assert [reference() for reference in alive] == [None, None]
    last = combine(*units[2].join(0, *make_rows(*SPANS[2])))
    backward(units[2], last)
    backward(units[1], output)


@pytest.mark.parametrize(("in_fp32", "expected"), [(False, torch.bfloat16), (True, torch.float32)])
def test_gradients_can_be_summed_in_float32(in_fp32: bool, expected: torch.dtype) -> None:
    """256 + 1 + 1 is 256 in bfloat16 when summed one by one."""
    store = KeyValueStore(fp32_gradients=in_fp32)
    units = [store.unit(0, offset, 1, 4) for offset in range(4)]
    leaves = [make_rows(offset, 1, torch.bfloat16) for offset in range(4)]
    joined = [unit.join(0, *chunk) for unit, chunk in zip(units, leaves, strict=True)]
    for unit, (keys, values), weight in reversed(list(zip(units, joined, (0.0, 1.0, 1.0, 256.0), strict=True))):
        unit.begin_backward([0])
        (weight * (keys.sum() + values.sum())).backward()
        assert {gradient.dtype for gradient in store.get(0, 0).gradients} == {expected}
        unit.finish([0])
    for leaf in leaves[0]:
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        assert leaf.grad.unique().tolist() == [258.0 if in_fp32 else 256.0]


def test_chunks_out_of_order_are_refused() -> None:
    store = KeyValueStore()
    units = make_units(store)
    outputs = [combine(*units[0].join(0, *make_rows(*SPANS[0])))]
    with pytest.raises(RuntimeError, match="tokens 4 to 6 must run before"):
        units[2].join(0, *make_rows(*SPANS[2]))
    with pytest.raises(RuntimeError, match="3 keys and values were expected, not 2"):
        units[1].join(0, *make_rows(4, 2))
    outputs += [combine(*units[i].join(0, *make_rows(*SPANS[i]))) for i in (1, 2)]
    with pytest.raises(RuntimeError, match="tokens from 7 on must finish before those from 4 on"):
        units[1].begin_backward([0])
    backward(units[2], outputs[2])
    with pytest.raises(RuntimeError, match="tokens from 4 on must finish before those from 0 on"):
        units[0].begin_backward([0])
    with pytest.raises(RuntimeError, match="no keys and values of microbatch 1 in layer 0"):
        store.unit(1, 0, 4, 9).begin_backward([0])


def test_release_waits_for_the_last_chunk() -> None:
    store = KeyValueStore()
    with torch.no_grad():
        for unit, span, left in zip(make_units(store), SPANS, (True, True, False), strict=True):
            unit.join(0, *make_rows(*span))
            unit.release()
            assert (store.bytes_alive() > 0) == left
