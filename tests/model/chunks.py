"""A driver that runs a model chunk by chunk with a key/value store, and what the ranks of test_chunks.py compare."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from helixpipe.model import Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.program.stages import Piece
from tests.model.common import BATCH, CHAIN, LAYERS, SEQUENCE, gradients_of, make_batch, make_model, set_parallel, worst
from tests.model.equality import whole

Tensors = tuple[torch.Tensor, ...]
Parts = tuple[tuple[Piece, ...], ...]
Relay = dict[tuple[int, int], list[torch.Tensor]]
"""By microbatch and layer, [gradient of the keys, gradient of the values]."""

MICROBATCHES = 2
LENGTHS = ((12,), (7, 5), (5, 4, 3), (4, 3, 3, 2), (3, 2, 2, 1, 1, 1, 1, 1))
EVEN = ((6, 4, 2), (2, 2, 2, 2, 2, 2), (4, 8))
"""With sequence parallelism over two ranks."""

MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "gpt": ("gpt", True, {}),
    "gpt-one-group": ("gpt", False, {"num_query_groups": 1}),
    "gpt-two-groups": ("gpt", True, {"num_query_groups": 2}),
    "llama": ("llama", False, {}),
    "llama-mha": ("llama", True, {"num_query_groups": 4}),
}
WHOLE: Parts = (CHAIN,)
EVERY_PIECE: Parts = tuple((piece,) for piece in CHAIN)
BEFORE_ATTENTION: Parts = (CHAIN[:3], CHAIN[3:8], CHAIN[8:])
"""Cut between qkv and attn of each layer."""


class ChunkedRun:
    """Forward and backward of units, a unit being one microbatch's chunk through the whole model.

    parts: runs of pieces, each with a graph of its own. recomputed: those among them whose forward keeps nothing.
    own_loss: the head's loss, which is computed in float32, in place of `objective`. split: weight gradients of linear
    layers come after all input gradients.
    """

    def __init__(
        self,
        model: PipelineModel,
        lengths: Sequence[int],
        parts: Parts = WHOLE,
        recomputed: Sequence[int] = (),
        own_loss: bool = False,
        split: bool = False,
    ):
        self.model, self.lengths, self.parts, self.recomputed = model, lengths, parts, recomputed
        self.own_loss = own_loss
        self.weight_gradients = model.weight_gradients() if split else None
        self.store = KeyValueStore()
        self.loss = 0.0
        self.relay: Relay = {}
        self._order: list[tuple[int, int]] = []
        self._stash: dict[tuple[int, int], list[tuple[Tensors, Tensors]]] = {}

    def all(self) -> None:
        """All microbatches alive at once, their units taking turns."""
        for chunk in range(len(self.lengths)):
            for microbatch in range(MICROBATCHES):
                self.forward(microbatch, chunk)
        for chunk in reversed(range(len(self.lengths))):
            for microbatch in range(MICROBATCHES):
                if self.weight_gradients is None:
                    self.backward(microbatch, chunk)
                else:
                    with self.weight_gradients.keep((microbatch, chunk)):
                        self.backward(microbatch, chunk)
        if self.weight_gradients is not None:
            for unit in self._order:
                self.weight_gradients.compute(unit)

    def context(self, microbatch: int, chunk: int) -> UnitContext:
        offset, length = sum(self.lengths[:chunk]), self.lengths[chunk]
        unit = self.store.unit(microbatch, offset, length, sum(self.lengths))
        return UnitContext(0, microbatch, chunk, offset, length, keys_values=unit)

    def forward(self, microbatch: int, chunk: int) -> None:
        state: Tensors = ()
        context = self.context(microbatch, chunk)
        stash = self._stash[microbatch, chunk] = []
        self._order.append((microbatch, chunk))
        for index, pieces in enumerate(self.parts):
            inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
            recomputed = index in self.recomputed
            with torch.no_grad() if recomputed else nullcontext():
                state = self.run(pieces, inputs, context)
            stash.append((inputs, () if recomputed else state))
        self.loss += state[0].item()

    def backward(self, microbatch: int, chunk: int) -> None:
        context = self.context(microbatch, chunk)
        assert context.keys_values is not None
        gradients: Tensors = (torch.ones((), dtype=torch.float32 if self.own_loss else torch.float64),)
        for pieces, (inputs, outputs) in zip(
            reversed(self.parts), reversed(self._stash.pop((microbatch, chunk))), strict=True
        ):
            outputs = outputs or self.run(pieces, inputs, context)
            layers = [piece.layer for piece in pieces if piece.role == "attn"]
            context.keys_values.begin_backward(layers)
            torch.autograd.backward(outputs, gradients)
            context.keys_values.finish(layers)
            gradients = tuple(tensor.grad for tensor in inputs if tensor.grad is not None)
            assert len(gradients) == len(inputs)
            if pieces[0].role == "attn":
                rows = self.relay.setdefault((microbatch, pieces[0].layer), [torch.empty(0), torch.empty(0)])
                for which in range(2):
                    later = [rows[which]] if rows[which].numel() else []
                    rows[which] = torch.cat([gradients[1 + which], *later])

    def run(self, pieces: Sequence[Piece], inputs: Tensors, context: UnitContext) -> Tensors:
        batch = make_batch(context.microbatch)
        if pieces[-1].kind != "head" or self.own_loss:
            return self.model.run(pieces, inputs, batch, context)
        logits = self.model.logits(*self.model.run(pieces[:-1], inputs, batch, context))
        return (objective(logits, batch, context, self.model.tp_group.rank()),)


def objective(logits: torch.Tensor, batch: Microbatch, context: UnitContext, tp_rank: int) -> torch.Tensor:
    """A float64 function of the chunk's logits [s, b, vocabulary / tp] that depends on label and loss mask."""
    labels = batch.labels[:, context.tokens].t()[..., None].double()
    mask = batch.loss_mask[:, context.tokens].t()[..., None].double()
    columns = torch.arange(logits.size(-1), dtype=torch.float64) + tp_rank * logits.size(-1)
    return torch.sum(
        mask * (torch.sin(columns + 0.1 * labels) * logits + torch.cos(labels - 0.2 * columns) * logits**2)
    )


