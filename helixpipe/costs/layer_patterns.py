"""Says which layers attend to a window, leave RoPE out, or have experts: from Megatron-LM's flags to the kinds of
their pieces.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.ranges import MOST_LAYERS, MOST_TOKENS
from helixpipe.program.stages import (
    EXPERTS,
    LATENT,
    LATENT_QKV,
    LAYER_PIECES,
    NO_ROPE,
    SINKS,
    WINDOW,
    WINDOW_SINKS,
    LayerKinds,
    role_of,
)

Frequency = int | tuple[int, ...]
"""N: every N-th layer is the exception. A tuple: a number for each layer, 1 or 0."""


def kinds_of_layers(
    layers: int,
    windowed: Sequence[int],
    unrotated: Sequence[int],
    mixed: Sequence[int] = (),
    latent: bool = False,
    sinks: bool = False,
) -> tuple[LayerKinds, ...]:
    """The kinds of the pieces of each layer. windowed, unrotated, mixed: for layer after layer, and again from the
    first, 1 where it attends to a window, where it has no RoPE, and where its MLP is a mixture of experts; empty: none
    does. latent, sinks: whether attention is multi-latent, and whether it has learned sinks, in all of them."""

    def kinds(layer: int) -> LayerKinds:
        own = [LATENT_QKV, LATENT] * latent
        own += [WINDOW_SINKS if sinks else WINDOW] * bool(windowed and windowed[layer % len(windowed)])
        own += [SINKS] * sinks
        own += [NO_ROPE] * bool(unrotated and unrotated[layer % len(unrotated)])
        own += [EXPERTS] * bool(mixed and mixed[layer % len(mixed)])
        return tuple(next((kind for kind in own if role_of(kind) == role), role) for role in LAYER_PIECES)

    return tuple(map(kinds, range(layers)))


def windowed_layers(frequency: Frequency | None) -> tuple[int, ...]:
    """`--window-attn-skip-freq` as 1 and 0: every N-th layer attends to all; without it, none does."""
    if frequency is None:
        return (1,)
    return (1,) * (frequency - 1) + (0,) if isinstance(frequency, int) else frequency


def unrotated_layers(frequency: Frequency | None) -> tuple[int, ...]:
    """`--no-rope-freq` as 1 and 0: every N-th layer has no RoPE; without it, all have."""
    if frequency is None:
        return ()
    return (0,) * (frequency - 1) + (1,) if isinstance(frequency, int) else frequency


def mixed_layers(frequency: Frequency) -> tuple[int, ...]:
    """`--moe-layer-freq` of a model with experts, as 1 and 0: every N-th layer has them, from the first on."""
    return (1,) + (0,) * (frequency - 1) if isinstance(frequency, int) else frequency


def shape_fields(
    window_size: str | None, window_attn_skip_freq: str | None, no_rope_freq: str | None, layers: int | None = None
) -> dict[str, Any]:
    """The fields of `ModelShape` that these flags say. layers: of the model, for which a list has a number each; None:
    of any. Raises UserError, naming the flag."""
    left = parse_window(window_size)
    if window_attn_skip_freq is not None and left is None:
        raise UserError(
            f"--window-attn-skip-freq {window_attn_skip_freq} says which layers have a window: give --window-size."
        )
    skipped = parse_frequency("--window-attn-skip-freq", window_attn_skip_freq, layers)
    unrotated = parse_frequency("--no-rope-freq", no_rope_freq, layers)
    if layers is not None and isinstance(unrotated, int) and layers % unrotated:
        raise UserError(f"--no-rope-freq {unrotated} must divide --num-layers {layers}, or be a list of a number each.")
    return {
        "window": 0 if left is None else left + 1,
        "windowed": () if left is None else windowed_layers(skipped),
        "unrotated": unrotated_layers(unrotated),
    }


def pattern_values(
    layers: int, window: int, windowed: Sequence[int], unrotated: Sequence[int]
) -> dict[str, str | None]:
    """Return `window_size`, `window_attn_skip_freq` and `no_rope_freq` for these fields of a `ModelShape`."""
    values: dict[str, str | None] = {"window_size": f"{window - 1},0" if window else None}
    for name, pattern, plain in (("window_attn_skip_freq", windowed, 1), ("no_rope_freq", unrotated, 0)):
        marks = [pattern[layer % len(pattern)] for layer in range(layers)] if pattern else [plain]
        every = marks.index(1 - plain) + 1 if 1 - plain in marks else 0
        frequent = (
            bool(every) and layers % every == 0 and marks == ([plain] * (every - 1) + [1 - plain]) * (layers // every)
        )
        values[name] = None if not every else str(every) if frequent else str(marks).replace(" ", "")
    return values


def parse_window(text: str | None) -> int | None:
    """Tokens before its own that a token sees, from `--window-size`, such as 511,0; None: all."""
    if text is None:
        return None
    try:
        left, right = (int(part) for part in text.strip().removeprefix("(").removesuffix(")").split(","))
    except ValueError:
        left, right = -2, 0
    if not -1 <= left <= MOST_TOKENS:
        raise UserError(
            f"--window-size {text} is not LEFT,0, where a token sees LEFT tokens before its own and LEFT is at most "
            f"{MOST_TOKENS}, such as 511,0."
        )
    if right != 0:
        raise UserError(f"--window-size {text} must be LEFT,0: attention is causal, and sees no token after its own.")
    return None if left == -1 else left


def parse_frequency(flag: str, text: str | None, layers: int | None = None) -> Frequency | None:
    """A whole number N, or a list of 1 and 0 in Python's words, such as ([1]*3+[0])*2. Raises UserError."""
    if text is None:
        return None
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = 0
    numbers = isinstance(value, tuple) and value and set(value) <= {0, 1}
    if not numbers and (not isinstance(value, int) or not 1 <= value <= MOST_LAYERS):
        raise UserError(
            f"{flag} {text} is neither a whole number from 1 to {MOST_LAYERS} nor a list of 1 and 0, such as "
            "([1]*3+[0])*2."
        )
    if isinstance(value, tuple) and layers not in (None, len(value)):
        raise UserError(f"{flag} {text} is a list for {len(value)} layers, but --num-layers is {layers}.")
    return value


def _value(node: ast.expr) -> Frequency:
    """Of an expression of whole numbers, lists, + and *. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return tuple(_number(_value(each)) for each in node.elts)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Mult):
            if isinstance(left, tuple):
                left, right = right, left
            count = _number(left)
            if not isinstance(right, int) and count >= 0 and count * len(right) <= MOST_LAYERS:
                return right * count
        if isinstance(node.op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
            return (*left, *right)
    raise ValueError("no list of numbers")


def _number(value: Frequency) -> int:
    if not isinstance(value, int):
        raise ValueError("a list where a number is")
    return value
