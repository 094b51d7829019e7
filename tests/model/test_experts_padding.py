"""Experts' losses, loads and capacity do not depend on padding, and losses of a sample not on how many run at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed import run_ranks
from tests.model import padded

LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=2)
CASES = st.one_of(
    st.tuples(st.just("per sample"), LENGTHS, st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.sampled_from(list(padded.KINDS)), LENGTHS, st.integers(0, 3), st.just(1)),
)


@settings(max_examples=2, deadline=None)
@given(st.lists(CASES, min_size=12, max_size=16))
def test_padding_changes_no_gradient(cases: list[tuple[str, list[int], int, int]]) -> None:
    (found,) = run_ranks(padded.errors, 1, cases)
    for case, (error, name, alike) in zip(cases, found, strict=True):
        assert error < 1e-9 and alike, (case, name)
