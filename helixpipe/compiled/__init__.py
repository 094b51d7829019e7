"""Holds the part that is compiled where there is a compiler: a program's graph, order, streams and memory.

Each file in C++ is the twin of Python code, which explains it and which runs where nothing was compiled. Both do the
same sums in the same order, so their results are equal to the last bit. `lowering.compiled` calls it.
HELIXPIPE_COMPILED=0 in the environment leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any, TypeVar

Made = TypeVar("Made", bound="MadeWhenAsked")

INTERFACE = 8
"""Raised here and in module.cpp with every change of what that offers: a build of older sources is not used."""


def core() -> Any | None:
    """Return the compiled module; None where it was not built, or is to be left out."""
    if os.environ.get("HELIXPIPE_COMPILED") == "0":
        return None
    try:
        module = import_module("helixpipe.compiled._core")
    except ImportError:
        return None
    return module if module.INTERFACE == INTERFACE else None


class MadeWhenAsked:
    """A dataclass whose fields may be made from compiled data, each when it is first asked for.

    compiled: that data; None where the fields were given. It is no part of the value, and is not sent to other
    processes.
    """

    compiled: Any = None

    @classmethod
    def of(cls: type[Made], compiled: Any, **makers: Callable[[], Any]) -> Made:
        """Return a value of compiled data. makers: of every field, the function that makes it."""
        made = cls.__new__(cls)
        made.__dict__.update(compiled=compiled, _makers=makers)
        return made

    def __getattr__(self, name: str) -> Any:
        maker = self.__dict__.get("_makers", {}).get(name)
        if maker is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        value = self.__dict__[name] = maker()
        return value

    def __getstate__(self) -> dict[str, Any]:
        own = fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        return {each.name: getattr(self, each.name) for each in own}
