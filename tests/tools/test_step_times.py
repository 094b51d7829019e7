"""Steps timed under some schedules."""

from __future__ import annotations

from tools.step_times import milliseconds, sentence


def test_times_are_those_of_the_log() -> None:
    line = " [now] iteration {}/ 9 | consumed samples: 4 | elapsed time per iteration (ms): {} | learning rate: 1.0 |"
    assert milliseconds("\n".join([line.format(1, "120.5"), "else", line.format(2, "80.0")])) == [120.5, 80.0]


def test_the_sentence_has_medians_and_their_ratio() -> None:
    said = sentence({"helix": [90.0, 100.0, 400.0], "1f1b": [125.0, 120.0, 130.0]})
    assert said == (
        "a step under helix takes 100 ms (median of 3, run after one another); 1f1b 125 ms: "
        "helix takes 0.80 of its time"
    )