def unchunked(model: PipelineModel) -> tuple[float, dict[str, torch.Tensor], Relay]:
    """Loss, gradients, and gradients of keys and values, of whole sequences without a store."""
    loss, relay = 0.0, Relay()
    for microbatch in range(MICROBATCHES):
        batch, context = make_batch(microbatch), UnitContext(0, microbatch)
        kept: list[tuple[Tensors, Tensors]] = []
        state: Tensors = ()
        for pieces in EVERY_PIECE[:-1]:
            inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
            state = model.run(pieces, inputs, batch, context)
            kept.append((inputs, state))
        inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
        value = objective(model.logits(*inputs), batch, context, model.tp_group.rank())
        kept.append((inputs, (value,)))
        loss += value.item()
        gradients: tuple[torch.Tensor | None, ...] = (None,)
        for pieces, (inputs, outputs) in zip(reversed(EVERY_PIECE), reversed(kept), strict=True):
            torch.autograd.backward(outputs, gradients)
            gradients = tuple(tensor.grad for tensor in inputs)
            if pieces[0].kind == "attn":
                relay[microbatch, pieces[0].layer] = [gradient for gradient in gradients[1:3] if gradient is not None]
    return loss, gradients_of(model), relay


def worst_of_relay(ours: Relay, theirs: Relay) -> tuple[float, str]:
    def named(relay: Relay) -> dict[str, torch.Tensor]:
        return {f"{key} {which}": rows[which] for key, rows in relay.items() for which in range(2)}

    return worst(named(ours), named(theirs))


