"""Files of a Hugging Face folder: written as the safetensors package writes them, refused in a sentence where wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.huggingface.config import arguments_of, config_of
from helixpipe.model.rope_scaling import RopeScaling
from megatron.pretrain.huggingface.folder import INDEX, Folder, looks_like_one
from megatron.pretrain.huggingface.safetensors import TensorFile, write_tensors
from megatron.pretrain.huggingface.weights import Weights

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 10,
    "hidden_act": "silu",
}


def make(folder: Path, files: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """A whole folder of that model, or one that differs, its weights in so many files."""
    folder.mkdir()
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    weights = Weights(arguments_of(config, "here"))
    shapes = {n: s for weight in weights for n, s in zip(weight.names, weight.shapes, strict=True)}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    places = {name: f"part-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return tensors


def test_files_are_those_of_the_package(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        "zz é": torch.randn(2, 3, dtype=torch.float64),
        "c": torch.randn(1, 2).half(),
        "empty": torch.randn(0, 4).bfloat16(),
        "scalar": torch.tensor(1.5),
    }
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    told: list[int] = []
    write_tensors(tmp_path / "ours", shapes, tensors.__getitem__, told.append)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sum(told) == sum(tensor.nbytes for tensor in tensors.values())
    ours, theirs = TensorFile(tmp_path / "theirs"), load_file(tmp_path / "ours")
    assert ours.entries.keys() == theirs.keys() == tensors.keys()
    assert all(torch.equal(ours.read(name), tensor) for name, tensor in tensors.items())


def test_a_file_whose_tensors_lie_anywhere(tmp_path: Path) -> None:
    """Older writers leave the header at any length, so that tensors do not lie at multiples of their size."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode() + b" "
    content = torch.tensor([1.0, -2.0])
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + content.numpy().tobytes())
    assert len(header) % 4 and torch.equal(TensorFile(tmp_path / "odd").read("x"), content)


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def of(begin: int, end: int, size: int = 2, code: str = "F32") -> dict[str, Any]:
    return {"dtype": code, "shape": [size], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(x=of(0, 8), y=of(4, 12)) + bytes(12), "is corrupt, or no safetensors file"),
        (header(x=of(4, 12)) + bytes(12), "is corrupt, or no safetensors file"),
        (header(x=of(0, 8, 3)) + bytes(8), "is corrupt, or no safetensors file"),
        (header(x=of(0, 8, 2**62)) + bytes(8), "is corrupt, or no safetensors file"),
        (header(x=of(0, 8)) + bytes(9), r"has more bytes than its tensors \(\d+ of \d+ bytes\)"),
        (header(x=of(0, 8)) + bytes(7), r"is truncated \(\d+ of \d+ bytes\)"),
        (header(x=of(0, 8, 8, "Q8")) + bytes(8), ": tensors of type Q8 are not read; valid are F64, F32, BF16, F16"),
        (header(x=of(0, 8, 8, "I8")) + bytes(8), ": tensors of type I8 are not read; valid are F64, F32, BF16, F16"),
        ((100_000_001).to_bytes(8, "little"), r"is truncated, or no safetensors file \(8 bytes\)"),
    ],
    ids=["overlap", "hole", "size", "overflow", "more", "less", "unknown type", "type", "long header"],
)
def test_a_damaged_file_is_named_and_told_apart(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}:? ?{words}\\.$"):
        TensorFile(path)


def test_what_cannot_be_opened_is_told_in_the_systems_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none cannot be read: No such file or directory\.$"):
        TensorFile(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"cannot be read: Is a directory\.$"):
        TensorFile(tmp_path)


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    for files in (1, 3):
        tensors = make(tmp_path / str(files), files)
        folder = Folder(tmp_path / str(files))
        folder.check()
        assert looks_like_one(folder.path) and not looks_like_one(tmp_path)
        mixed = next(weight for weight in folder.weights if weight.key.endswith("linear_qkv.weight"))
        whole = folder.read(mixed)
        query, key, value = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
        expected = [query[:4], key[:2], value[:2], query[4:], key[2:], value[2:]]  # two queries of two channels a group
        assert torch.equal(whole, torch.cat(expected))
        assert all(
            torch.equal(a, b) for a, b in zip(folder.weights.split(mixed, whole), (query, key, value), strict=True)
        )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**content, **changes}.items() if v is not None}))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Damage = Callable[[Path], Any]
