"""Sixteen ranks and more: each goes through its whole stream over NCCL's transport, with the communicators and messages
that its peers expect."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed import run_ranks
from tests.runtime.fake_ranks import TIMEOUT, Played, play

CASES = [("1f1b", 16, 20, 16), ("zbv", 16, 18, 32), ("helix", 16, 32, 16), ("weipipe", 16, 32, 16)]
"""Schedule, ranks, microbatches, layers."""

STREAMS = 32
"""That torch has on a device, of a priority."""


@pytest.fixture(scope="module")
def played() -> dict[str, list[Played]]:
    (results,) = run_ranks(play, 1, CASES, timeout=600.0)
    return {case[0]: result for case, result in zip(CASES, results, strict=True)}


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_every_rank_of_a_large_pipeline(name: str, played: dict[str, list[Played]]) -> None:
    *pipeline, other = played[name]
    check_groups([*pipeline, other], len(pipeline))
    check_communicators(pipeline)
    check_messages(pipeline)
    assert all(rank.left == 0 for rank in pipeline)


def check_groups(everyone: list[Played], size: int) -> None:
    """Every rank of the job makes the groups of all its pipelines, in one order, and destroys its own two."""
    expected = [
        (tuple(range(first, first + size)), TIMEOUT, direction)
        for first in (0, size)
        for direction in ("PIPELINE_UP", "PIPELINE_DOWN")
    ]
    assert all(rank.groups == expected and rank.destroyed == 2 for rank in everyone)


def check_communicators(pipeline: list[Played]) -> None:
    """Two ranks meet in the group of their direction; each meets its peers in the order of all channels; those meet who
    have messages for each other."""
    for rank in pipeline:
        made = [channel for channel, _ in rank.met]
        assert made == sorted(made)
        assert len(made) <= STREAMS
        assert set(made) == {*rank.sent, *rank.received}
        assert all(group == direction(channel) for channel, group in rank.met)
    assert set(Counter(channel for rank in pipeline for channel, _ in rank.met).values()) == {2}


def check_messages(pipeline: list[Played]) -> None:
    """What one end of a channel sends the other receives, in the same order and in the same pieces."""
    channels = {channel for rank in pipeline for channel in rank.sent}
    for source, target in channels:
        sent = pipeline[source].sent[source, target]
        received = pipeline[target].received[source, target]
        assert sent == received
        tensors = [entry for entry in sent if isinstance(entry, tuple)]
        assert tensors and {group for group, _, _ in tensors} == {direction((source, target))}
    assert channels == {channel for rank in pipeline for channel in rank.received}


def direction(channel: tuple[int, int]) -> str:
    source, target = channel
    return "PIPELINE_UP" if source < target else "PIPELINE_DOWN"
