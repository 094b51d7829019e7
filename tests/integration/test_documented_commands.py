"""The documents' commands that train, need torch or a shell: each runs as printed, those that train with a small model,
few ranks and two steps; or its program's own parser takes its flags; or the reason why neither is done is here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType

import pytest

from helixpipe import megatron
from helixpipe.cli import command_dry_run
from helixpipe.common.flags import FlagParser, add_dataclass_arguments
from megatron.pretrain.arguments import build_parser, parse_args
from megatron.pretrain.inference.generation import GenerationOptions
from megatron.pretrain.inference.perplexity import PerplexityOptions
from tests.integration.launching import ROOT, Launch
from tests.pages import LAUNCHED, PAGES, Command, commands_of, kind
from tools import checkpoint

NOT_TRIED = {
    "FLAGS": "stands for its reader's flags; tests/integration/test_preflight.py and test_examples.py have some",
    "pip install": "downloads",
    "pre-commit install": "downloads",
    "tools/browser.sh": "root, and packages of the system",
    "tools/netlab.py": "root; tests/integration/test_netlab.py",
    "sbatch ": "SLURM; tests/slurm submits every script",
    "tools/link_speed.py": "two hosts; tests/integration/test_netlab.py measures a link",
    "tools/check_certificate.py": "a certificate of minutes; tests/certify verifies one",
    "examples/torchtitan_llama.py": "torchtitan, which tools/torchtitan.sh downloads and tries it with",
}

ONLY_PARSED = {
    "--load Llama-3.2-1B": "a folder from a network; tests/inference/test_huggingface.py trains one",
    "MEGATRON_CHECKPOINTS": "a checkpoint of Megatron-LM; tests/checkpoint reads one",
    "--variable-seq-lengths": "a data set of documents; tests/integration/test_documents.py trains on one",
}
"""Of commands that train."""

IN_A_SHELL = ("DRY_RUN=1", "pip list", "python -c", "python docs/upstream/deferred_receives.py", "export")
"""Commands that take seconds and run as they are, in a folder with the checkout's files."""

FROM_TEXT = "training.md"
"""The page whose commands are tried one after the other."""

SMALL = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "1",
    "--global-batch-size": "8",
    "--lr": "1e-2",
    "--train-iters": "2",
    "--log-interval": "1",
    "--num-workers": "0",
    "--eval-iters": "0",
}
"""In place of what a page says, or beside it."""

MOCK = {"--mock-data": "", "--tokenizer-type": "NullTokenizer", "--vocab-size": "100"}
"""Where a page leaves the data to its reader."""

AT_MOST = {
    "--pipeline-model-parallel-size": 2,
    "--tensor-model-parallel-size": 2,
    "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--pipe-sp-splits": 2,
}

SIZES = tuple(AT_MOST)[:3]


def by_flag(words: Sequence[str]) -> dict[str, str]:
    """Each flag with its values in a line; what stands for the reader's own flags is left out."""
    flags: dict[str, list[str]] = {}
    last = list[str]()
    for word in (word.strip("[]") for word in words):
        if word.startswith("-") and not word[1:2].isdigit():
            flags[word] = last = []
        elif word not in ("…", "..."):
            last.append(word)
    return {flag: " ".join(values) for flag, values in flags.items()}


def small(words: Sequence[str], folder: Path) -> tuple[int, dict[str, str]]:
    """The ranks, and the flags of a training command with a small model."""
    flags = by_flag(words)
    for flag, most in AT_MOST.items():
        if flags.get(flag, "auto") != "auto":
            flags[flag] = str(min(most, int(flags[flag])))
    if not any(flag in flags for flag in SIZES) and "--data-parallel-sharding-strategy" not in flags:
        flags["--pipeline-model-parallel-size"] = "2"
    if not flags.get("--data-path", "here"):  # "…"
        del flags["--data-path"]
    flags |= SMALL | ({} if "--data-path" in flags else MOCK)
    flags |= {flag: str(folder / "checkpoints") for flag in ("--save", "--load") if flag in flags}
    written = ("--record-timeline", "--timeline-png")
    flags |= {flag: str(folder / flags[flag]) for flag in written if flag in flags}
    return max(2, prod(int(flags.get(flag, "1")) for flag in (*SIZES, "--expert-model-parallel-size"))), flags


def in_a_line(flags: dict[str, str]) -> str:
    return " ".join(f"{flag} {values}".strip() for flag, values in flags.items())


def training_flags(words: Sequence[str]) -> list[str]:
    """What stands behind the script, or behind `train -p 2`."""
    return list(words[words.index("pretrain_gpt.py" if "pretrain_gpt.py" in words else "2") + 1 :])


def train(command: Command, folder: Path) -> None:
    ranks, flags = small(training_flags(command.words), folder)
    line = in_a_line(flags)
    if command.words[0] == "helixpipe":
        result = Launch("documented", f"schedules.command train -p {ranks} {line}", 0, "-m").run()
    else:
        result = Launch("documented", line, ranks).run()
    assert result.status == 0 and "Traceback" not in result.output, result.output
    assert sorted(result.losses()) == [1, 2], result.output