DAMAGES: dict[str, tuple[int, Damage, str]] = {
    "no config": (1, lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "no json": (1, lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "another family": (
        1,
        lambda f: edit(f / "config.json", model_type="gpt2"),
        "type 'gpt2'; those read are llama, mi",
    ),
    "no hidden size": (1, lambda f: edit(f / "config.json", hidden_size=None), "has no 'hidden_size'"),
    "a word": (1, lambda f: edit(f / "config.json", hidden_size="wide"), "hidden_size must be a whole number"),
    "bias": (1, lambda f: edit(f / "config.json", attention_bias=True), r"not supported \(attention_bias\)"),
    "rope": (1, lambda f: edit(f / "config.json", rope_scaling={"type": "dynamic"}), "of type 'dynamic'; those read"),
    "quantized": (1, lambda f: edit(f / "config.json", quantization_config={}), "quantized weights are not read"),
    "window": (
        1,
        lambda f: edit(
            f / "config.json", model_type="qwen2", sliding_window=8, use_sliding_window=True, layer_types=["chunked"]
        ),
        "has layer_types that are not 2 times full_attention or sliding_attention",
    ),
    "pickle": (1, as_pickle, "pytorch_model.bin, a pickle, which could run code"),
    "no weights": (1, lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "cut off": (1, lambda f: cut(f / "model.safetensors"), r"model.safetensors is truncated \(\d+ of \d+ bytes\)"),
    "empty": (1, lambda f: (f / "model.safetensors").write_bytes(b""), r"or no safetensors file \(0 bytes\)"),
    "garbage": (1, lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(30)), "is corrupt, or no"),
    "long header": (1, lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 30), "truncated, or no safetensors"),
    "a part is missing": (3, lambda f: (f / "part-1.safetensors").unlink(), "not whole: part-1.safetensors is missing"),
    "elsewhere": (3, lambda f: edit(f / INDEX, weight_map={"x": "../x.safetensors"}), "no safetensors file of the fol"),
    "in the index alone": (
        3,
        lambda f: edit(f / INDEX, weight_map=dict.fromkeys(Folder(f).places, "part-0.safetensors")),
        "part-0.safetensors holds no ",
    ),
    "no index": (3, lambda f: (f / INDEX).write_text("[]"), "index.json is damaged"),
    "a tensor is missing": (1, lambda f: rewritten(f, lambda t: t.pop("model.norm.weight")), "no model.norm.weight"),
    "one too many": (1, lambda f: rewritten(f, lambda t: t.update(more=torch.ones(1))), "holds more, which a model"),
    "another shape": (1, lambda f: edit(f / "config.json", vocab_size=12), r"of shape \[10, 8\], but .* \[12, 8\]"),
    "a type": (
        1,
        lambda f: rewritten(f, lambda t: t.update({"model.norm.weight": torch.ones(8, dtype=torch.int8)})),
        "tensors of type I8 are not read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_told_in_a_sentence(tmp_path: Path, damage: str) -> None:
    files, spoil, words = DAMAGES[damage]
    make(tmp_path / "model", files)
    spoil(tmp_path / "model")
    with pytest.raises(CheckpointError, match=words) as caught:
        Folder(tmp_path / "model").check()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".") and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 1e6}, {"rotary_base": 1000000, "use_rope_scaling": False, "position_embedding_type": "rope"}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rotary_seq_len_interpolation_factor": 2.0}),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 5e5},
            {"position_embedding_type": "yarn", "yarn_original_max_position_embeddings": 64, "rotary_base": 500000},
        ),
        (
            {
                "rope_parameters": {
                    "type": "yarn",
                    "factor": 4.0,
                    "mscale": 0.7,
                    "mscale_all_dim": 0.5,
                    "truncate": False,
                }
            },
            {"mscale": 0.7, "mscale_all_dim": 0.5, "yarn_correction_range_round_to_int": False},
        ),
    ],
)
def test_rotary_embeddings_of_either_form(rope: dict[str, Any], expected: dict[str, Any]) -> None:
    found = arguments_of({**CONFIG, **rope}, "here")
    assert {name: found[name] for name in expected} == expected
    again = config_of(found, "bfloat16")
    assert arguments_of(again, "here") == found
    assert (again["architectures"], again["dtype"], again["head_dim"]) == (["LlamaForCausalLM"], "bfloat16", 2)


def test_the_length_of_yarns_vectors_is_what_the_configuration_says() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "rope_theta": 100.0}
    found = arguments_of({**CONFIG, "rope_parameters": rope}, "here")
    made = RopeScaling("yarn", 4.0, mscale=found["mscale"], mscale_all_dim=found["mscale_all_dim"])
    assert made.length == pytest.approx(1.3)
    assert config_of(found, "float32")["rope_parameters"]["attention_factor"] == pytest.approx(1.3)
    assert 0.1 * math.log(4) * found["mscale"] + 1 == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalization": "LayerNorm"}, "has normalization LayerNorm"),
        ({"apply_layernorm_1p": True}, "has apply_layernorm_1p True"),
        ({"attention_output_gate": True}, "has attention_output_gate True"),
        ({"softmax_type": "off-by-one"}, "attention sinks"),
        ({"softmax_type": "learnable"}, "attention sinks"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "deals tokens by sinkhorn"),
        ({"position_embedding_type": "none"}, "no rotary embeddings"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "add_qkv_bias and qk_layernorm, together"),
    ],
)
def test_a_model_of_no_family_is_not_written(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_of({**arguments_of(CONFIG, "here"), **changes}, "float32")
