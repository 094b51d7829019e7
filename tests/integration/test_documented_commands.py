"""The documents' commands that train or need torch: each runs as printed, with a small model, few ranks and two steps,
or is listed here with the reason why it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launching import ROOT, Launch
from tests.pages import PAGES, commands_of

NOT_RUN = {
    "torchrun --nnodes 4": "four nodes; tests/integration/test_preflight.py runs the preflight",
    "-m helixpipe.megatron": "NVIDIA's checkout; tests/integration/test_megatron_script.py has a part of one",
    "examples/torch_llama.py": "transformers; tests/torch_pipelining tries it",
    "--load Llama-3.2-1B": "a folder from a network; tests/inference/test_huggingface.py trains one",
    "checkpoint.py import-hf": "the same",
    "checkpoint.py export-hf": "the same",
    "MEGATRON_CHECKPOINTS": "a checkpoint of Megatron-LM; tests/checkpoint reads one",
    "tools/generate.py": "a checkpoint of the quick start; tests/inference lets one write",
    "tools/evaluate.py": "the same",
    "tools/check_certificate.py": "a certificate of minutes; tests/certify verifies one",
    "tools/link_speed.py": "two hosts; tests/integration/test_netlab.py measures a link",
    "pip list": "what is installed is not the test's",
    "pip install": "the same",
    "python -c": "prints which torch there is",
    "dry-run --world-size 1024": "a model of 70 billion weights; tests/integration/test_dry_runs.py has smaller ones",
    "--variable-seq-lengths": "a data set of documents; tests/integration/test_documents.py trains on one",
}

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


def launched() -> list[tuple[str, list[str]]]:
    """A page's name and the words of each of its commands that this file answers for."""
    found = []
    for page in PAGES:
        for words in commands_of(page):
            ours = words[0] in ("torchrun", "pip") or words[:2] in (["helixpipe", "train"], ["helixpipe", "dry-run"])
            if ours or (words[0] == "python" and words[1] != "-m"):
                found.append((page.name, words))
    return found


def reason(words: list[str]) -> str | None:
    return next((why for part, why in NOT_RUN.items() if part in " ".join(words)), None)


def by_flag(words: list[str]) -> dict[str, str]:
    """Each flag with its values in a line; what stands for the reader's own flags is left out."""
    flags: dict[str, list[str]] = {}
    last = list[str]()
    for word in (word.strip("[]") for word in words):
        if word.startswith("-") and not word[1:2].isdigit():
            flags[word] = last = []
        elif word not in ("…", "..."):
            last.append(word)
    return {flag: " ".join(values) for flag, values in flags.items()}


def small(words: list[str], folder: Path) -> tuple[int, dict[str, str]]:
    """The ranks, and the flags of a training command with a small model."""
    flags = by_flag(words)
    for flag, most in AT_MOST.items():
        if flags.get(flag, "auto") != "auto":
            flags[flag] = str(min(most, int(flags[flag])))
    if "--tensor-model-parallel-size" in flags and "--pipeline-model-parallel-size" in flags:
        flags["--tensor-model-parallel-size"] = "1"
    if not any(flag in flags for flag in SIZES) and "--data-parallel-sharding-strategy" not in flags:
        flags["--pipeline-model-parallel-size"] = "2"
    flags |= SMALL | ({} if "--data-path" in flags else MOCK)
    flags |= {flag: str(folder / "checkpoints") for flag in ("--save", "--load") if flag in flags}
    return 2 * int(flags.get("--expert-model-parallel-size", "1")), flags


def in_a_line(flags: dict[str, str]) -> str:
    return " ".join(f"{flag} {values}".strip() for flag, values in flags.items())


COMMANDS = [(page, words) for page, words in launched() if reason(words) is None]


def test_every_command_is_run_or_has_a_reason() -> None:
    lines = [" ".join(words) for _, words in launched()]
    for part in NOT_RUN:
        assert any(part in line for line in lines), f"no command has {part} any more"
    assert len(COMMANDS) >= 12


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [words for page, words in COMMANDS if page != "training.md"],
    ids=[f"{number}-{page}" for number, (page, _) in enumerate(COMMANDS) if page != "training.md"],
)
def test_training_commands(words: list[str], tmp_path: Path) -> None:
    begin = words.index("pretrain_gpt.py" if words[0] == "torchrun" else "2") + 1  # behind train -p 2
    ranks, flags = small(words[begin:], tmp_path)
    line = in_a_line(flags)
    if words[0] == "torchrun":
        launch = Launch("documented", line, ranks)
    else:
        launch = Launch("documented", f"schedules.command train -p {ranks} {line}", 0, "-m")
    result = launch.run()
    assert result.status == 0 and "Traceback" not in result.output, result.output
    assert sorted(result.losses()) == [1, 2], result.output


@pytest.mark.thorough
def test_a_page_from_text_to_training(tmp_path: Path) -> None:
    """Of docs/training.md: the standard library's source becomes documents, these tokens, and a run trains on them."""
    commands = [words for page, words in COMMANDS if page == "training.md"]
    for _, script, *flags in (words for words in commands if words[0] == "python"):
        Launch("documented", " ".join(flags), 0, str(ROOT / script), tmp_path).run().done()
    (train,) = (words[4:] for words in commands if words[0] == "helixpipe")
    flags = by_flag(train) | {"--train-iters": "2", "--eval-iters": "0", "--log-interval": "1", "--num-workers": "0"}
    result = Launch("documented", f"schedules.command train -p 2 {in_a_line(flags)}", 0, "-m", tmp_path).run().done()
    assert sorted(result.losses()) == [1, 2]
    assert (tmp_path / "checkpoints/mine/latest_checkpointed_iteration.txt").read_text() == "2"
