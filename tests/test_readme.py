"""The commands of README and docs/training.md, as they stand there: each is one that this test knows how to try, and
does what is said. README is short, and its figures stand on the pages that it names."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from helixpipe.cli import command_plan, measuring
from helixpipe.cli.command_train import _split
from helixpipe.costs.profile_costs import Profile
from helixpipe.planning.search.explore import Search
from megatron.pretrain.arguments import parse_args
from schedules import command
from tools.preprocess_data import parse_arguments

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "tests" / "pins" / "profile.json"


def commands() -> list[list[str]]:
    """The words of every command in the pages' blocks, in order."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/training.md"))
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [words for line in joined if (words := shlex.split(line, comments=True))]


COMMANDS = commands()


def test_readme_can_be_read_in_a_minute_or_two() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_simulated_results_stand_on_their_pages() -> None:
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "| simulated, [" in line]
    assert len(rows) >= 2
    for row in rows:
        page = (ROOT / row.rsplit("(", 1)[1].split(")")[0]).read_text(encoding="utf-8")
        _, _, before, after, _, _ = (cell.strip() for cell in row.rsplit("(", 1)[0].split("|"))
        for figure in re.findall(r"\d+\.\d+|\d{3,}", before + " " + after):
            assert figure in page, (figure, row)


def test_nothing_is_left_to_fill_in() -> None:
    assert len(COMMANDS) >= 15
    for words in COMMANDS:
        assert not any("…" in word or "..." in word or re.fullmatch(r"[A-Z_]{3,}", word) for word in words), words


@pytest.mark.thorough
def test_every_command_works_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after another in an empty folder: what one needs another has written. Measuring, writing data and training
    are not done; their flags are parsed, and their files are there afterwards. A search for plans is a short one, and
    of all schedules three are compared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_plan, "Search", partial(Search, ops=1000))
    monkeypatch.setattr(measuring, "_measure", lambda *task: Profile.load(MEASURED))
    written: set[str] = set()
    for words in COMMANDS:
        program, *rest = words
        if program == "make":
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), words
        elif program == "export":
            assert rest == ["PATH=$PWD/.venv/bin:$PATH"]
        elif program == "python":
            written |= _written(rest, written)
        elif rest == ["playground"]:  # it serves until it is ended; tests/playground tries it
            continue
        elif rest[0] == "train":
            _train(rest[1:], written)
        else:
            assert program == "helixpipe", words
            rest[1:1] = ["1f1b", "seq1f1b", "zb1p"] * (rest[0] == "compare")
            assert command.main(rest) == 0, (words, capsys.readouterr().err)
    assert {"interleaved.png", "my_schedule.csv", "mine.json", "profile.json"} <= {
        path.name for path in tmp_path.iterdir()
    }


def _written(words: list[str], before: set[str]) -> set[str]:
    """Return what a program of tools/ writes; it is given what is there."""
    program, *rest = words
    assert (ROOT / program).is_file()
    if program == "tools/stdlib_corpus.py":
        flag, path = rest
        assert flag == "--output"
        return {path}
    assert program == "tools/preprocess_data.py", words
    arguments = parse_arguments(rest)
    assert set(arguments.input) <= before
    return {f"{arguments.output_prefix}_{key}_document" for key in arguments.json_keys}


def _train(words: list[str], written: set[str]) -> None:
    """The flags are valid on a processor, and on hosts of 2 and of 8 GPUs; the data is there."""
    needed, _, flags = _split(words)
    for ranks in {needed, 2, 8}:
        config = parse_args(flags, environ={"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"})
        assert config.data.mock_data or set(config.data.data_path or ()) <= written