def parse_training(command: Command, folder: Path) -> None:
    ranks, flags = small(training_flags(command.words), folder)
    build_parser().parse(training_flags([word for word in command.words if word not in ("…", "...")]))
    for folder_of in ("--load", "--tokenizer-model", "--use-checkpoint-args"):  # that are not here
        flags.pop(folder_of, None)
    parse_args(shlex.split(in_a_line(flags)), environ={"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"})


def dry_run(command: Command, folder: Path) -> None:
    """Of a job of four ranks."""
    asked = command_dry_run._split(command.words[2:])
    _, flags = small(asked.training, folder)
    line = f"schedules.command dry-run --world-size 4 -- {in_a_line(flags)}"
    assert not asked.as_json
    result = Launch("documented", line, 0, "-m").run()  # torch for the CPU warns that it knows no NCCL
    assert result.status == 0 and "ranks came through two steps" in result.output, result.output


def in_a_shell(command: Command, folder: Path) -> None:
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "logs"):
            (folder / path.name).symlink_to(path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", command.line], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def parse_with_a_model(options: type, words: list[str]) -> None:
    parser = FlagParser()
    add_dataclass_arguments(parser, options)
    build_parser().parse(parser.parse_known_args(words)[1])


PARSERS: Mapping[str, Callable[[list[str]], object]] = MappingProxyType(
    {
        "tools/checkpoint.py": checkpoint.parse_arguments,
        "tools/generate.py": partial(parse_with_a_model, GenerationOptions),
        "tools/evaluate.py": partial(parse_with_a_model, PerplexityOptions),
        "helixpipe.megatron": megatron.parse,
    }
)
"""By program: what takes its arguments. Its commands need a checkpoint or NVIDIA's checkout, which other tests make."""


def parse(command: Command, folder: Path) -> None:
    (program,) = PARSERS.keys() & set(command.words)
    PARSERS[program](command.words[command.words.index(program) + 1 :])


def torch_llama(command: Command, folder: Path) -> None:
    Launch("documented", command.words[-1], 2, "examples/torch_llama.py").run().done()


def way(command: Command) -> Callable[[Command, Path], None] | None:
    """How a command is tried; None for those that are not. Raises ValueError where no way is known."""
    if any(part in command.line for part in NOT_TRIED):
        return None
    if command.line.startswith(IN_A_SHELL):
        return in_a_shell
    if PARSERS.keys() & set(command.words):
        return parse
    if "examples/torch_llama.py" in command.words:
        return torch_llama
    if command.words[:2] == ["helixpipe", "dry-run"]:
        return dry_run
    if command.words[:2] == ["helixpipe", "train"] or "pretrain_gpt.py" in command.words:
        return parse_training if any(part in command.line for part in ONLY_PARSED) else train
    raise ValueError(f"{command.page}: nobody knows how to try {command.line!r}, nor why not")


ALL = [command for page in PAGES for command in commands_of(page) if kind(command) == LAUNCHED]
TRIED = [
    pytest.param(command, marks=() if way(command) in (parse, parse_training) else pytest.mark.thorough)
    for command in ALL
    if command.page != FROM_TEXT and way(command) is not None
]


def test_every_reason_is_needed() -> None:
    assert len(TRIED) >= 25
    for part in NOT_TRIED:
        assert any(part in command.line for command in ALL), f"no command has {part} any more"
    for part in ONLY_PARSED:
        assert any(part in command.line and way(command) is parse_training for command in ALL), part
    for begin in IN_A_SHELL:
        assert any(command.line.startswith(begin) for command in ALL), begin
    for program in PARSERS:
        assert any(program in command.words for command in ALL), program


def test_a_command_that_nobody_knows_fails() -> None:
    with pytest.raises(ValueError, match=r"nobody knows how to try 'python tools/unheard\.py'"):
        way(Command("page.md", ["python", "tools/unheard.py"], "python tools/unheard.py"))


@pytest.mark.parametrize(
    "command", TRIED, ids=lambda command: f"{command.page}-{re.sub('[^a-z]+', '-', command.line)[:40]}"
)
def test_documented_commands(command: Command, tmp_path: Path) -> None:
    tried = way(command)
    assert tried is not None
    tried(command, tmp_path)


@pytest.mark.thorough
def test_a_page_from_text_to_training(tmp_path: Path) -> None:
    """Of docs/training.md: the standard library's source becomes documents, these tokens, and a run trains on them."""
    commands = [command.words for command in ALL if command.page == FROM_TEXT]
    for _, script, *flags in (words for words in commands if words[0] == "python"):
        Launch("documented", " ".join(flags), 0, str(ROOT / script), tmp_path).run().done()
    (train,) = (words[4:] for words in commands if words[0] == "helixpipe")
    given = by_flag(train) | {"--train-iters": "2", "--eval-iters": "0", "--log-interval": "1", "--num-workers": "0"}
    result = Launch("documented", f"schedules.command train -p 2 {in_a_line(given)}", 0, "-m", tmp_path).run().done()
    assert sorted(result.losses()) == [1, 2]
    assert (tmp_path / "checkpoints/mine/latest_checkpointed_iteration.txt").read_text() == "2"