def relative(ours: float, theirs: float) -> tuple[float, str]:
    return abs(ours / theirs - 1), "loss"


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Largest relative difference and where, for every case. Each rank takes half the models, then both one model."""
    set_parallel(tp=1)
    results: dict[str, Any] = {}
    for name in list(MODELS)[rank::world_size]:
        results.update(compare_model(name))
        results.update(own_loss(name))
    results.update(drop("gpt" if rank == 0 else "llama"))
    results.update(evaluate("gpt" if rank == 0 else "llama"))
    expected = {name: unchunked(make(name)) for name in ("gpt", "llama")}
    set_parallel(tp=2)
    for name, (_, gradients, _) in expected.items():
        for sequence_parallel in (False, True):
            for lengths in EVEN if sequence_parallel else LENGTHS[1:4]:
                model = make(name, tp=2, sequence_parallel=sequence_parallel)
                run = ChunkedRun(model, lengths, BEFORE_ATTENTION, recomputed=(1,))
                run.all()
                case = f"{name}-tp2-{'sp' if sequence_parallel else 'nosp'}-{len(lengths)}"
                results[case] = worst(whole(model, gradients_of(model), partial_sums=True), gradients)
    return results


def make(name: str, **changes: Any) -> PipelineModel:
    style, tied, own = MODELS[name]
    return make_model(style, tied, **{**own, **changes})


def compare_model(name: str) -> dict[str, Any]:
    model = make(name)
    loss, gradients, relay = unchunked(model)
    results: dict[str, Any] = {}
    for lengths in LENGTHS:
        for what, parts, recomputed in (
            ("whole", WHOLE, ()),
            ("every-piece", EVERY_PIECE, ()),
            ("before-attention", BEFORE_ATTENTION, ()),
            ("all-recomputed", WHOLE, (0,)),
            ("attention-recomputed", EVERY_PIECE, [i for i, part in enumerate(EVERY_PIECE) if part[0].kind == "attn"]),
            ("some-recomputed", BEFORE_ATTENTION, (1,)),
        ):
            model.zero_grad()
            run = ChunkedRun(model, lengths, parts, recomputed)
            run.all()
            case = f"{name}-{len(lengths)}-{what}"
            results[f"{case}-loss"] = relative(run.loss, loss)
            results[f"{case}-gradients"] = worst(gradients_of(model), gradients)
            results[f"{case}-memory"] = (
                run.store.bytes_alive(),
                run.store.peak_bytes() - expected_peak(model, lengths),
            )
            if parts == EVERY_PIECE:
                results[f"{case}-relay"] = worst_of_relay(run.relay, relay)
    for lengths in LENGTHS:  # last, as it changes the model's linear layers
        model.zero_grad()
        ChunkedRun(model, lengths, BEFORE_ATTENTION, (1,), split=True).all()
        results[f"{name}-{len(lengths)}-split-gradients"] = worst(gradients_of(model), gradients)
    return results


def own_loss(name: str) -> dict[str, Any]:
    model = make(name)
    results: dict[str, Any] = {}
    whole_sum = sum(model.run(CHAIN, (), make_batch(i), UnitContext(0, i))[0].item() for i in range(MICROBATCHES))
    for lengths in LENGTHS:
        run = ChunkedRun(model, lengths, own_loss=True)
        run.all()
        results[f"{name}-{len(lengths)}-own-loss"] = relative(run.loss, whole_sum)
    return results


def drop(name: str) -> dict[str, Any]:
    """Differences of loss and gradients between a run that recomputes everything and one that keeps everything."""
    model = make(name, attention_dropout=0.2, hidden_dropout=0.1)
    losses, gradients = [], []
    for recomputed in ((), (0, 1, 2)):
        model.zero_grad()
        run = ChunkedRun(model, (5, 4, 3), BEFORE_ATTENTION, recomputed)
        run.all()
        losses.append(run.loss)
        gradients.append({key: value.clone() for key, value in gradients_of(model).items()})
    return {f"{name}-dropout": (relative(*losses)[0], worst(*gradients)[0])}


def expected_peak(model: PipelineModel, lengths: Sequence[int]) -> int:
    """Bytes of the store when all microbatches are alive: keys, values, and gradients of all but the last chunk."""
    config = model.config
    groups, channels = config.num_query_groups, config.kv_channels
    assert groups is not None and channels is not None
    row = BATCH * groups * channels * 8
    return MICROBATCHES * LAYERS * 2 * row * (SEQUENCE + (SEQUENCE - lengths[-1]))


def evaluate(name: str) -> dict[str, Any]:
    """Loss without gradients, chunk by chunk; then bytes left, and bytes at most, beside one sequence's."""
    model = make(name)
    run = ChunkedRun(model, (5, 4, 3), own_loss=True)
    ours = expected = 0.0
    with torch.no_grad():
        for microbatch in range(MICROBATCHES):
            expected += model.run(CHAIN, (), make_batch(microbatch), UnitContext(0, microbatch, training=False))[
                0
            ].item()
            for chunk in range(3):
                context = run.context(microbatch, chunk)._replace(training=False)
                ours += run.run(CHAIN, (), context)[0].item()
                assert context.keys_values is not None
                context.keys_values.release()
    one = expected_peak(model, (SEQUENCE,)) // MICROBATCHES
    return {
        f"{name}-evaluation": relative(ours, expected),
        f"{name}-evaluation-memory": (run.store.bytes_alive(), run.store.peak_bytes() - one),
    }
