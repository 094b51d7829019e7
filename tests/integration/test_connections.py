"""Sockets and requests to the store at thousands of ranks follow from those of a few."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import connection_ranks, connections
from benchmarks.connections import FITTED, LAYOUTS, Layout, at_scale, differences, fit

GROUPS = {
    "all": ("tp", "pp", "dp"),
    "tensor": ("tp",),
    "pipeline": ("pp",),
    "replicas": ("dp",),
    "model": ("tp", "pp"),
    "alone": (),
}


def made_up(layout: Layout) -> list[dict[str, Any]]:
    """What ranks would count whose groups are `GROUPS`, and the first and last stage's of tied weights."""
    groups = {name: connections.Axes(axes).size(layout) for name, axes in GROUPS.items()}
    if layout.pp > 1:
        groups["tied"] = 2
    start = {"groups": sum(2 * size + 1 for size in groups.values()), "data": 7, "watchdog": 1, "polls": 3}
    sockets = {"store": 3, "served": 0, "others": sum(size - 1 for size in groups.values())}
    quiet: dict[str, Any] = {"steps": {"reports": 2}, "quiet": {"polls": 4}, "seconds": 4.0}
    ranks: list[dict[str, Any]] = [
        {"start": dict(start), "sockets": dict(sockets), "groups": [*groups.items()], **quiet}
        for _ in range(layout.ranks)
    ]
    ranks[0]["start"]["data"] += 3
    ranks[0]["sockets"]["served"] = 3 * layout.ranks
    return ranks


LAWS = fit({layout: made_up(layout) for layout in LAYOUTS if layout.ranks <= FITTED})


def test_the_axes_of_every_group_follow_from_few_ranks() -> None:
    assert {name: axes.names for name, axes in LAWS.groups.items() if name != "tied"} == GROUPS
    assert LAWS.groups["tied"].size(Layout(8, 16, 8)) == 2 and LAWS.data == (7, 3)
    for layout in (*LAYOUTS, Layout(8, 4, 2)):
        assert differences(LAWS, layout, made_up(layout)) == []


@pytest.mark.parametrize(
    "when, kind",
    [("start", "groups"), ("start", "data"), ("start", "watchdog"), ("steps", "data"), ("quiet", "groups")],
)
def test_a_request_more_is_told(when: str, kind: str) -> None:
    ranks = made_up(layout := LAYOUTS[-1])
    ranks[0][when] = {**ranks[0][when], kind: ranks[0][when].get(kind, 0) + 1}
    assert len(differences(LAWS, layout, ranks)) == 1


@pytest.mark.parametrize("kind", ["store", "served", "others"])
def test_a_socket_more_is_told(kind: str) -> None:
    ranks = made_up(layout := LAYOUTS[-1])
    ranks[0]["sockets"][kind] += 1
    assert len(differences(LAWS, layout, ranks)) == 1


def test_at_1024_ranks() -> None:
    found = at_scale(LAWS, Layout(8, 16, 8))
    assert found["process"] == 3 and found["store"] == 3 * 1024
    assert found["gloo"] == {
        "--variable-seq-lengths": 3 + 127 + 7,
        "--in-memory-checkpoint-interval": 3 + 3 + 2,
    }
    assert found["all gloo"] == 3 + 1023 + 7 + 15 + 7 + 127 + 1
    assert found["start"] == 1024 * (6 + 4 + 7 + 1) + 3
    assert found["watchdog"] == 500 and at_scale(LAWS, Layout(2, 2, 2))["watchdog"] == 8


def test_sizes_that_no_axes_give_are_refused() -> None:
    ranks = made_up(layout := Layout(1, 2, 1))
    ranks[0]["groups"].append(("odd", 5))
    with pytest.raises(ValueError, match="odd"):
        fit({layout: ranks})


def test_kinds_of_requests() -> None:
    assert connection_ranks.by_kind(
        {
            "get default_pg/0//watchdog/word": 4,
            "compare_set default_pg/0//watchdog/word": 1,
            "add default_pg/0//all ranks/arrived": 2,
            "set default_pg/0//adapt/report/0.1": 3,
            "wait default_pg/0//7//cpu//0/1": 5,
            "get default_pg/0//7//cpu//0/1": 5,
        }
    ) == {"polls": 4, "watchdog": 1, "data": 2, "reports": 3, "groups": 10}


@pytest.mark.thorough
def test_runs_of_two_and_four_ranks() -> None:
    counted = connections.count((Layout(1, 2, 1), Layout(1, 4, 1)))
    laws = fit(counted)
    assert [differences(laws, layout, ranks) for layout, ranks in counted.items()] == [[], []]
    assert all(connections.polls_a_second(ranks) > 0 for ranks in counted.values())
