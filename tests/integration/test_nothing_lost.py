"""What a run would lose is said before it starts: checkpoints replaced, outputs that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.forked import run_forked
from tests.integration.launching import MOCK, Launch

RUN = f"{MOCK} --num-layers 1 --global-batch-size 1"


@pytest.mark.thorough
def test_relaunching_with_the_same_flags_goes_on_and_other_flags_replace_nothing(tmp_path: Path) -> None:
    again = f"{RUN} --train-iters 2 --save {tmp_path}/save --load {tmp_path}/save"
    first = run_forked(Launch("first", again, ranks=1)).done()
    lines = first.output.splitlines()
    at = next(index for index, line in enumerate(lines) if "starting from scratch" in line)
    assert " iteration        1/" in lines[at + 1], "the last line before the first iteration"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "save").rglob("*")}
    assert "iteration 2 of 2" in run_forked(Launch("finished", again, ranks=1)).done().output

    longer = again.replace("--train-iters 2", "--train-iters 4")
    other = run_forked(Launch("other vocabulary", f"{longer} --vocab-size 99", ranks=1))
    assert "was trained with other tokenizer (--vocab-size 100)" in other.sentence()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "save").rglob("*")} == before
    more = run_forked(Launch("longer", longer, ranks=1)).done()
    assert "training is longer than the checkpoint's" in more.output and sorted(more.losses()) == [3, 4]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "save").rglob("*")}

    unloaded = run_forked(Launch("without --load", f"{RUN} --train-iters 1 --save {tmp_path}/save", ranks=1))
    assert "up to iteration 4" in unloaded.sentence() and "--overwrite-checkpoints" in unloaded.sentence()
    empty = run_forked(Launch("nothing to load", f"{RUN} --train-iters 1 --load {tmp_path}", ranks=1))
    assert f"--load {tmp_path} holds no checkpoint" in empty.sentence()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "save").rglob("*")} == before
