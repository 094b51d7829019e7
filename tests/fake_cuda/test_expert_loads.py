"""Experts that are used unevenly: what each rank sends the others and takes from them, and that it is the same."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.fake_jobs import Job, run
from helixpipe.costs.expert_loads import ExpertLoads
from helixpipe.fake_cuda.experts import rows_to_experts
from helixpipe.fake_cuda.report import RankReport
from helixpipe.fake_cuda.sequences import Calls, GroupCall, differences
from tests.fake_cuda.cases import EXPERTS, LLAMA, job

Load = list[float]


def loads_of(experts: int) -> st.SearchStrategy[Load]:
    """Some of them not used at all."""
    each = st.one_of(st.just(0.0), st.integers(1, 1000).map(float), st.floats(1e-3, 1e3))
    return st.lists(each, min_size=experts, max_size=experts).filter(any)


CASES = st.integers(1, 12).flatmap(lambda experts: st.tuples(loads_of(experts), st.integers(1, experts)))


@given(CASES, st.integers(0, 40), st.integers(1, 8))
@example(([0.0, 0.0, 0.0, 5.0], 2), 7, 3)  # all for one, where each token takes two
@example(([0.0, 1.0, 1.0, 1.0], 1), 7, 4)
@example(([1.0, 0.0], 1), 5, 1)
def test_rows_are_those_of_tokens_that_choose(case: tuple[Load, int], tokens: int, ranks: int) -> None:
    """No token takes an expert twice, each rank's take as many as they should, and experts get what loads say."""
    load, chosen = case
    (shares,) = ExpertLoads((tuple(load),)).of_layers(len(load), chosen, 1)
    rows = rows_to_experts(shares, chosen, tokens, ranks)
    assert rows.min() >= 0 and rows.max() <= tokens
    assert rows.sum(dim=1).tolist() == [tokens * chosen] * ranks
    assert (rows.max(dim=0).values - rows.min(dim=0).values).max() <= 1
    for each, expected in zip(rows.sum(dim=0).tolist(), shares, strict=True):
        assert abs(each - expected * tokens * ranks) < 1 + 1e-6
        assert each == 0 or expected > 0
    within = [(weight, share) for weight, share in zip(load, shares, strict=True) if weight and share < 1]
    for weight, share in within:  # in proportion, but for the full ones
        assert share * within[0][0] == pytest.approx(weight * within[0][1])
    if sum(weight > 0 for weight in load) >= chosen:
        assert all(share == 0 for weight, share in zip(load, shares, strict=True) if not weight)


def exchanged(rows: list[list[int]]) -> list[Calls]:
    """An exchange of these rows, [from, to], with as many columns as ranks."""
    members = tuple(range(len(rows)))
    return [
        Calls(
            rank,
            {"experts": members},
            [
                GroupCall(
                    "experts",
                    "all_to_all_uneven",
                    (sum(own),),
                    "Float",
                    -1,
                    0,
                    1,
                    tuple(own),
                    tuple(each[rank] for each in rows),
                )
            ],
        )
        for rank, own in enumerate(rows)
    ]


@given(CASES, st.integers(1, 40), st.sampled_from([2, 4]), st.data())
def test_exchanges_match_unless_a_rank_sends_another_number(
    case: tuple[Load, int], tokens: int, ranks: int, data: st.DataObject
) -> None:
    load, chosen = case
    load = load * ranks
    (shares,) = ExpertLoads((tuple(load),)).of_layers(len(load), chosen, ranks)
    rows = rows_to_experts(shares, chosen, tokens, ranks).view(ranks, ranks, -1).sum(dim=2).tolist()
    calls = exchanged(rows)
    assert differences(calls) == []
    source, target = data.draw(st.permutations(range(ranks)))[:2]
    (call,) = calls[source].calls
    sent = list(call.sent)
    sent[target] += 1
    calls[source] = Calls(source, calls[source].groups, [call._replace(sent=tuple(sent))])
    (sentence,) = differences(calls)
    assert f"rank {source} sends {sent[target]} elements to rank {target}, which takes {sent[target] - 1}" in sentence


# ------------------------------------------------------------------------------------------------- the training program

ALL_TO_ALL = f"{EXPERTS} --moe-token-dispatcher-type alltoall {LLAMA}"
GATHERED = f"{EXPERTS} --moe-token-dispatcher-type allgather {LLAMA}"
FIRST = 0, 1, 2, 3


def of_load(name: str, flags: str, load: str, p: int, d: int, t: int = 1) -> Job:
    """The first pipeline rank's ranks."""
    flags = f"{flags} --expert-model-parallel-size {d}" + " --sequence-parallel" * (t > 1)
    return job(name, flags, p=p, t=t, d=d, ranks=FIRST[: d * t], load=load)


def rows_sent(report: RankReport) -> list[tuple[int, ...]]:
    """The rows that a rank sends each one in the layers of its first forward, of two: probabilities, which are one to a
    row, travel before tokens, and these come back."""
    exchanges = [call for call in report.calls().calls if call.kind == "all_to_all_uneven"]
    return [call.sent for call in exchanges[:6:3]]


SIZES = {  # flags, pipeline ranks, ranks that share the experts out, and tensor-parallel ones
    "one pipeline rank, two": (ALL_TO_ALL, 1, 2, 1),
    "two of two": (ALL_TO_ALL, 2, 2, 1),
    "one pipeline rank, four": (ALL_TO_ALL, 1, 4, 1),
    "split": (ALL_TO_ALL, 1, 2, 2),
    "gathered": (GATHERED, 1, 2, 1),
}


@pytest.mark.thorough
@given(st.sampled_from(sorted(SIZES)), st.lists(loads_of(4), min_size=2, max_size=2))
@example(
    "one pipeline rank, four", [[0.0, 0.0, 0.0, 5.0], [0.0, 1.0, 2.0, 5.0]]
)  # one that all take; one that none takes
@example("two of two", [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])  # nothing for a rank
@example("gathered", [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
def test_jobs_with_loads(name: str, layers: list[Load]) -> None:
    flags, p, d, t = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        load = Path(folder) / "profile.json"
        load.write_text(json.dumps({"expert_loads": layers}))
        ran = run([of_load(name, flags, str(load), p, d, t)])[name]
    ran.check()
    if flags == ALL_TO_ALL and t == 1:
        for layer, shares in enumerate(ExpertLoads(tuple(map(tuple, layers))).of_layers(4, 2, d)):
            rows = rows_to_experts(shares, 2, 256, d).view(d, d, -1).sum(dim=2).tolist()
            assert [list(rows_sent(report)[layer]) for report in ran.reports] == rows
