"""The command that imports and exports Hugging Face folders, on one process without ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from megatron.pretrain.huggingface.folder import INDEX, Folder
from megatron.pretrain.huggingface.safetensors import TensorFile
from tests.checkpoint.damage import small_files
from tests.huggingface.test_folder import CONFIG, make
from tools.checkpoint import main


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, saved, ours = tmp_path / "theirs", tmp_path / "saved", tmp_path / "ours"
    make(theirs, files=3)
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "modeling_llama.py").write_text("raise SystemExit")  # code does not travel
    assert main(["import-hf", str(theirs), "--save", str(saved)]) == 0
    assert f"--load {saved} --use-checkpoint-args" in capsys.readouterr().out
    assert main(["export-hf", "--load", str(saved), str(ours)]) == 0
    names = {path.name for path in theirs.iterdir()} - {"modeling_llama.py"}
    assert {path.name for path in ours.iterdir()} == names | {"generation_config.json"}
    assert all((theirs / name).read_bytes() == (ours / name).read_bytes() for name in names)


def test_files_of_another_size_and_type(tmp_path: Path) -> None:
    tensors = make(tmp_path / "theirs")
    assert main(["import-hf", str(tmp_path / "theirs"), "--save", str(tmp_path / "saved")]) == 0
    for path in (tmp_path / "saved" / "huggingface").iterdir():
        path.unlink()
    (tmp_path / "saved" / "huggingface").rmdir()
    words = ["export-hf", "--load", str(tmp_path / "saved"), str(tmp_path / "ours"), "--dtype", "float32"]
    assert main([*words, "--max-shard-size", "1KB"]) == 0
    ours = Folder(tmp_path / "ours")
    ours.check()
    assert (ours.path / INDEX).is_file() and len(set(ours.places.values())) > 2
    for file in set(ours.places.values()):
        own = TensorFile(ours.path / file)
        assert all(torch.equal(own.read(name), tensors[name].float()) for name in own.entries)
        assert len(own.entries) == 1 or sum(entry.nbytes for entry in own.entries.values()) <= 1000
    assert ours.config["dtype"] == "float32" and ours.config["vocab_size"] == CONFIG["vocab_size"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "theirs")
    theirs, saved, ours = (str(tmp_path / name) for name in ("theirs", "saved", "ours"))
    with small_files(5000):
        assert main(["import-hf", theirs, "--save", saved]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--save {saved}: __0_0.distcp could not be written (File too large); nothing is kept of it." in line
    assert main(["import-hf", theirs, "--save", saved]) == 0
    with small_files((tmp_path / "theirs" / "model.safetensors").stat().st_size - 1):
        assert main(["export-hf", "--load", saved, ours]) == 2
    assert f"cannot write {ours}/model.safetensors: File too large." in capsys.readouterr().err
    assert not (tmp_path / "ours" / "model.safetensors").exists()


def test_what_cannot_be_exported_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "theirs")
    assert main(["import-hf", str(tmp_path / "theirs"), "--save", str(tmp_path / "saved")]) == 0
    for name, kind in (("qwen", "qwen2"), ("damaged", "llama")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "model_type": kind}))
    (tmp_path / "damaged" / INDEX).write_text("{")
    (tmp_path / "file").write_text("")
    common = tmp_path / "saved" / "release" / "common.pt"
    words = ["export-hf", "--load", str(tmp_path / "saved")]
    for rest, said in (
        (["ours", "--like", "qwen"], "is of type llama, by its biases and norms of queries and keys, and cannot be"),
        (["ours", "--like", "damaged"], f"{INDEX} is damaged."),
        (["file/ours"], "file/ours cannot be written: Not a directory."),
    ):
        capsys.readouterr()
        assert main([*words, *(w if w.startswith("--") else str(tmp_path / w) for w in rest)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line and not (tmp_path / "ours").exists()
    (common.parent / "manifest.json").unlink()
    for content, said in ((pickle.dumps({}), "no checkpoint in --load"), (b"garbage", "common.pt is corrupt")):
        common.write_bytes(content)
        assert main([*words, str(tmp_path / "ours")]) == 2
        assert said in capsys.readouterr().err
    torch.save({"iteration": 0}, common)  # it says nothing of a model
    assert main([*words, str(tmp_path / "ours")]) == 2
    assert "the checkpoint's model has normalization None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import-hf", "{}/none", "--save", "{}/saved"], "none is not a folder."),
        (["import-hf", "{}/theirs", "--save", "{}/theirs"], "theirs is not empty"),
        (["import-hf", "{}/theirs", "--save", "{}/theirs/config.json"], "cannot be written: Not a directory."),
        (["import-hf", "{}/theirs"], "--save"),
        (["export-hf", "--load", "{}/none", "{}/ours"], "none holds no checkpoint."),
        (["export-hf", "--load", "{}/none", "{}/ours", "--max-shard-size", "5"], "'5' is no size; give 5GB, say"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    make(tmp_path / "theirs")
    before = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert main([word.format(tmp_path) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint.py: ") and said in line
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == before
