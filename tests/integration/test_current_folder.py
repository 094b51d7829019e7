"""Modules in the folder where a user happens to be are not part of any program: none of them is ever imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.launching import MODEL, ROOT
from tests.selection import graded

PACKAGES = (
    *("torch", "numpy", "scipy", "yaml", "matplotlib", "rich", "tensorboard", "transformers", "pybind11", "triton"),
    *("megatron", "helixpipe", "schedules", "tools", "sitecustomize", "usercustomize"),
)
TRAP = """
with open({mark!r}, "a") as stream:
    stream.write("{name}\\n")
raise SystemExit("{name} of the current folder was imported")
"""
BIN = Path(sys.executable).parent
SMALL = f"{MODEL} --tokenizer-type ByteLevelTokenizer --train-iters 1 --global-batch-size 2"
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100"
DOCUMENTS = "--variable-seq-lengths --pipeline-schedule infinipipe --data-path documents_text_document"

PLAN = "plan --model llama2-7b --hardware h100 --gpus 2 --seq-length 512 --global-batch-size 4 --jobs 2"

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command in a folder full of modules that must not be imported; returns what it prints."""
    folder = tmp_path_factory.mktemp("trapped")
    mark = folder.parent / "imported"
    for name in sys.stdlib_module_names - set(sys.builtin_module_names):
        (folder / f"{name}.py").write_text(TRAP.format(mark=str(mark), name=name))
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(TRAP.format(mark=str(mark), name=name))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(command: str) -> str:
        program, *words = command.split()
        start = [str(BIN / program)] if (BIN / program).exists() else [sys.executable, str(ROOT / program)]
        done = subprocess.run(
            [*start, *words], cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=280
        )
        assert not mark.exists(), f"{command}: {mark.read_text()}"
        assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.mark.parametrize(
    "command",
    graded(
        [
            "list",
            "simulate 1f1b -p 2 -m 4",
            "compare 1f1b gpipe -p 2 -m 4",
            "draw 1f1b -p 2 -m 4 -o picture.png",
            "draw 1f1b -p 2 -m 4 -o page.html",
            "improve 1f1b -p 2 -m 2 --evaluations 20",
            "memory 1f1b -p 2 -m 2 --model llama2-7b --hardware h100",
            PLAN,
            f"profile {SHAPE} --repeats 1 --output profile.json",
        ],
        ["draw 1f1b -p 2 -m 4 -o picture.png", PLAN],
    ),
)
def test_a_command_of_helixpipe(trapped: Run, command: str) -> None:
    assert trapped(f"helixpipe {command}")


def test_a_program_that_is_written_and_checked(trapped: Run) -> None:
    trapped("helixpipe simulate 1f1b -p 2 -m 4 --save-program program.json")
    assert trapped("helixpipe check program.json")


@pytest.mark.thorough
def test_training_and_what_it_starts(trapped: Run) -> None:
    """Ranks, the planner's process, those that load data, and the tools that open what was trained."""
    trapped("tools/stdlib_corpus.py --output documents.jsonl --max-megabytes 0.1")
    prefix = "--output-prefix documents --tokenizer-type ByteLevelTokenizer"
    trapped(f"tools/preprocess_data.py --input documents.jsonl {prefix}")
    trained = trapped(f"helixpipe train -p 2 {SMALL} {DOCUMENTS} --num-workers 1 --save saved")
    assert "successfully saved checkpoint" in trained
    tools = "--load saved --pipeline-model-parallel-size 1 --pipeline-schedule none"
    assert trapped(f"tools/generate.py {tools} --max-new-tokens 1")
    assert trapped(f"tools/evaluate.py {tools} --text documents.jsonl --context 16")
    assert "step time" in trapped(f"tools/preflight.py {SMALL} --mock-data --hardware h100 --preflight-predict-only")
