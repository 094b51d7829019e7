"""How unevenly experts are used: how many tokens the busiest of the ranks that share them out gets, of the mean.

Within a rank it does not matter to its products which of its experts a token goes to; between ranks all wait for the
one that has most, in every layer and exchange.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.json_values import parse_json
from helixpipe.costs.models import ModelShape

FLAG = "--moe-load"
ALIKE = "zipf:0"
MOST_EXPONENT = 10.0

_OF_LAYER = re.compile(r"> layer +(\d+) \| .*tokens: ([\d ]+) \|")
"""A line of training with `--moe-per-layer-logging`."""


@dataclass(frozen=True)
class ExpertLoads:
    """What experts get of a layer's tokens. layers: of each layer with experts that was measured, the tokens of each
    expert, in their order. exponent: without layers, the k-th most used expert gets a share proportional to
    k^-exponent, and the most used ones are on different ranks; 0: all get the same."""

    layers: tuple[tuple[float, ...], ...] = ()
    exponent: float = 0.0

    def busiest(self, experts: int, chosen: int, ranks: int) -> float:
        """Return the tokens of the busiest of so many ranks over the mean, on average over the layers. chosen: experts
        that each token takes."""
        return _mean(max(layer) for layer in self._over_ranks(experts, chosen, ranks))

    def share(self, experts: int, chosen: int, ranks: int, rank: int) -> float:
        """Return the same of one of the ranks."""
        return _mean(layer[rank] for layer in self._over_ranks(experts, chosen, ranks))

    def of_layers(self, experts: int, chosen: int, ranks: int) -> list[list[float]]:
        """Return the share of the tokens that each expert gets, in the layers that were measured, or in any where none
        were. ranks: that share the experts out."""
        shares = [number**-self.exponent for number in range(1, experts + 1)]
        drawn = [share for rank in range(ranks) for share in shares[rank::ranks]]
        return [_shares(layer, chosen) for layer in self.layers or (drawn,)]

    def _over_ranks(self, experts: int, chosen: int, ranks: int) -> list[list[float]]:
        if ranks == 1 or not experts or self == ExpertLoads():  # alike
            return [[1.0] * ranks]
        own, scale = experts // ranks, ranks / chosen
        layers = self.of_layers(experts, chosen, ranks)
        return [[scale * sum(layer[own * rank : own * (rank + 1)]) for rank in range(ranks)] for layer in layers]

    def check(self, model: ModelShape, text: str) -> None:
        """Raise UserError where these cannot be the loads of a model. text: the flag's value, for the message."""
        if not model.experts:
            raise UserError(f"{FLAG} {text} is of experts, and {model.name} has none; leave it out.")
        for layer in self.layers:
            if len(layer) != model.experts:
                raise UserError(
                    f"{FLAG} {text} has loads of {len(layer)} experts a layer, and {model.name} has {model.experts}."
                )


def _shares(load: Sequence[float], chosen: int) -> list[float]:
    """Return the share of the tokens that each expert gets: in proportion to its load, but not more than all of them,
    since a token takes experts that differ. What is over goes to the others by theirs, to those without any last."""
    shares, left = [0.0] * len(load), float(chosen)
    used = {expert: each for expert, each in enumerate(load) if each}
    for weights in (used, dict.fromkeys(set(range(len(load))) - set(used), 1.0)):
        while weights and left > 0:
            whole = math.fsum(weights.values())
            full = [expert for expert, weight in weights.items() if weight / whole * left >= 1]
            for expert in full or weights:
                shares[expert] = 1.0 if full else weights[expert] / whole * left
            left = left - len(full) if full else 0.0
            weights = {expert: weight for expert, weight in weights.items() if full and expert not in full}
    return shares


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return math.fsum(every) / len(every)


def parse_loads(text: str) -> ExpertLoads:
    """Return the loads that a flag says: `zipf:S`, or a file, of `helixpipe profile` or with the lines that training
    prints with `--moe-per-layer-logging`, of which the last of each layer counts. Raises UserError."""
    name, _, exponent = text.partition(":")
    if name == "zipf":
        try:
            value = float(exponent)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MOST_EXPONENT:
            raise UserError(
                f"{FLAG} {text}: after zipf: comes an exponent from 0 to {MOST_EXPONENT:g}, such as zipf:1."
            )
        return ExpertLoads(exponent=value)
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"{FLAG}: cannot read {text}: {reason}; give a file, or zipf:S.") from None
    logged = {int(number): tokens for number, tokens in _OF_LAYER.findall(content)}
    layers = _of_profile(content) or tuple(tuple(map(float, logged[number].split())) for number in sorted(logged))
    if not layers or any(not all(0 <= each < math.inf for each in layer) or not sum(layer) > 0 for layer in layers):
        raise UserError(
            f"{FLAG} {text} holds no loads of experts: they are in files of `helixpipe profile` of a model with "
            "experts, and in what training prints with --moe-per-layer-logging."
        )
    return ExpertLoads(layers)


def _of_profile(content: str) -> tuple[tuple[float, ...], ...]:
    try:
        profile: Any = parse_json(content)
        return tuple(tuple(float(tokens) for tokens in layer) for layer in profile["expert_loads"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return ()
