"""A checkpoint is loaded by a model whose layers attend to the windows it was trained with, which no tensor tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint.tensors import check_model
from tests.model.common import make_config, make_options

SAVED = {"window_size": "3,0", "window_attn_skip_freq": "2", "no_rope_freq": "[0,1]"}
"""What a model of the `mixed` style was trained with."""


def model(style: str) -> Any:
    return SimpleNamespace(config=make_config(style), gpt=make_options(style, False))


@pytest.mark.parametrize("saved", [SAVED, {**SAVED, "window_size": (3, 0), "window_attn_skip_freq": [1, 0]}])
def test_the_same_in_other_words_is_loaded(saved: dict[str, Any]) -> None:
    check_model(saved, model("mixed"), Path("here"))
    check_model({}, model("llama"), Path("here"))


@pytest.mark.parametrize(
    ("style", "changes", "sentence"),
    [
        ("llama", {}, "--window-size 3,0, but the flags say -1,0"),
        ("mixed", {"window_size": None, "window_attn_skip_freq": None}, "--window-size -1,0, but the flags say 3,0"),
        ("mixed", {"window_size": "4,0"}, "--window-size 4,0, but the flags say 3,0"),
        ("mixed", {"window_attn_skip_freq": "1"}, "--window-attn-skip-freq and --no-rope-freq 1 and [0,1], but"),
        (
            "mixed",
            {"no_rope_freq": None},
            "--window-attn-skip-freq and --no-rope-freq 2 and None, but the flags say 2",
        ),
        ("mixed", {"window_size": "3,3"}, "a model that is not supported (--window-size 3,3 must be LEFT,0"),
    ],
)
def test_another_one_is_refused(style: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_model({**SAVED, **changes}, model(style), Path("here"))
    assert sentence in str(caught.value) and str(caught.value).endswith(".")
