"""Says what some models cannot be combined with: one statement of each rule, for training's flags and for costs."""

from __future__ import annotations

from collections.abc import Iterator

from helixpipe.costs.models import HALVES, OFF, PAIRS, Layout, ModelShape


def with_latent_attention(
    *, grouped: bool, qkv_bias: bool, windows: bool, unrotated: bool, output_gate: bool, context: str, overlap: str
) -> Iterator[tuple[str, str]]:
    """Yield flags that multi-latent attention does not go with, and why. context: the flag of context-parallel ranks
    with its value, empty if there is one; overlap: how collectives are hidden; the others: whether the model has it."""
    for flag, given, why in (
        ("--group-query-attention", grouped, "it shares keys and values by latents"),
        ("--add-qkv-bias", qkv_bias, "its projections have no bias"),
        ("--window-size", windows, "it attends to all tokens of a document"),
        ("--no-rope-freq", unrotated, "all of its layers rotate"),
        ("--attention-output-gate", output_gate, "megatron-core has no gate for it"),
        (context, context, "latents are not passed between context-parallel ranks"),
        (f"--overlap-tp-comm {HALVES}", overlap == HALVES, "its projections do not run in halves"),
    ):
        if given:
            yield flag, why


def with_further_tokens(*, positions: str, loss_chunk: int, parts: bool, overlap: str) -> Iterator[str]:
    """Yield what a head that predicts further tokens is not combined with. loss_chunk: tokens of a slice of the loss;
    parts: whether data-parallel ranks keep parts of weights and gradients."""
    for other, given in (
        (f"--loss-chunk-size {loss_chunk}: the output layer runs more than once", loss_chunk),
        ("weights or gradients in parts; use --data-parallel-sharding-strategy optim", parts),
        ("--position-embedding-type none: later tokens need places", positions == "none"),
        (f"--overlap-tp-comm {HALVES}; give {PAIRS} or {OFF}", overlap == HALVES),
    ):
        if given:
            yield other


def refusal(model: ModelShape, layout: Layout, parts: bool) -> str | None:
    """Return a sentence, in the flags of `helixpipe simulate`, if training does not run the model so; None if it does.
    parts: as of `with_further_tokens`."""
    if model.kv_rank:
        for flag, why in with_latent_attention(
            grouped=model.groups != model.heads,
            qkv_bias=model.qkv_bias,
            windows=bool(model.windowed),
            unrotated=bool(model.unrotated),
            output_gate=model.output_gate,
            context=f"--context-parallel {layout.context_parallel}" * (layout.context_parallel > 1),
            overlap=layout.overlap_tp_comm,
        ):
            return f"{flag} cannot be had with {model.name}, which has multi-latent attention: {why}."
    if model.further:
        for other in with_further_tokens(
            positions=model.positions, loss_chunk=layout.loss_chunk, parts=parts, overlap=layout.overlap_tp_comm
        ):
            return f"--mtp-num-layers {model.further} cannot be combined with {other}."
    if model.experts and layout.tensor_parallel > 1 and not layout.sequence_parallel:
        return (
            f"--tensor-parallel {layout.tensor_parallel} cannot be had without sequence parallelism with {model.name}, "
            "which has experts."
        )
    return None
