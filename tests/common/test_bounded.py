"""What is remembered does not grow with the run."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.bounded import BoundedDict


@given(st.lists(st.integers(0, 30)), st.integers(1, 9))
def test_it_has_the_last_and_no_more_than_it_may(asked: list[int], most: int) -> None:
    known = BoundedDict[int, int](most)
    for number in asked:
        if number not in known:
            known[number] = number * number
        assert known[number] == number * number and len(known) <= most


def test_it_is_sent_to_another_process_empty() -> None:
    known = BoundedDict[int, int](3)
    known[1] = 2
    sent = pickle.loads(pickle.dumps(known))
    sent.update({})
    sent[1], sent[2], sent[3], sent[4] = 1, 2, 3, 4
    assert dict(sent) == {4: 4} and dict(known) == {1: 2}
