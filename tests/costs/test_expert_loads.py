"""Loads of experts from a law and from files, and what they come to between ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.costs.expert_loads import ExpertLoads, parse_loads
from helixpipe.costs.models import MODELS
from megatron.pretrain.log.log import loads_line

MIXTRAL = MODELS["mixtral-8x7b"]


@given(
    layer=st.lists(st.integers(0, 1000), min_size=8, max_size=8).filter(any),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_the_busiest_rank_has_between_the_mean_and_all(layer: list[int], ranks: int) -> None:
    load = ExpertLoads((tuple(map(float, layer)),)).busiest(8, 1, ranks)
    assert 1 - 1e-12 <= load <= ranks + 1e-12
    own = [sum(layer[rank * 8 // ranks : (rank + 1) * 8 // ranks]) for rank in range(ranks)]
    assert load == pytest.approx(max(own) * ranks / sum(layer))


def test_a_law_is_less_uneven_over_fewer_ranks() -> None:
    """Exponent 1 over 8 experts: 1, 1/2, ... 1/8; over two ranks the odd ones against the even ones."""
    every = sum(1 / number for number in range(1, 9))
    law = parse_loads("zipf:1")
    assert law.busiest(8, 2, 8) == pytest.approx(8 / every)
    assert law.busiest(8, 2, 2) == pytest.approx(2 * (1 + 1 / 3 + 1 / 5 + 1 / 7) / every)
    assert law.busiest(8, 2, 1) == parse_loads("zipf:0").busiest(8, 2, 8) == 1


def test_loads_of_a_run_and_of_a_profile(tmp_path: Path) -> None:
    """Of each layer the last that a run's log has; on average over layers."""
    lines = [loads_line(2, [9, 9, 9, 9]), loads_line(2, [30, 10, 10, 10]), loads_line(10, [10, 10, 0, 20])]
    (tmp_path / "run.log").write_text("before\n" + "\n".join(lines) + "\nafter\n")
    (tmp_path / "profile.json").write_text(json.dumps({"expert_loads": [[30, 10, 10, 10], [10, 10, 0, 20]]}))
    for name in ("run.log", "profile.json"):
        loads = parse_loads(str(tmp_path / name))
        assert loads.layers == ((30, 10, 10, 10), (10, 10, 0, 20))
        assert loads.busiest(4, 1, 4) == pytest.approx((2 + 2) / 2)
        assert loads.busiest(4, 1, 2) == pytest.approx((4 / 3 + 1) / 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zipf:", "an exponent from 0 to 10, such as zipf:1"),
        ("zipf:-1", "an exponent from 0 to 10"),
        ("zipf:nan", "an exponent from 0 to 10"),
        ("nowhere", "cannot read nowhere: No such file or directory; give a file, or zipf:S"),
        ("{path}/empty", "holds no loads of experts"),
        ("{path}/negative", "holds no loads of experts"),
        ("{path}/nothing", "holds no loads of experts"),
        ("{path}/huge", "holds no loads of experts"),
    ],
)
def test_mistakes_are_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("nothing of it")
    (tmp_path / "negative").write_text(json.dumps({"expert_loads": [[-1, 2]]}))
    (tmp_path / "huge").write_text(json.dumps({"expert_loads": [[10**400, 1]]}))
    (tmp_path / "nothing").write_text(json.dumps({"expert_loads": [[0, 0]]}))
    with pytest.raises(UserError) as error:
        parse_loads(text.format(path=tmp_path))
    assert str(error.value).startswith("--moe-load") and words in str(error.value)


def test_loads_are_of_a_model_with_as_many_experts() -> None:
    with pytest.raises(UserError, match="has none; leave it out"):
        parse_loads("zipf:1").check(MODELS["llama3-8b"], "zipf:1")
    with pytest.raises(UserError, match="has loads of 4 experts a layer, and mixtral-8x7b has 8"):
        ExpertLoads(((1.0, 1.0, 1.0, 1.0),)).check(MIXTRAL, "x.json")
