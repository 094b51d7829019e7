"""What config.json may say: any other value of a key that is read is refused, with the file, the key and the value."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.huggingface import config as reader
from helixpipe.costs.huggingface.config import arguments_of
from helixpipe.costs.huggingface.keys import MODEL, ROPE, Kind
from megatron.pretrain.huggingface.folder import Folder
from tests.huggingface.test_folder import CONFIG, make

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NEVER: list[Any] = [math.nan, math.inf, -math.inf, -1, -2.5, 10**40, 1e300, [1], [], {"a": 1}]
"""No key that is read may have one of these, but for objects where an object is meant."""
NO_NUMBERS: list[Any] = [True, False, "4", "", "wide"]


def refused(key: str, value: Any, within: str | None = None) -> str:
    rope = {**LLAMA3, key: value}
    changed = {**CONFIG, key: value} if within is None else {**CONFIG, within: rope}
    with pytest.raises(CheckpointError) as caught:
        arguments_of(changed, "folder/config.json")
    said = str(caught.value)
    assert said.startswith(f"folder/config.json: {within + '.' if within else ''}{key} must be "), said
    assert said.endswith(".") and "\n" not in said and len(said) < 250
    return said


def wrong(kind: Kind) -> list[Any]:
    """Return what a key of that kind may not say."""
    own = {bool, str, dict, list}.intersection(kind.types)
    return [each for each in [*NEVER, *NO_NUMBERS] if type(each) not in own]


@pytest.mark.parametrize("key", [key for key in MODEL if key != "model_type"])
def test_a_key_of_the_model(key: str) -> None:
    for value in wrong(MODEL[key]):
        assert refused(key, value).startswith(f"folder/config.json: {key} must be {MODEL[key].valid}, not ")


@pytest.mark.parametrize("within", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ROPE)
def test_a_key_of_the_rotary_embeddings(within: str, key: str) -> None:
    for value in wrong(ROPE[key]):
        refused(key, value, within)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, kind in MODEL.items() if kind.types == (int,) for value in (4.0, 4.5)]
)
def test_sizes_are_whole(key: str, value: float) -> None:
    assert f", not {value}." in refused(key, value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 4.5}, "num_hidden_layers must be a whole number from 1 to 100000, not 4.5."),
        (
            {"rope_scaling": {**LLAMA3, "factor": -2}},
            "rope_scaling.factor must be a number from 1 to 1000000, not -2.",
        ),
        ({"rope_theta": math.nan}, "rope_theta must be a whole number from 1 to 10000000000000, not NaN."),
        ({"rope_theta": 10000.5}, "rope_theta must be a whole number from 1 to 10000000000000, not 10000.5."),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads 4, not 3."),
        ({"hidden_size": 10}, "num_attention_heads must be a divisor of hidden_size 10, as there is no head_dim, not"),
        ({"hidden_size": 12}, "hidden_size must be such that heads have an even number of channels, not 3, not 12."),
        ({"head_dim": 5}, "head_dim must be such that heads have an even number of channels, not 5, not 5."),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number from 1 to 10000000, not 0."),
        ({"vocab_size": 10**4000}, "vocab_size must be a whole number from 1 to 1000000000, not 1000"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4}},
            "rope_scaling.low_freq_factor must be below its high_freq_factor 4.0, not 4.",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 128}},
            "original_max_position_embeddings must be at most max_position_embeddings 64, as there is no factor, not",
        ),
        ({"model_type": ["llama"]}, "holds a model of type ['llama']; those read are llama"),
        ({"hidden_size": None}, "has no 'hidden_size'."),
    ],
)
def test_in_words(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    """As it stands in the file, which json may read as something else."""
    make(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(CheckpointError) as caught:
        Folder(tmp_path / "model")
    assert str(caught.value).startswith(str(tmp_path / "model" / "config.json")) and says in str(caught.value)


@given(
    values=st.dictionaries(
        st.sampled_from(sorted(MODEL)),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2),
    ),
    rope=st.dictionaries(
        st.sampled_from(sorted(ROPE)),
        st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.sampled_from(["yarn", "linear", "llama3"]),
    ),
)
def test_anything_is_a_model_or_one_sentence(values: dict[str, Any], rope: dict[str, Any]) -> None:
    try:
        arguments = arguments_of({**CONFIG, "rope_scaling": rope, **values}, "folder/config.json")
    except CheckpointError as error:
        said = str(error)
        assert said.startswith("folder/config.json") and said.endswith(".") and "\n" not in said
        return
    assert all(math.isfinite(value) for value in arguments.values() if isinstance(value, float))
    assert arguments["num_attention_heads"] * arguments["kv_channels"] > 0


def test_every_key_that_is_read_has_its_kind() -> None:
    """Whatever the reader asks of a configuration by name, as `config[...]` and `.get(...)` stand in its source."""
    read = set()
    for function in ast.walk(ast.parse(Path(reader.__file__).read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef) or function.name not in (
            *("arguments_of", "_refuse", "_rope_of", "_yarn_of"),
        ):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in ("config", "rope"):
                read.add(getattr(node.slice, "value", None))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
                read.add(getattr(node.args[0], "value", None))
    assert len(read) > 25
    assert read - MODEL.keys() - ROPE.keys() == {"quantization_config"}  # refused whatever it is
