"""Reads the setups of benchmarks/data/*.toml, and files of the same form, into dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.report import FOLDER
from helixpipe.common.errors import UserError
from helixpipe.common.flags import fits, nearest_name
from helixpipe.common.json_values import parse_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def read(path: str | Path, name: str = "") -> Any:
    """The content of a .toml file, or of one of JSON. name: of the flag that the path is of. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return tomllib.loads(text) if Path(path).suffix == ".toml" else parse_json(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}{path} cannot be read: {error}.") from None


def rows(file: str, table: str, cls: type[T]) -> tuple[T, ...]:
    """The rows of one table of a file of the folder, each with what [common] says of all. Raises UserError, which names
    file, row and field."""
    content = read(FOLDER / file)
    if not isinstance(content.get(table), list):
        raise UserError(f"{file} has no table [[{table}]]; it has {', '.join(content)}.")
    found = []
    for number, row in enumerate(content[table], start=1):
        place = f"{file}, {table} {number}"
        whole = {**content.get("common", {}), **row} if isinstance(row, Mapping) else row
        values = checked(place, whole, cls, _refuse)
        for name, value in values.items():
            if not fits(cls, name, value):
                raise UserError(f"{place}: {name} cannot be {value!r}.")
        found.append(cls(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}))
    return tuple(found)


def checked(
    place: str, content: Any, cls: type, foreign: Callable[[str, list[str], list[str]], None]
) -> dict[str, Any]:
    """The object's values by field of the dataclass, without those that are null. foreign: called with the place, names
    that are no fields, and the fields. Raises UserError for what is no object, or lacks a field."""
    if not isinstance(content, Mapping):
        raise UserError(f"{place} must be an object, not {type(content).__name__}.")
    known = {field.name: field for field in fields(cls)}
    if unknown := [name for name in content if name not in known]:
        foreign(place, unknown, list(known))
    told = {name: value for name, value in content.items() if name in known and value is not None}
    for name, field in known.items():
        if field.default is MISSING and field.default_factory is MISSING and name not in told:
            raise UserError(f"{place}: {name!r} is missing.")
    return told


def _refuse(place: str, unknown: list[str], known: list[str]) -> None:
    near = nearest_name(unknown[0], known)
    hint = f"did you mean {near!r}? " if near else ""
    raise UserError(f"{place}: {unknown[0]!r} is no field; {hint}fields are {', '.join(known)}.")
