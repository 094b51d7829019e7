"""Steps timed under two schedules."""

from __future__ import annotations

import json
import subprocess

import pytest

from tools import step_times
from tools.step_times import milliseconds, sentence

LINE = " [now] iteration {}/ 9 | consumed samples: 4 | elapsed time per iteration (ms): {} | learning rate: 1.0 |"


def test_times_are_those_of_the_log() -> None:
    line = LINE
    assert milliseconds("\n".join([line.format(1, "120.5"), "else", line.format(2, "80.0")])) == [120.5, 80.0]


def test_the_sentence_has_medians_and_what_was_simulated() -> None:
    times = [[90.0, 100.0, 400.0], [125.0, 120.0, 130.0]]
    assert sentence(("seq1f1b", "1f1b"), times, [80.0, 100.0]) == (
        "a step under seq1f1b takes 20 % less time than under 1f1b, 100 against 125 ms (medians of 3 steps); 20 % less "
        "was simulated from what the model's pieces take here, 80 against 100 ms"
    )
    said = sentence(("1f1b", "seq1f1b"), times[::-1], [100.0, 80.0])
    assert "takes 25 % more time than under seq1f1b, 125 against 100 ms" in said and "25 % more was simulated" in said


def test_both_are_trained_and_simulated_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its own flags, on the same model, size and profile; steps of warm-up do not count."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        slow = 1 + ("1f1b" in command)
        log = "\n".join(LINE.format(step, 1000.0 if step < step_times.WARM_UP else 50.0 * slow) for step in range(5))
        answer = json.dumps({"makespan": 0.03 * slow}) if "simulate" in command else log
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(subprocess, "run", run)
    words = ["--ranks", "2", "--schedules", "seq1f1b --pipe-sp-splits 4", "1f1b", "--profile", "x.json"]
    assert step_times.main([*words, "--microbatches", "4", "--steps", "3", "--", "--num-layers", "4"]) == 0
    assert (
        "50 % less time than under 1f1b, 50 against 100 ms (medians of 3 steps); 50 % less" in capsys.readouterr().out
    )
    own = ["seq1f1b", "--pipe-sp-splits", "4"]
    trained, simulated = ([each for each in commands if word in each] for word in ("torch.distributed.run", "simulate"))
    for pair in (trained, simulated):
        first, second = pair
        at = next(place for place in range(len(first)) if first[place : place + 3] == own)
        assert [*first[:at], "1f1b", *first[at + 3 :]] == second
    assert trained[0][trained[0].index("--num-layers") + 1] == "4"
    assert simulated[1][-7:-1] == ["-p", "2", "-m", "4", "--profile", "x.json"]
