"""Files in JSON that somebody else has made, any part of which may be anything: one sentence that names the file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import CheckpointError, DataError, UserError
from helixpipe.costs.huggingface.config import arguments_of, read_config
from helixpipe.costs.profile_costs import Profile
from helixpipe.program.files import load_program
from helixpipe.program.timeline import Timeline
from megatron.pretrain.checkpoint.folder import MANIFEST, MalformedError, _read_manifest
from megatron.pretrain.config.communicators import nccl_settings
from megatron.pretrain.data.conversations import Renderer
from megatron.pretrain.data.options import _per_split
from megatron.pretrain.data.tokenizer_flags import _refuse_code
from megatron.pretrain.huggingface.folder import read_index
from megatron.pretrain.huggingface.safetensors import TensorFile
from schedules import command
from tests.huggingface.test_folder import CONFIG

PINS = Path(__file__).resolve().parents[1] / "pins"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def _config(path: Path) -> None:
    arguments_of(read_config(path.parent), path)


def _tensors(path: Path) -> None:
    header = path.read_bytes()
    binary = path.with_suffix(".safetensors")
    binary.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    TensorFile(binary)


class _Bytes:
    """A tokenizer."""

    vocab_size, eod = 257, 256

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))


def _conversation(path: Path) -> None:
    try:
        Renderer(_Bytes()).encode(path.read_bytes())
    except DataError as error:  # whoever reads the lines names file and line
        raise DataError(f"{path}: {error}") from None


def _manifest(path: Path) -> None:
    try:
        _read_manifest(path.parent)
    except MalformedError as error:
        raise CheckpointError(str(error)) from None


def _sums(timeline: Timeline) -> None:
    assert all(map(isfinite, [timeline.makespan, *timeline.busy(), *timeline.copy_time(), *timeline.sharing_time()]))


TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]

READERS: dict[str, tuple[str, Any, Callable[[Path], Any]]] = {
    "program": ("program.json", None, load_program),
    "profile": ("profile.json", json.loads((PINS / "profile.json").read_text()), Profile.load),
    "timeline": (
        "timeline.json",
        {
            "title": "x",
            "ranks": 1,
            "unit": "s",
            "ops": [[0, "0F0", 0, 1]],
            "transfers": [["activation", [0, 0], "0F0", "0F0", 0, 1], ["offload", [0], "0F0", None, 0, 1]],
            "until": 2,
        },
        lambda path: _sums(Timeline.load(path)),
    ),
    "config": ("config.json", {**CONFIG, "rope_scaling": YARN, "head_dim": 2, "tie_word_embeddings": True}, _config),
    "index": ("index.json", {"weight_map": {"a": "a.safetensors"}}, read_index),
    "tensors": ("header.json", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, _tensors),
    "manifest": (MANIFEST, {"files": {"metadata.json": [1, 2], ".metadata": [1, 2], "common.pt": [1, 2]}}, _manifest),
    "tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoModel": "x"}}, lambda path: _refuse_code("x", path)),
    "split": ("split.json", {"train": ["1", "a"], "valid": ["b"], "test": []}, lambda path: _per_split(str(path))),
    "conversation": (
        "line.jsonl",
        {"messages": TURNS},
        _conversation,
    ),
    "communicators": ("nccl.yaml", {"pp": {"max_ctas": 4, "net_name": "IB"}}, lambda path: nccl_settings(str(path))),
}

ANYTHING = st.sampled_from(
    [None, True, -1, 0, 2.5, 1e300, 10**400, float("inf"), float("nan"), "", "x", "\ud800", [], {}, [[]], [1], {"a": 1}]
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of each value, and of a further one in each object."""
    yield place
    if isinstance(value, dict):
        yield (*place, "odd")
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _places(value[key], (*place, key))


def _changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    made = copy.copy(value)
    made[place[0]] = _changed(value[place[0]], place[1:], new) if place[1:] else new
    return made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("program") / "program.json"
    words = ["simulate", "helix", "-p", "2", "-m", "4", "--save-program", str(path)]
    assert command.main(words) == 0
    return json.loads(path.read_text())


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", READERS)
def test_any_part_of_another_type(name: str, program: Any, tmp_path: Path) -> None:
    file, valid, read = READERS[name]
    valid = program if valid is None else valid
    path = tmp_path / file
    path.write_text(json.dumps(valid))
    read(path)

    @settings(max_examples=150)
    @given(place=st.sampled_from(list(_places(valid))), new=ANYTHING)
    def check(place: tuple[Any, ...], new: Any) -> None:
        path.write_text(json.dumps(_changed(valid, place, new)))
        try:
            read(path)
        except UserError as error:
            sentence = str(error)
            assert "\n" not in sentence and len(sentence) < 1000
            assert tmp_path.name in sentence or file.partition(".")[0] in sentence, sentence

    check()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500])
def test_nested_too_deeply(name: str, text: str, tmp_path: Path) -> None:
    file, _, read = READERS[name]
    path = tmp_path / file
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value) and "Recursion" not in str(caught.value)
