"""`helixpipe watch`: what a run has written, in lines."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from helixpipe.adapt.live import FILE, Live, SlowPart
from schedules import command as cli
from tests.cli.commands import run, run_json

LIVE = Live(
    *(40, 100, 0.25, 0.125, 1.62, "zb2p", 31),
    loss=2.5,
    slow=[SlowPart("rank 3's link to rank 4", 0.24)],
    lines=[
        "iteration 28: rank 3's link to rank 4 is at 0.24 of its speed; a step takes 1.62 times as long as at first"
    ],
)


def test_the_state_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LIVE.save(tmp_path)
    shown = run(capsys, f"watch {tmp_path}").splitlines()
    assert shown[0].startswith("iteration 40 of 100, lm loss 2.500000E+00, ")
    assert shown[1:5] == [
        "step 250.0 ms of forwards and backwards, bubble 12.5%",
        "plan: zb2p, since iteration 31",
        "slow: a step takes 1.62 times as long as at first",
        "  rank 3's link to rank 4 at 0.24 of its speed",
    ]
    assert run_json(capsys, f"watch {tmp_path}")["slow"] == [{"name": "rank 3's link to rank 4", "speed": 0.24}]


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for loss in (nan, inf):
        replace(LIVE, loss=loss).save(tmp_path)
        assert f"lm loss {loss:E}" in run(capsys, f"watch {tmp_path}")
        assert run_json(capsys, f"watch {tmp_path}")["loss"] is None


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), ("{}", "is not the state of a run"), ("[", "is not the state")]
)
def test_what_is_no_run_is_told(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content, encoding="utf-8")
    assert cli.main(["watch", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
