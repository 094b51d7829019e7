"""Values of a JSON file with their places in it, so that what is wrong is told with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from helixpipe.common.errors import ProgramError
from helixpipe.common.json_values import parse_json
from helixpipe.program.file_limits import Parts, read_program_file
from helixpipe.program.stages import HEAD_PART, LAYER_PIECES, PIECE_KINDS, VARIANTS, Piece, layer_pieces
from helixpipe.program.workload import Chunk, Slice

_PIECES = re.compile(
    r"layers? +(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?(?: +\((?P<kinds>[^()]*)\))?(?= |$)|(?P<one>[^ ]+)"
)
_PIECE = re.compile(r"([a-z]+(?:\.[a-z]+)?)(?:\[([0-9]{1,9})(?:/([0-9]{1,9}))?\])?")
_SLICE = re.compile(r"([0-9]{1,9})\[([0-9]{1,12}):([0-9]{1,12})\]")

MAX_LAYERS = 100_000
"""More is a slip of the finger, and would fill the memory before anything could say so."""


def file_content(path: Path) -> Any:
    """Return the value in a JSON file. Raises ProgramError with line and column of what is not JSON."""
    try:
        text = read_program_file(path).decode("utf-8-sig")
        return parse_json(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ProgramError(f"{path.name}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except ProgramError:
        raise
    except ValueError as error:  # not UTF-8, a key twice, a number of thousands of digits
        raise ProgramError(f"cannot read the schedule file {path}: {error}.") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that is there twice, of which json would take the last."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {shown(key)} is twice in one object")
        made[key] = value
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def shown(value: Any) -> str:
    """A value as it is written, cut to one short line."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


class Fields:
    """A value of a JSON file. place: `x.json, stages[2].owner`. All methods raise ProgramError that begins with it.
    parts: what the file has come to so far, shared by all its values."""

    def __init__(self, value: Any, place: str, file: str, parts: Parts | None = None):
        self.value = value
        self.place = place
        self.parts = parts or Parts(file)
        self._file = file

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def __getitem__(self, key: str) -> Fields:
        """The value of a key of an object, which has to be there."""
        if not isinstance(self.value, dict):
            self._refuse("an object")
        if key not in self.value:
            raise ProgramError(f"{self.place}: the key {key} is missing.")
        return Fields(self.value[key], self._inner(key), self._file, self.parts)

    def only(self, known: Sequence[str]) -> None:
        """Refuse keys that are not known."""
        if not isinstance(self.value, dict):
            self._refuse("an object")
        for key in self.value:
            if key not in known:
                import difflib

                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
                raise ProgramError(f"{self.place}: unknown key {shown(key)}; {hint}")

    def each(self) -> Iterator[Fields]:
        """The values of a list."""
        if not isinstance(self.value, list):
            self._refuse("a list")
        for index, value in enumerate(self.value):
            yield Fields(value, f"{self.place}[{index}]", self._file, self.parts)

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value.isprintable():
            self._refuse("text without line breaks")
        return str(self.value)

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            self._refuse("true or false")
        return bool(self.value)

    def whole(self) -> int:
        """A whole number, negative ones included, of at most 15 digits."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or abs(self.value) >= 10**15:
            self._refuse("a whole number of at most 15 digits")
        return int(self.value)

    def number(self) -> float:
        value = self.value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 10**15:
            self._refuse("a number")
        return float(value)

    def pieces(self) -> tuple[Piece, ...]:
        """Pieces: `embed layers 0-3 norm[4] qkv[4]`."""
        made: list[Piece] = []
        for match in _PIECES.finditer(self.text()):
            if match["one"] is not None:
                self.parts.add(1)
                made.append(self._piece(match["one"]))
                continue
            first, last = int(match["first"]), int(match["last"] or match["first"])
            if not first <= last < MAX_LAYERS:
                raise ProgramError(f"{self.place}: {match[0]} must count up, to {MAX_LAYERS - 1} at most.")
            kinds = LAYER_PIECES if match["kinds"] is None else tuple(match["kinds"].split())
            for kind in kinds:
                self._piece(f"{kind}[{first}]")
            self.parts.add((last + 1 - first) * len(kinds))
            made += layer_pieces((kinds,) * (last + 1 - first), first)
        return tuple(made)

    def _piece(self, word: str) -> Piece:
        match = _PIECE.fullmatch(word)
        known = match is not None and match[1] in (*PIECE_KINDS, *VARIANTS) and int(match[2] or 0) < MAX_LAYERS
        if match is None or not known or (match[1] == HEAD_PART) != (match[3] is not None):
            raise ProgramError(
                f"{self.place}: {shown(word)} is no piece; write {', '.join((*PIECE_KINDS, *VARIANTS))}, those of a "
                f"layer with its number, below {MAX_LAYERS}, as in attn[3], whole layers as layer 3 or layers 0-3, and "
                f"the parts of a head as {HEAD_PART}[0/4] to {HEAD_PART}[3/4]."
            )
        if match[3]:
            return Piece(match[1], part=(int(match[2]), int(match[3])))
        return Piece(match[1], int(match[2])) if match[2] else Piece(match[1])

    def slices(self) -> Chunk:
        """A chunk, as slices `0[0:512] 1[0:64]`."""
        parts = []
        words = self.text().split()
        self.parts.add(len(words))
        for word in words:
            match = _SLICE.fullmatch(word)
            if match is None:
                raise ProgramError(
                    f"{self.place}: {shown(word)} is no slice; 3[0:512] is tokens 0 to 511 of document 3."
                )
            document, start, end = map(int, match.groups())
            parts.append(Slice(document, start, end - start))
        return tuple(parts)

    def _inner(self, key: str) -> str:
        return f"{self.place}, {key}" if self.place == self._file else f"{self.place}.{key}"

    def _refuse(self, wanted: str) -> NoReturn:
        raise ProgramError(f"{self.place} must be {wanted}, not {shown(self.value)}.")
