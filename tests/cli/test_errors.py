"""Bad input to the `helixpipe` command: one sentence on standard error, exit code 2, nothing half-written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedules import command as cli


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that refuses these arguments."""
    assert cli.main(list(arguments)) == cli.USER_ERROR
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("helixpipe: ")
    return line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("simulat 1f1b", "did you mean simulate?"),
        ("--json list", "a command must come before --json"),
        ("simulate 1f1", "did you mean 1f1b?"),
        ("memory 1f1b gpipe", "'gpipe' is one too many"),
        ("simulate 1f1b --rank 4", "did you mean --ranks?"),
        ("simulate 1f1b -p four", "'four' is not a whole number"),
        ("simulate 1f1b -p 0", "helixpipe: -p 0 must be at least 1."),
        ("simulate 1f1b --ranks 0", "helixpipe: --ranks 0 must be at least 1."),
        ("simulate 1f1b -m -3", "helixpipe: -m -3 must be at least 1."),
        ("simulate 1f1b -m 100000000", "helixpipe: -m 100000000 must be at most 100000."),
        ("draw 1f1b -L 1000000", "helixpipe: -L 1000000 must be at most 100000."),
        ("simulate 1f1b --piece-times pre=-1", "--piece-times: the time of pre must be a finite number"),
        ("chimera -p 3", "a command must come before chimera: helixpipe simulate chimera, say."),
        (
            "simulate --model llama2-7b --expert-parallel 2",
            "--expert-parallel 2 is of experts, and llama2-7b has none.",
        ),
        (
            "plan --model llama2-7b --gpus 8 --global-batch-size 8 --expert-parallel 2",
            "--expert-parallel 2 is of experts, and llama2-7b has none.",
        ),
        ("list 1f1b", "list takes flags only; '1f1b' is one too many"),
        ("simulate chimera -p 3", "chimera needs an even -p, not 3;"),
        ("simulate chimera --ranks 3", "chimera needs an even --ranks, not 3;"),
        ("compare chimera none -p 3", "chimera needs an even -p, not 3;"),
        ("simulate none -p 2", "set -p 1 or choose another schedule."),
        ("simulate 1f1b -L 7 -p 2", "-L 7 cannot be divided evenly over 2 pipeline stages"),
        ("simulate 1f1b --layers 7 -p 2", "--layers 7 cannot be divided evenly over 2 pipeline stages"),
        ("simulate zbv -p 2 -L 7", "divide them by --pipeline-model-parallel-layout 'Et*2|t*2|t*2|tL'."),
        ("simulate seq1f1b -k 3 --chunk-lengths 1,2", "the flags disagree: -k 3 chunks and --chunk-lengths 2 chunks"),
        ("simulate 1f1b -p 3 --model llama2-7b", "-p 3 times --tensor-parallel 1 must divide the 8 GPUs"),
        ("simulate 1f1b -m 3 --model llama2-7b --global-batch-size 7", "-m 3 does not fit --global-batch-size 7"),
        ("simulate 1f1b --pipeline-model-parallel-layout EttL -p 2 -L 2", "but -p 2 needs 2"),
        ("plan --gpus 8 --hidden-size 64", "--num-layers, --num-attention-heads, --vocab-size, --seq-length must be"),
        ("simulate --recompute-num-layers 2", "--recompute-num-layers 2 needs --recompute-granularity full."),
        (
            "simulate --recompute-granularity without-attention --recompute-num-layers 2",
            "--recompute-num-layers 2 needs --recompute-granularity without-attention --recompute-method block.",
        ),
        ("simulate 1f1b -L 7", "4 and 8"),
        ("simulate interleaved-1f1b -m 5", "4 and 8"),
        ("simulate 1f1b -v 2", "virtual stages (2)"),
        ("simulate none -p 2", "not 2"),
        ("simulate 1f1b --piece-times attention=1", "'attention=1' is not NAME=TIME"),
        ("simulate 1f1b --piece-times aten=1", "did you mean attn?"),
        (
            "simulate 1f1b --recompute-granularity ful",
            "invalid choice: 'ful', did you mean full? choose from selective",
        ),
        ("plan --hardware h10 --model llama2-7b --gpus 8 --global-batch-size 8", "did you mean h100?"),
        ("simulate 1f1b --piece-times attn=fast", "'fast' is not a number"),
        ("simulate 1f1b --piece-times attn=nan", "not nan"),
        ("simulate 1f1b --piece-times attn=1e308", "too large"),
        ("simulate 1f1b --backward-ratio 0.5", "at least 1"),
        ("simulate 1f1b --message-time -1", "--message-time -1 must be at least 0."),
        ("simulate 1f1b --copy-time -1", "--copy-time -1 must be at least 0."),
        ("simulate 1f1b -p 1000000 -m 100000", "too large to simulate"),
        ("draw 1f1b -o picture.bmp", ".png, .svg, .pdf, .html, .json"),
        ("draw 1f1b -o nowhere/picture.html", "-o: cannot write nowhere/picture.html: No such file or directory"),
        ("draw 1f1b -o folder.json", "cannot write folder.json: it is a directory"),
        ("simulate 1f1b --save-program nowhere/p.csv", "cannot write nowhere/p.csv"),
        ("draw 1f1b --measured absent.json", "cannot read the timeline absent.json"),
        ("check absent.csv", "cannot read the schedule file absent.csv: No such file or directory"),
    ],
)
def test_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    assert says in refused(capsys, *command.split())
    assert os.listdir(tmp_path) == ["folder.json"]
    assert os.listdir(tmp_path / "folder.json") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 appears twice"),
        ("0F0\n1F0,1B0\n", "0B0 is missing"),
        ("0B0,0F0\n1F0,1B0\n", "0B0 comes before 0F0"),
        ("0F0garbage,0B0\n", "'0F0garbage' is not an op"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "circle"),
        ("0F0,1F0,1B0\n0B0\n", "0B0 is on rank 1 but its forward is on rank 0"),
        ("", "contains no ops"),
        ("\0\xff", "is not an op"),
    ],
)
def test_check_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    assert says in refused(capsys, "check", str(path))
    assert says in refused(capsys, "simulate", str(path))


