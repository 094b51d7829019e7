"""Lengths of a step's documents: drawn from a histogram or a distribution, or read from a file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges, nearest_name, option
from helixpipe.common.ranges import MOST_MICROBATCHES
from helixpipe.planning.documents.length_data import LENGTHS, Histogram

if TYPE_CHECKING:
    from random import Random

DOCUMENTS = 512
"""The documents of a step if no flag says how many, as in InfiniPipe."""

DRAWS = 1000
"""The draws for each document: if all are too long, the distribution has next to none that are not."""


@dataclass(frozen=True)
class LengthOptions:
    """Options of the lengths of a step's documents; None: not given."""

    lengths: str | None = option(
        None,
        f"Lengths of a step's documents, in tokens: {', '.join(LENGTHS)} (histograms), lognormal:MU,SIGMA[,MOST] of "
        "natural logarithms, or a file with one a line. Long ones are cut, short ones packed, as infinipipe does.",
        metavar="FILE|NAME",
    )
    documents: int | None = option(
        None,
        f"Documents a step, with --lengths (default: {DOCUMENTS}, or a file's if fewer).",
        at_least=1,
        at_most=MOST_MICROBATCHES,
    )
    max_length: int | None = option(
        None, "Documents longer than this are left out, with --lengths (default: none are).", at_least=1
    )
    seed: int | None = option(None, "Of the drawing of lengths (default: 0).")


@dataclass(frozen=True)
class DocumentLengths:
    """The lengths of a step's documents in tokens, as drawn. source: where they are from. left_out: the number of a
    file's documents that are too long.
    """

    lengths: tuple[int, ...]
    source: str
    left_out: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def documents_of(options: LengthOptions) -> DocumentLengths | None:
    """Return the lengths that the flags give, the same on every machine; None without --lengths.

    Raises UserError for a flag without --lengths, an unknown name, a file that cannot be read or has no length, and if
    no document is short enough.
    """
    if options.lengths is None:
        for name in ("documents", "max_length", "seed"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} needs --lengths, which says how long documents are.")
        return None
    check_ranges(options)
    from random import Random

    draws = Random(options.seed or 0)
    name = options.lengths
    if name in LENGTHS:
        return _drawn(_of_histogram(LENGTHS[name], draws), options)
    if name.startswith("lognormal:"):
        return _drawn(_of_lognormal(name, draws), options)
    return _of_file(name, options, draws)


def _drawn(draw: Callable[[], int], options: LengthOptions) -> DocumentLengths:
    """Draw as many lengths as the options ask for, each until it is short enough."""
    most = options.max_length or math.inf
    lengths: list[int] = []
    for _ in range(options.documents or DOCUMENTS):
        length = next((length for length in (draw() for _ in range(DRAWS)) if length <= most), None)
        if length is None:
            raise UserError(
                f"--max-length {options.max_length} leaves next to no document of --lengths {options.lengths}."
            )
        lengths.append(length)
    return DocumentLengths(tuple(lengths), str(options.lengths))


def _of_histogram(histogram: Histogram, draws: Random) -> Callable[[], int]:
    ends = tuple(accumulate(histogram.shares))

    def draw() -> int:
        number = min(bisect_right(ends, draws.random() * ends[-1]), len(ends) - 1)
        low, high = histogram.edges[number : number + 2]
        return min(int(low * (high / low) ** draws.random()), high - 1)

    return draw


def _of_lognormal(name: str, draws: Random) -> Callable[[], int]:
    form = "lognormal:MU,SIGMA or lognormal:MU,SIGMA,MOST with sigma and most above 0, such as lognormal:6.5,1.8"
    try:
        mu, sigma, *rest = (float(part) for part in name.partition(":")[2].split(","))
    except ValueError:
        raise UserError(f"--lengths {name} must be {form}.") from None
    most = rest[0] if rest else 1e9
    if len(rest) > 1 or not all(map(math.isfinite, (mu, sigma, most))) or sigma <= 0 or most < 1 or abs(mu) > 20:
        raise UserError(f"--lengths {name} must be {form}.")

    def draw() -> int:
        for _ in range(DRAWS):
            length = math.exp(min(draws.gauss(mu, sigma), 50.0))
            if length <= most:
                return max(int(length), 1)
        raise UserError(f"--lengths {name} leaves next to no document of at most {most:g} tokens.")

    return draw


def _of_file(name: str, options: LengthOptions, draws: Random) -> DocumentLengths:
    """Return a sample of the file's lengths, in its order; all of it if that many are asked for."""
    try:
        lines = Path(name).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        near = nearest_name(name, LENGTHS)
        hint = f"did you mean {near}?" if near else f"histograms are {', '.join(LENGTHS)}."
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"--lengths {name} is no name of a histogram, and cannot be read ({reason}); {hint}") from None
    for line, text in enumerate(lines, start=1):
        if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text)):
            raise UserError(
                f"{name}, number {line}: {text[:40]!r} is no length; each is a whole number of tokens, 1 or more."
            )
    lengths = [int(text) for text in lines]
    short = [length for length in lengths if length <= (options.max_length or math.inf)]
    count = options.documents or min(DOCUMENTS, len(short))
    if not short or len(short) < count:
        raise UserError(
            f"{name} has {len(short)} documents"
            f"{'' if options.max_length is None else f' of at most {options.max_length} tokens'}, fewer than "
            f"{'one' if not short else f'--documents {count}'}."
        )
    chosen = sorted(draws.sample(range(len(short)), count))
    return DocumentLengths(tuple(short[number] for number in chosen), name, len(lengths) - len(short))
