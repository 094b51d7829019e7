"""Cases of test_equality.py once more, with activations that leave the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.runtime.case import Case

EVERY = 9
"""Of a group's cases one in so many; and of those left out, the first of each kind, and some with late messages."""


def offloading(groups: Mapping[str, list[Case]]) -> list[Case]:
    """A spread of the cases, each with a seed of its own."""
    chosen = [case for group in groups.values() for case in group[2::EVERY]]
    kinds = {_kind(case) for case in chosen}
    for case in (case for group in groups.values() for case in group if case.pp > 1):
        if _kind(case) not in kinds:
            kinds.add(_kind(case))
            chosen.append(case)
    chosen += [case for case in groups["chimera"] + groups["hanayo"] if case.late]
    return [replace(case, offload=seed) for seed, case in enumerate(dict.fromkeys(chosen))]


def _kind(case: Case) -> tuple[object, ...]:
    """Return what a case may be the only one of: its schedule and what helix ships, or how it recomputes; with whole
    sequences or chunks, tensor-parallel or not."""
    schedule = f"{case.schedule} {case.ship}" if not case.recompute.granularity else ""
    chunks = bool(case.lengths)
    return schedule, case.recompute, chunks, chunks and case.tp > 1, chunks and case.mlp_chunk > 0
