"""Flags of others: Megatron-LM's that this project does not have, and other names of those it has.

Megatron-LM's are in megatron_flags.toml. READ_AS: a flag with its value -> what says the same here. IGNORED: flag ->
why nothing is lost. REFUSED: flag, or flag and value -> what this project does not do. NEUTRAL: values at which a
refused flag asks for nothing. IGNORED_FAMILIES, REFUSED_FAMILIES: the same for every flag that begins so. MODULES: flag
-> its modules that have another name here (`names`), and the reason (`why`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "--checkpoint-without-attn": "--recompute-granularity without-attention --no-recompute-early",
        "--enable-vocab-parallel": "--pipeline-vocab-parallel auto",
    }
)
"""Flags of papers' own code, besides those of the catalogue's entries -> the words that say the same here. They are of
HelixPipe's authors and of those of Vocabulary Parallelism; those of Seq1F1B's are the flags' own names here."""


class Reading(NamedTuple):
    """The meaning of a Megatron-LM flag here. words: flags with their values; why: a clause for the warning."""

    words: tuple[str, ...]
    why: str


class Reasons(NamedTuple):
    """The reason for each flag, and for each beginning of flags."""

    flags: Mapping[str, str]
    families: Mapping[str, str]


def _reasons(table: Mapping[str, list[str]]) -> Reasons:
    by_flag = {flag: reason for reason, flags in table.items() for flag in flags}
    families = {flag[:-1]: reason for flag, reason in by_flag.items() if flag.endswith("*")}
    flags = {flag: reason for flag, reason in by_flag.items() if not flag.endswith("*")}
    return Reasons(MappingProxyType(flags), MappingProxyType(families))


_FILE = resources.files("megatron.pretrain.config") / "megatron_flags.toml"
_TABLES = tomllib.loads(_FILE.read_text(encoding="utf-8"))

REFUSED, REFUSED_FAMILIES = _reasons(_TABLES["refused"])
IGNORED, IGNORED_FAMILIES = _reasons(_TABLES["ignored"])

NEUTRAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {flag: tuple(values) for flag, values in _TABLES["neutral"].items()}
)

MODULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(_TABLES["modules"])

READ_AS: Mapping[tuple[str, ...], Reading] = MappingProxyType(
    {
        tuple(flag.split()): Reading(tuple(each["as"].split()), each["why"])
        for each in _TABLES["understood"]
        for flag in each["flags"]
    }
)
"""The flag on the right still counts where it is given itself."""
