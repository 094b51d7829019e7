"""The plain values of a checkpoint, once they are known to be of the types that loading takes them for.

Anybody may have written the file. What is wrong in all of it makes the checkpoint unusable, as damage does; what is
wrong in the optimizer's part alone is said with the flag that leaves that out.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from helixpipe.common.errors import CheckpointError, UserError
from megatron.pretrain.checkpoint.folder import MalformedError

COUNTS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""The entries of `args` that count how far training had come."""

INDEX_SAMPLES = "index_samples"
"""The entry of `args` with the samples for which the order of the data was made."""


def _triples(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and len(each) == 3 and all(map(_whole, each)) for each in value
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_ENTRIES: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "args": ("a namespace", lambda value: isinstance(value, Namespace)),
        "iteration": ("a whole number", _whole),
        "num_floating_point_operations_so_far": ("a number", lambda value: value is None or _number(value)),
        "optimizer": ("a dictionary", lambda value: isinstance(value, dict)),
        "opt_param_scheduler": ("a dictionary", lambda value: isinstance(value, dict)),
    }
)
"""Name -> what is there in words, and whether a value is that."""


_BELOW = MappingProxyType({"betas": 1.0, "momentum": 1.0, "eps": math.inf, "weight_decay": math.inf})
"""Exclusive upper limits of the values in an optimizer's groups; the lower limit is 0."""


_SWITCHES = frozenset({"amsgrad", "capturable", "differentiable", "maximize"})
"""Entries of an optimizer's groups that decide what it computes, and with which state."""


def checked(common: Any) -> dict[str, Any]:
    """Return the values unchanged. Raises MalformedError, which names the first invalid entry."""
    if not isinstance(common, dict):
        raise MalformedError(f"its plain values (common.pt) are {_named(common)}, not a dictionary")
    for name, (words, fits) in _ENTRIES.items():
        if name in common and not fits(common[name]):
            raise MalformedError(f"its plain values (common.pt) have {_named(common[name])} as {name}, not {words}")
    arguments = vars(common.get("args", Namespace()))
    for name, value in arguments.items():
        if name in COUNTS and value is not None and not _whole(value):
            raise MalformedError(
                f"its plain values (common.pt) have {_named(value)} as args.{name}, not a whole number"
            )
        if name == INDEX_SAMPLES and not _triples(value):
            raise MalformedError(
                f"its plain values (common.pt) have {_named(value)} as args.{name}, not lists of three whole numbers"
            )
        if isinstance(value, Tensor):
            raise MalformedError(f"its plain values (common.pt) have a tensor as args.{name}")
    return common


@contextmanager
def part(what: str, flag: str, folder: Path) -> Iterator[None]:
    """Raise CheckpointError for any error in a part of a checkpoint. flag: the flag that loads all but this part."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # values of other types may fail anywhere
        raise CheckpointError(
            f"{folder} holds {what} that cannot be read ({type(error).__name__}: {str(error).strip()[:100]!r}); pass "
            f"{flag} to load the rest."
        ) from error


def check_groups(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    """Check the groups of an optimizer after they were loaded. Raises TypeError for another kind of value, ValueError
    for one that no optimizer can compute with.
    """
    for old, new in zip(before, after, strict=True):
        for name, value in new.items():
            if name in old and name != "params" and not _may_replace(name, old[name], value):
                raise TypeError(f"{name} of a group is {_named(value)}, not {_named(old[name])}")
            below = _BELOW.get(name)
            values = value if isinstance(value, (tuple, list)) else (value,)
            if below is not None and value is not None and not all(0 <= each < below for each in values):
                raise ValueError(f"{name} of a group is {_named(value)}, outside of 0 to {below:g}")


def _may_replace(name: str, old: Any, new: Any) -> bool:
    """Whether the optimizer can compute with another value in the place of its own."""
    before, after = _kind(old), _kind(new)
    if after == "none":
        return name not in _BELOW or old is None
    if before == "none":
        return after in ("number", "switch")
    return before == after and (name not in _SWITCHES or new == old)


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} " + " ".join(sorted({_kind(each) for each in value}))
    if isinstance(value, bool):
        return "switch"
    if isinstance(value, int) and value.bit_length() > 63:
        return "number of more bits than a tensor's"
    return "number" if _number(value) or (isinstance(value, Tensor) and value.numel() == 1) else type(value).__name__


def _named(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
