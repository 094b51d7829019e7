"""`--model FOLDER`: published config.json files give the presets' shapes, and every command takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helixpipe.costs.huggingface.shape import folder_shape, names_a_folder
from helixpipe.costs.models import find_model
from schedules import command

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN3_8B = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "vocab_size": 32000,
}
LITE = {
    **LLAMA,
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("preset", "config"),
    [("llama3-8b", LLAMA), ("qwen3-8b", QWEN3_8B), ("mixtral-8x7b", MIXTRAL), ("deepseek-v2-lite", LITE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_configurations_are_the_presets(tmp_path: Path, preset: str, config: dict[str, Any]) -> None:
    folder = written(tmp_path / "mine", config)
    expected, shape = find_model(preset), folder_shape(str(folder))
    assert shape.kinds_of(shape.layers) == expected.kinds_of(shape.layers)
    assert (shape.name, shape.seq_length) == ("mine", config["max_position_embeddings"])
    same = {"name": "", "seq_length": 1, "mixed": (), "groups": 1 if shape.kv_rank else shape.groups}
    same |= {"head_channels": 0} if shape.channels == expected.channels else {}
    same |= {"ffn": 0} if all(expected.mixed) and expected.experts else {}
    assert replace(shape, **same) == replace(expected, **same)
    assert folder_shape(str(folder / "config.json")) == shape


def test_a_window_of_all_layers(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    assert folder_shape(str(written(tmp_path / "mine", config))).window == 4096


def test_commands_take_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written(tmp_path / "mine", LLAMA).parent)
    said = []
    for model in ("mine", "mine/config.json", "llama3-8b"):
        for words in ("simulate 1f1b -p 4", "memory 1f1b -p 4 --layers 8"):
            assert command.main([*words.split(), "--model", model, "--hardware", "h100"]) == 0
            said.append(capsys.readouterr().out.replace("llama3-8b", "mine"))
    assert said[:2] == said[2:4] == said[4:]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "--model mine/: mine/config.json cannot be read: No such file or directory."),
        ("{", "--model mine/: mine/config.json is not JSON."),
        (json.dumps({**LLAMA, "model_type": "gpt2"}), "holds a model of type 'gpt2'; those read are llama, "),
        (json.dumps({**LLAMA, "hidden_size": "4096"}), "hidden_size"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    if content is not None:
        (tmp_path / "mine" / "config.json").write_text(content)
    assert command.main(["simulate", "1f1b", "--model", "mine/", "--hardware", "h100"]) == command.USER_ERROR
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("helixpipe: --model mine/: ") and error.count("\n") == 1


def test_presets_come_before_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "llama3-8b", LLAMA)
    assert not names_a_folder("llama3-8b") and names_a_folder("./llama3-8b") and not names_a_folder("llama3-9b")
