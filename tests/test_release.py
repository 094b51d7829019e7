"""A release says one version everywhere, its image installs what the lock has, and its pages are there."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from helixpipe import __version__

ROOT = Path(__file__).resolve().parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version() -> None:
    assert yaml.safe_load(text("CITATION.cff"))["version"] == __version__
    assert re.search(r"^## ([\d.]+)", text("CHANGELOG.md"), re.MULTILINE)[1] == __version__  # type: ignore[index]
    assert f"Version {__version__.rpartition('.')[0]}." in text("README.md")


def test_the_image_installs_what_the_lock_has() -> None:
    lock = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text("requirements.lock"), re.MULTILINE))
    pins = dict(re.findall(r"([\w.-]+)==([\w.]+)", text("Dockerfile")))
    assert {"megatron-core", "safetensors", "tensorboard"} <= pins.keys()
    assert pins == {name: lock[name] for name in pins}
    needed = re.search(r"^train = \[(.*?)^\]", text("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert needed is not None
    names = set(re.findall(r'^    "([\w-]+)', needed[1], re.MULTILINE)) - {"torch", "triton"}  # the image has these
    assert names == pins.keys()


def test_the_image_is_pinned_and_whole() -> None:
    """What hadolint asks for most: a pinned tag, absolute work directories, commands as lists, no cache."""
    steps = re.sub(r"\\\n", " ", re.sub(r"^#.*$", "", text("Dockerfile"), flags=re.MULTILINE)).split("\n")
    lines = [line.split(None, 1) for line in steps if line.strip()]
    assert [word for word, _ in lines] == ["FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"]
    known = dict(lines)
    assert re.fullmatch(r"pytorch/pytorch:[\d.]+-cuda[\d.]+-cudnn\d+-devel", known["FROM"])
    assert known["WORKDIR"].startswith("/") and known["CMD"].startswith("[")
    assert "PIP_NO_CACHE_DIR=1" in known["ENV"]
