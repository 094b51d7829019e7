"""InfiniPipe's baseline without a pipeline: documents shared out over groups of GPUs, and what a step takes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import cast

import pytest

from benchmarks.flexsp import Group, divisions, grouped, groups_of, in_microbatches, planned, shared_out, step


@dataclass(frozen=True)
class Made:
    """A group in round numbers: 100 tokens fit into a GPU, a token takes a second and a document its square beside."""

    size: int
    once: float = 1.0

    @property
    def room(self) -> float:
        return 100.0 * self.size

    def seconds(self, tokens: int) -> float:
        return (tokens + tokens * tokens / 100) / self.size * (1.2 if self.size > 1 else 1.0)


GROUPS = cast("dict[int, Group]", {size: Made(size) for size in (1, 2, 4)})


def test_every_division_of_the_gpus_once() -> None:
    assert sorted(divisions(4, (1, 2, 4))) == [(1, 1, 1, 1), (2, 1, 1), (2, 2), (4,)]
    assert list(divisions(4, (4,))) == [(4,)] and list(divisions(2, (4,))) == []
    assert len(list(divisions(32, (1, 2, 4, 8, 16, 32)))) == 202  # partitions of 32 into powers of two


def test_runs_of_documents_have_about_as_many_tokens() -> None:
    assert in_microbatches([8, 4, 4, 3, 3, 2], 3) == [[8], [4, 4], [3, 3, 2]]
    assert in_microbatches([5, 1], 1) == [[5, 1]]


@pytest.mark.parametrize("seed", range(8))
def test_each_document_has_a_place_with_room_in_the_fastest_division(seed: int) -> None:
    chosen = random.Random(seed)
    lengths = sorted((chosen.randint(1, 150) for _ in range(chosen.randint(1, 8))), reverse=True)
    best = grouped(lengths, 4, GROUPS)
    made = {sizes: shared_out(lengths, sizes, GROUPS, inf) for sizes in divisions(4, (1, 2, 4))}
    fitting = [each for each in made.values() if each is not None]
    assert (best is None) == (not fitting)
    if best is None:
        return
    assert sorted(tokens for own in best.documents for tokens in own) == sorted(lengths) and sum(best.sizes) == 4
    for size, own, seconds in zip(best.sizes, best.documents, best.seconds, strict=True):
        assert sum(own) <= GROUPS[size].room
        assert seconds == pytest.approx(GROUPS[size].once + sum(map(GROUPS[size].seconds, own)))
    assert best.seconds[best.slowest] == max(best.seconds) == min(max(each.seconds) for each in fitting)


def test_long_documents_get_large_groups_and_short_ones_single_gpus() -> None:
    long, short = grouped([350], 4, GROUPS), grouped([20, 20, 20, 20], 4, GROUPS)
    assert long is not None and long.sizes == (4,)
    assert short is not None and short.sizes == (1, 1, 1, 1)
    assert grouped([500], 4, GROUPS) is None


def test_a_groups_estimate_is_what_is_simulated() -> None:
    """But for gathers: a step waits for its first one, and those that it hides slow it down."""
    groups = groups_of("infinipipe-7b", 16, "a800", 1, None)
    assert list(groups) == [1, 2, 4, 8]
    group = groups[4]
    assert group.plan.costs.data_parallel == 2 and group.plan.costs.sharded == 8
    lengths = [12288, 8192, 4096]
    seconds, peak = group.simulated(lengths)
    estimate = group.once + sum(map(group.seconds, lengths))
    assert 1.01 * estimate < seconds < 1.05 * estimate
    assert peak < group.plan.limit


def test_a_step_takes_less_than_all_gpus_together_would() -> None:
    lengths: list[int] = [8192, 4096, *[1024] * 62]
    groups = groups_of("infinipipe-7b", 8, "a800", 1, None)
    made, together = planned(lengths, 8, groups), groups[8]
    assert made is not None and sorted(n for each in made for own in each.documents for n in own) == sorted(lengths)
    apart = sum(each.seconds[each.slowest] for each in made)
    assert apart < together.once + sum(map(together.seconds, lengths))
    found = step("infinipipe-7b", 8, "a800", 1, lengths)
    assert found is not None and found.fits and found.setting.mark == "k" and 0 <= found.bubble < 0.2
    assert found.step == pytest.approx(apart, rel=0.1)
    assert found.tokens == pytest.approx(sum(lengths) / found.step / 8)
