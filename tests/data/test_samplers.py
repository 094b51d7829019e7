"""Which samples each data-parallel rank reads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from megatron.pretrain.data.samplers import MicrobatchSampler, consumed_valid_samples, samples_needed

KINDS = [("single", False), ("single", True), ("cyclic", False)]


def step(kind: tuple[str, bool], total: int, consumed: int, global_batch: int, micro: int, dp: int) -> list[list[int]]:
    """The samples of one training step, a list a rank."""
    count = global_batch // (micro * dp)
    ranks = []
    for rank in range(dp):
        sampler = MicrobatchSampler(total, consumed, micro, rank, dp, dataloader_type=kind[0], wrap=kind[1])
        ranks.append([sample for batch in itertools.islice(sampler, count) for sample in batch])
    return ranks


@given(st.data())
def test_a_step_holds_the_same_samples_whatever_the_number_of_ranks(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    micro, dp, count = (data.draw(st.integers(1, 4)) for _ in range(3))
    global_batch = micro * dp * count
    consumed = data.draw(st.integers(0, 50))
    total = consumed + global_batch if kind == ("single", False) else data.draw(st.integers(1, 60))
    alone = step(kind, total, consumed, global_batch, 1, 1)[0]
    spread = [sample for rank in step(kind, total, consumed, global_batch, micro, dp) for sample in rank]
    assert len(alone) == global_batch
    assert sorted(spread) == sorted(alone)


@given(st.data())
def test_resuming_and_rampup_do_not_change_the_order(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    micro, dp = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    batches = data.draw(st.lists(st.integers(1, 4).map(lambda n: n * micro * dp), min_size=1, max_size=5))  # rampup
    total = sum(batches) if kind == ("single", False) else data.draw(st.integers(1, 40))
    resumed: list[list[int]] = [[] for _ in range(dp)]
    consumed = 0
    for batch in batches:  # a fresh sampler each step, as after a restart
        for rank, samples in enumerate(step(kind, total, consumed, batch, micro, dp)):
            resumed[rank] += samples
        consumed += batch
    assert resumed == step(kind, total, 0, sum(batches), micro, dp)


def test_ranks_take_slices_of_each_micro_step() -> None:
    """Megatron's order, written out."""
    ranks = [list(MicrobatchSampler(13, 0, 2, rank, 3)) for rank in range(3)]
    assert ranks == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]  # the incomplete last micro-step is dropped


def test_cyclic_epochs_hold_every_sample_once_in_new_orders() -> None:
    stream = [batch[0] for batch in itertools.islice(MicrobatchSampler(20, 0, 1, dataloader_type="cyclic"), 60)]
    epochs = [stream[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_validation_begins_again_at_its_end() -> None:
    sampler = MicrobatchSampler(5, 3, 2, wrap=True)
    assert list(itertools.islice(sampler, 3)) == [[3, 4], [0, 1], [2, 3]]


def test_samples_of_a_run() -> None:
    assert samples_needed(800, 100, 30, 5, 8) == (800, (3 + 1) * 5 * 8, 5 * 8)
    assert consumed_valid_samples(65, 30, 5, 8) == 2 * 5 * 8
    assert consumed_valid_samples(65, 0, 5, 8) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataloader_type": "external"}, "valid are single, cyclic"),
        ({"total_samples": 0}, "without samples"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
        ({"dp_rank": 2, "dp_size": 2}, "must lie in 0 … 1"),
        ({"consumed_samples": -1}, "must not be negative"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        MicrobatchSampler(**{"total_samples": 4, "consumed_samples": 0, "micro_batch_size": 1, **arguments})
