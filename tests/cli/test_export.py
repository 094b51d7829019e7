"""`helixpipe export`: files that torch's runtime reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from helixpipe.program.text import from_csv
from schedules.command import main
from tests.program.test_torch_programs import loss, torch_stages
from tests.torch_pipelining.queues import makespan


def test_both_files_load_in_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "zbv", "-p", "2", "-m", "4", "--to", "torch", "-o", str(tmp_path / "zbv")]) == 0
    assert f"{tmp_path / 'zbv'}.compute_comms.csv: 2 ranks, 92 actions." in capsys.readouterr().out
    only, both = (tmp_path / f"zbv.{form}.csv" for form in ("compute_only", "compute_comms"))
    runtime = torch_schedules._PipelineScheduleRuntime(torch_stages(4, 2, 2), 4, loss)
    runtime._load_csv(str(only))
    theirs = runtime.pipeline_order_with_comms
    runtime._load_csv(str(both), "compute_comms")
    ours = runtime.pipeline_order_with_comms
    assert ours != theirs
    assert {rank: sorted(map(str, row)) for rank, row in ours.items()} == {
        rank: sorted(map(str, row)) for rank, row in theirs.items()
    }
    assert makespan([line.split(",") for line in both.read_text().splitlines()], 0.1, "rank") is not None
    assert from_csv(only).ranks == from_csv(both).ranks


def test_what_torch_cannot_run_is_refused_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "seq1f1b", "-k", "2", "-o", str(tmp_path / "x")]) == 2
    assert "schedule seq1f1b runs sequences in chunks, which torch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_times_decide_the_order_of_messages(tmp_path: Path) -> None:
    texts = []
    for time in ("0", "3"):
        assert main(["export", "1f1b", "-p", "3", "-m", "6", "--message-time", time, "-o", str(tmp_path / time)]) == 0
        texts.append((tmp_path / f"{time}.compute_comms.csv").read_text())
    assert texts[0] != texts[1]
