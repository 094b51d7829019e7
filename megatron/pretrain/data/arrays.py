"""megatron-core's indices are files of numbers; what else may be in such a file is not loaded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from helixpipe.common.errors import DataError


@contextmanager
def numbers_only() -> Iterator[None]:
    """Keep numpy from loading pickled objects in the context. megatron-core asks for them, and they could run code of
    anyone who can write into the folder of indices. Raises DataError, which names the file.
    """
    load = numpy.load

    @functools.wraps(load)
    def loaded(file: Any, *args: Any, **named: Any) -> Any:
        try:
            return load(file, *args, **{**named, "allow_pickle": False})
        except ValueError:
            raise DataError(
                f"the data index {file} is not a file of numbers: somebody else wrote it, or it is damaged; remove its "
                "folder, and it is made anew."
            ) from None

    numpy.load = loaded
    try:
        yield
    finally:
        numpy.load = load
