"""What ranks ask process groups for is compared: each kind of mismatch is found, and none where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.fake_cuda.sequences import Calls, GroupCall, differences

GROUPS = {"pair": (4, 7), "both": (4, 7)}


def call(
    kind: str, size: int = 8, peer: int = -1, group: str = "pair", stream: int = 0, dtype: str = "Float"
) -> GroupCall:
    return GroupCall(group, kind, (size,), dtype, peer, stream, 1)


def ranks(first: list[GroupCall], second: list[GroupCall]) -> list[Calls]:
    return [Calls(4, GROUPS, first), Calls(7, GROUPS, second)]


def told(first: list[GroupCall], second: list[GroupCall]) -> str:
    return " ".join(differences(ranks(first, second)))


SUMS = [call("all_reduce"), call("all_gather", 4), call("broadcast", 2, peer=1)]


def test_equal_sequences_match() -> None:
    sent = [call("send", 3, peer=1), call("recv", 5, peer=1)]
    received = [call("recv", 3, peer=0), call("send", 5, peer=0)]
    assert told(SUMS + sent, SUMS + received) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([SUMS[1], SUMS[0], SUMS[2]], "collective 0"),
        (
            SUMS[:2],
            "collective 2 of group pair (ranks 4, 7) is broadcast of 2 Float with its rank 1 on rank 4 and none",
        ),
        ([call("all_reduce", 9), *SUMS[1:]], "all_reduce of 9 Float on rank 7"),
        ([call("all_reduce", dtype="Half"), *SUMS[1:]], "8 Half"),
        ([*SUMS[:2], call("broadcast", 2, peer=0)], "its rank 0 on rank 7"),
        ([*SUMS[:2], call("broadcast", 2, peer=1, stream=3)], "rank 7 asks group pair for collectives on 2 streams"),
    ],
)
def test_collectives_that_differ(changed: list[GroupCall], words: str) -> None:
    assert words in told(SUMS, changed)


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ([], "not received"),
        ([call("recv", 4, peer=0)], "send of 3 Float with its rank 1 and recv of 4 Float"),
        ([call("recv", 3, peer=0, dtype="Half")], "3 Half"),
        ([call("recv", 3, peer=0), call("recv", 3, peer=0)], "not sent"),
        ([call("recv", 3, peer=0, group="both")], "not received"),
    ],
)
def test_messages_that_differ(received: list[GroupCall], words: str) -> None:
    assert words in told([call("send", 3, peer=1)], received)


def test_messages_to_ranks_that_are_not_there_are_not_compared() -> None:
    groups = {"three": (0, 1, 2)}
    assert (
        differences([Calls(0, groups, [GroupCall("three", "send", (3,), "Float", 1, 0, 1)]), Calls(2, groups, [])])
        == []
    )


def test_uneven_exchanges_may_have_other_sizes() -> None:
    """If each takes what the other sends."""
    first = call("all_to_all_uneven", 3)._replace(sent=(1, 2), received=(1, 4))
    second = call("all_to_all_uneven", 5)._replace(sent=(4, 1), received=(2, 1))
    assert told([first], [second]) == ""
    words = "all_to_all_uneven 0 of group pair: rank 7 sends 4 elements to rank 4, which takes 3."
    assert told([first._replace(received=(1, 3))], [second]) == words


def test_ranks_that_would_wait_for_each_other() -> None:
    first = [call("all_reduce"), call("all_reduce", group="both")]
    assert "ranks would wait for each other" in told(first, first[::-1])
    message = [call("send", 3, peer=1), call("all_reduce")]
    assert "message" in told(message, [call("all_reduce"), call("recv", 3, peer=0)])


def test_what_starts_together_has_no_order_among_itself() -> None:
    def together(calls: list[GroupCall]) -> list[GroupCall]:
        return [call("start"), *calls, call("end")]

    crossed = [call("send", 3, peer=1), call("recv", 3, peer=1)], [call("send", 3, peer=0), call("recv", 3, peer=0)]
    assert "ranks would wait" in told(*crossed)
    assert told(*map(together, crossed)) == ""


def test_groups_of_other_members() -> None:
    one, other = ranks(SUMS, SUMS)
    assert "group pair has the ranks" in " ".join(differences([one, replace(other, groups={"pair": (5, 7)})]))
