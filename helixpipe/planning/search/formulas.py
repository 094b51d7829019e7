"""The catalogue's formulas for bubble and memory as numbers, for estimates that say what to try first.

    value("(p-1)(F+B)/k", {"p": 4, "F": 1, "B": 2, "k": 3}) == 3

A product needs no sign, `max` and `min` have brackets, and what follows a comma outside of brackets is left out, as is
"at most". A formula in words has no value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_TOKEN = re.compile(r"\s*(max|min|\d+|[A-Za-z]|[-+/*(),])")


def value(formula: str, names: Mapping[str, float]) -> float | None:
    """Return the value of a formula; None for words and for names that are not given."""
    tokens, text, place = [], formula.removeprefix("at most ").strip(), 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            return None
        tokens.append(token[1])
        place = token.end()
    parser = _Parser(tokens, names)
    try:
        result = parser.total()
    except (KeyError, IndexError, ZeroDivisionError):
        return None
    return result if parser.next in ("", ",") else None


class _Parser:
    """Recursive descent: a sum of products of factors."""

    def __init__(self, tokens: list[str], names: Mapping[str, float]):
        self.tokens, self.names, self.place = tokens, names, 0

    @property
    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1]

    def total(self) -> float:
        result = self.product()
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            result += sign * self.product()
        return result

    def product(self) -> float:
        result = self.factor()
        while self.next not in ("", "+", "-", ")", ","):
            if self.next == "/":
                self.take()
                result /= self.factor()
            else:
                if self.next == "*":
                    self.take()
                result *= self.factor()
        return result

    def factor(self) -> float:
        token = self.take()
        if token in ("max", "min"):
            self.take()  # the bracket
            values = [self.total()]
            while self.take() == ",":
                values.append(self.total())
            return max(values) if token == "max" else min(values)
        if token == "(":
            result = self.total()
            self.take()
            return result
        return float(token) if token.isdigit() else self.names[token]