def test_flags_that_disagree_with_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert cli.main(["simulate", "1f1b", "-p", "2", "-m", "3", "--save-program", str(path)]) == 0
    capsys.readouterr()
    for flags, says in (
        ("-p 3", "-p 3 does not fit"),
        ("-m 4", "whose microbatches are 3"),
        ("-k 2", "-k 2"),
        ("-v 2", "-v 2"),
        ("-L 3", "2 and 4"),
    ):
        for command in ("simulate", "check"):
            assert says in refused(capsys, command, str(path), *flags.split())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "is not a timeline file"),
        ('{"title": "x", "ranks": 1, "unit": "s", "ops": [[0, "0F0.0.0", 0, 1]], "transfers": []}', "not a timeline"),
        ('{"title": "x", "ranks": 1, "unit": "s", "ops": [], "transfers": []}', "has no ops"),
        ('{"title": "x", "ranks": 1, "unit": "s", "ops": [[1, "0F0", 0, 1]], "transfers": []}', "of 1 ranks none is 1"),
        ('{"title": "x", "ranks": 1, "unit": "s", "ops": [[0, "0F0", 2, 1]], "transfers": []}', "is damaged: 0F0"),
        ('{"title": "x", "ranks": 1, "unit": "s", "ops": [[0, "0F0", 0, NaN]], "transfers": []}', "not a timeline"),
        (
            '{"title": "x", "ranks": 1, "unit": "s", "ops": [[0, "0F0", 0, 1]], '
            '"transfers": [["offload", [0], "0F0", null, 2, 1]]}',
            "is damaged: the copy of 0F0 on rank 0",
        ),
        (
            '{"title": "x", "ranks": 1, "unit": "s", "ops": [[0, "0F0", 0, 1]], '
            '"transfers": [["offload", [1], "0F0", null, 0, 1]]}',
            "of 1 ranks none is 1",
        ),
    ],
)
def test_damaged_measurement(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str) -> None:
    measured, picture = tmp_path / "run.json", tmp_path / "x.png"
    measured.write_text(content)
    assert says in refused(capsys, "draw", "1f1b", "--measured", str(measured), "-o", str(picture))
    assert not picture.exists()


def test_a_failed_drawing_leaves_the_old_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "cannot write" in refused(capsys, "draw", "1f1b", "-o", str(path))
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize(
    ("words", "owners"),
    [
        ("--helix-folds 4", "helix"),
        ("--helix-folds 2", "helix"),  # the default, which would change nothing
        ("--no-weipipe-eager", "weipipe-naive, weipipe, wzb1, wzb2"),
        ("--weipipe-slots=3", "weipipe-naive, weipipe, wzb1, wzb2"),
    ],
)
def test_options_of_another_schedule(capsys: pytest.CaptureFixture[str], words: str, owners: str) -> None:
    """A schedule's own options are flags here, refused where they would be ignored."""
    flag = words.replace("=", " ").split()[0]
    model = ["--model", "llama2-7b", "--hardware", "h20", "-p", "8", "-m", "8"]
    for command in (["simulate", "1f1b"], ["memory", "1f1b", *model], ["draw", "1f1b"]):
        said = refused(capsys, *command, *words.split())
        assert f"{flag} is an option of {owners}, not of 1f1b." in said
    assert cli.main(["list"]) == 0
    assert "--helix-folds" in capsys.readouterr().out


def test_options_that_nothing_drawn_or_no_file_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, output = str(tmp_path / "mine.csv"), ["-o", str(tmp_path / "x.json")]
    assert cli.main(["simulate", "1f1b", "-p", "2", "-m", "3", "--save-program", path]) == 0
    capsys.readouterr()
    flag = ["--helix-folds", "3"]
    assert "--helix-folds is an option of helix, not of a file." in refused(capsys, "simulate", path, *flag)
    assert "not of 1f1b, gpipe." in refused(capsys, "draw", "1f1b", "gpipe", *flag, *output)
    assert "1f1b has one stage a rank; virtual stages (2)" in refused(
        capsys, "draw", "1f1b", "gpipe", "-v", "2", *output
    )
    assert cli.main(["draw", "1f1b", "interleaved-1f1b", "-v", "3", *output]) == 0


def test_options_of_one_of_the_schedules_that_are_compared(tmp_path: Path) -> None:
    words = ["draw", "1f1b", "helix", "--helix-folds", "2", "-p", "2", "-m", "4", "-o", str(tmp_path / "x.json")]
    assert cli.main(words) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--schedule", "", "--model", "llama2-7b", "--gpus", "8", "--global-batch-size", "8"],
        ["simulate", "--model", ""],
        ["simulate", "--piece-times="],
        ["simulate", "-m", ""],
        ["memory", "--hardware", ""],
        ["draw", "1f1b", "--output", ""],
        ["draw", "1f1b", "--measured", ""],
        ["profile", "--output", ""],
        ["simulate", ""],
        ["compare", "1f1b", ""],
        ["check", ""],
    ],
)
def test_nothing_is_not_taken_for_something(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """An empty text is no name, number or file, nor as if the flag were not there."""
    monkeypatch.chdir(tmp_path)
    assert " is empty; give it a value" in refused(capsys, *words)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["simulate", "--help"], ["draw", "--help"], ["check", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert "helixpipe" in capsys.readouterr().out
    assert cli.main([]) == cli.USER_ERROR
