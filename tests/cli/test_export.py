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


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_weights_in_parts_are_left_to_fsdp(strategy: str, tmp_path: Path) -> None:
    """Its actions are among those of every export."""
    sizes = {"num-layers": 4, "hidden-size": 256, "num-attention-heads": 4, "vocab-size": 1000, "seq-length": 512}
    flags = [f"--{name}={size}" for name, size in {**sizes, "nodes": 1, "ranks": 2, "microbatches": 4}.items()]
    stem = str(tmp_path / "x")
    assert main(["export", "1f1b", *flags, f"--data-parallel-sharding-strategy={strategy}", "-o", stem]) == 0
    only, both = (from_csv(f"{stem}.{form}.csv") for form in ("compute_only", "compute_comms"))
    assert only.ranks == both.ranks
    cells = Path(f"{stem}.compute_comms.csv").read_text().replace("\n", ",").split(",")
    assert all(f"{stage}UNSHARD" in cells for stage in range(len(only.stages)))
