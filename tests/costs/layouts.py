"""Models and layouts whose pieces are counted."""

from __future__ import annotations

from collections.abc import Container, Iterator

from helixpipe.costs.models import HALVES, OFF, Layout, ModelShape
from tests.model.common import set_parallel

TOKENS, BATCH, VOCABULARY, LAYERS = 24, 2, 512, 2
GPT, LLAMA = ("LayerNorm", "learned_absolute", True, TOKENS), ("RMSNorm", "rope", False, TOKENS)
SHAPES = {
    "gpt": ModelShape("gpt", LAYERS, 32, 4, 4, 128, False, VOCABULARY, False, *GPT),
    "gpt-gqa": ModelShape("gpt-gqa", LAYERS, 32, 4, 2, 96, False, VOCABULARY, True, "LayerNorm", "none", True, TOKENS),
    "llama": ModelShape("llama", LAYERS, 32, 4, 2, 40, True, VOCABULARY, False, *LLAMA),
    "qwen3": ModelShape("qwen3", LAYERS, 32, 4, 2, 40, True, VOCABULARY, True, *LLAMA, 12, True, True),
    "gpt-centered": ModelShape("gpt", LAYERS, 32, 4, 4, 96, False, VOCABULARY, False, *GPT, 6, False, True, True),
    "llama-mha": ModelShape("llama-mha", LAYERS, 32, 4, 4, 40, True, VOCABULARY, True, *LLAMA),
}

CASES = {
    "gpt-tp1": ("gpt", 1, False, 0),
    "gpt-tp2-sp": ("gpt", 2, True, 0),
    "gpt-gqa-tp2": ("gpt-gqa", 2, False, 0),
    "llama-tp1": ("llama", 1, False, 0),
    "llama-tp2": ("llama", 2, False, 0),
    "llama-tp2-sp": ("llama", 2, True, 0),
    "llama-mha-tp1": ("llama-mha", 1, False, 0),
    "qwen3-tp1": ("qwen3", 1, False, 0),
    "qwen3-tp2-sp": ("qwen3", 2, True, 0),
    "gpt-centered-tp2": ("gpt-centered", 2, False, 0),
    "gpt-tp2-sp-slices": ("gpt", 2, True, 9),
    "llama-tp1-slices": ("llama", 1, False, 9),
    "llama-tp2-slices": ("llama", 2, False, 9),
}
"""Model, tensor-parallel size, sequence parallelism, tokens of a slice of MLP and loss (0: whole)."""

HALVES_CASES = {
    "gpt-tp2-halves": ("gpt", False, 0),
    "gpt-gqa-tp2-halves": ("gpt-gqa", False, 9),
    "llama-tp2-sp-halves": ("llama", True, 0),
    "qwen3-tp2-sp-halves": ("qwen3", True, 9),
    "gpt-tp2-sp-halves": ("gpt", True, 0),
}
"""Model, sequence parallelism of two ranks whose tokens run in halves, tokens of a slice of MLP and loss (0: whole)."""

CONTEXT_CASES = {
    "gpt-cp2-p2p": ("gpt", "p2p", 5, OFF),
    "llama-cp2-p2p": ("llama", "p2p", 0, OFF),
    "gpt-gqa-cp2-a2a": ("gpt-gqa", "a2a", 0, OFF),
    "llama-cp2-a2a": ("llama", "a2a", 5, OFF),
    "gpt-gqa-cp2-a2a-halves": ("gpt-gqa", "a2a", 9, HALVES),
    "llama-cp2-a2a-halves": ("llama", "a2a", 0, HALVES),
}
"""Model, what two context-parallel ranks exchange, tokens of a slice of MLP and loss (0: whole), whether in halves."""


def layouts(cases: Container[str]) -> Iterator[tuple[str, ModelShape, Layout]]:
    """The cases, with their ranks' process groups in place."""
    for case, (name, tp, split, chunk) in CASES.items():
        if case not in cases:
            continue
        set_parallel(tp=tp)
        layout = Layout(tp, split, BATCH, element_bytes=4, fused_kernels=False, mlp_chunk=chunk, loss_chunk=chunk)
        yield case, SHAPES[name], layout
    for case, (name, split, chunk) in HALVES_CASES.items():
        if case not in cases:
            continue
        set_parallel(tp=2)
        layout = Layout(2, split, BATCH, 4, False, chunk, chunk, overlap_tp_comm=HALVES)
        yield case, SHAPES[name], layout
    for case, (name, how, chunk, overlap) in CONTEXT_CASES.items():
        if case not in cases:
            continue
        set_parallel(cp=2)
        layout = Layout(
            1, False, BATCH, 4, False, chunk, chunk, context_parallel=2, cp_comm_type=how, overlap_tp_comm=overlap
        )
        yield case, SHAPES[name], layout


def squares(layout: Layout) -> float:
    """Return what torch counts of a causal square of scores, the whole of it, over ours, exactly half. In a ring only
    the squares on the diagonal are causal: two of a rank's, of 2cp in a row of them. Of halves, one of the two quarters
    on the diagonal is counted as such, and the other with all of the third."""
    if layout.halves:
        return 1.5
    return 1 + 1 / (2 * layout.context_parallel) if layout.rings else 2
