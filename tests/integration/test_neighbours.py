"""Training beside NVIDIA's own packages: its checkout on PYTHONPATH, or as the current folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integration.launching import MOCK, ROOT, Launch

TRAIN = f"{MOCK} --train-iters 2 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b"
PACKAGES = ("training", "inference", "legacy", "post_training", "rl")
"""Folders of Megatron-LM's `megatron/` beside `core`."""


def core_folder() -> Path:
    """Where the installed megatron-core is."""
    core = importlib.util.find_spec("megatron.core")
    assert core is not None and core.submodule_search_locations is not None
    return Path(next(iter(core.submodule_search_locations)))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of NVIDIA's checkout; its packages leave a mark when imported, and core is the installed one."""
    folder = tmp_path_factory.mktemp("Megatron-LM")
    (folder / "megatron").mkdir()
    (folder / "megatron" / "core").symlink_to(core_folder())
    leave_a_mark = f"open({str(folder / 'mark')!r}, 'a').write(__name__ + '\\n')\n"
    for name in ("tools", "tests", "examples", *(f"megatron/{name}" for name in PACKAGES)):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(leave_a_mark)
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        (folder / name).write_text(leave_a_mark)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "inside"])
def test_nvidia_s_checkout_on_the_path_does_no_harm(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    flags = f"{TRAIN} --data-cache-path {tmp_path}"
    folder = checkout if inside else tmp_path
    done = Launch("beside", flags, script=str(ROOT / "pretrain_gpt.py"), folder=folder).run().done()
    assert len(done.losses()) == 2
    assert not (checkout / "mark").exists(), (checkout / "mark").read_text()
