"""Programs of torch.distributed.pipelining load here, and ours there."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.program.text import format_rows, from_csv, to_csv
from schedules import Shape, build

# -------------------------------------------------------------------------------------------------------------- torch


def torch_stages(num_stages: int, num_ranks: int, local: int) -> list[Any]:
    """As much of a PipelineStage as a schedule's order depends on."""
    common = {"num_stages": num_stages, "group_size": num_ranks, "group_rank": 0, "submod": None, "has_backward": True}
    return [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=False, **common) for i in range(local)]


def loss(*_: Any) -> None: ...


MULTI = [
    (torch_schedules.ScheduleInterleaved1F1B, 2, "FB"),
    (torch_schedules.ScheduleLoopedBFS, 2, "FB"),
    (torch_schedules.ScheduleInterleavedZeroBubble, 2, "FIW"),
    (torch_schedules.ScheduleZBVZeroBubble, 2, "FIW"),
    (torch_schedules.ScheduleDualPipeV, 2, "FBIW"),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("schedule", "local", "kinds"), MULTI, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_files_dumped_by_torch_load(
    schedule: Any, local: int, kinds: str, form: str, ranks: int, tmp_path: Path
) -> None:
    path = tmp_path / "torch.csv"
    microbatches = 2 * ranks
    dumped = schedule(torch_stages(local * ranks, ranks, local), microbatches, loss)
    dumped._dump_csv(str(path), form)
    program = from_csv(path)
    validate(program)
    assert {op.kind for ops in program.ranks for op in ops} <= set(kinds)
    assert (program.num_ranks, len(program.stages), program.num_microbatches) == (ranks, local * ranks, microbatches)
    assert program.num_chunks == 1
    # The ops are torch's, in torch's order.
    theirs = [flat(action) for action in dumped.pipeline_order[ranks - 1]]
    assert [str(op) for op in program.ranks[ranks - 1]] == [cell for cells in theirs for cell in cells]
    assert len(lower(program).streams) == ranks


def flat(action: Any) -> list[str]:
    if action is None:
        return []
    return [str(part) for part in action.sub_actions or (action,)]


@pytest.mark.parametrize("microbatches", [4, 6, 12])
def test_torch_1f1b_is_ours(microbatches: int, tmp_path: Path) -> None:
    (stage,) = torch_stages(4, 4, 1)
    order = torch_schedules.Schedule1F1B(stage, microbatches, loss)._get_pipeline_order()
    assert order is not None
    # torch 2.13 writes the last row from microbatch 1 on (3F1 … 3Fm) although it runs from 0 on: what is copied here.
    last = [f"3{kind}{i}" for i in range(microbatches) for kind in "FB"]
    with open(tmp_path / "torch.csv", "w", newline="") as file:
        csv.writer(file).writerows([*(order[rank] for rank in range(3)), last])
    program = from_csv(tmp_path / "torch.csv")
    validate(program)
    assert program.ranks == build("1f1b", Shape(4, microbatches, 4)).ranks


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([["0F0", "0F0", "0B0"]], "0F0 appears twice: on rank 0 and on rank 0."),
        ([["0F0", "0B0", "0B0"]], "0B0 appears twice: on rank 0 and on rank 0."),
        ([["0F1", "0B1"]], "names microbatch 1 but has no op of microbatch 0."),
        ([["0F0garbage", "0B0"]], "is not an op"),
        ([["0F0", "1B0", "0B0"], ["1F0"]], None),
        ([["1F0", "1B0"], ["0B0", "0F0"]], None),
        ([["0F0", "0B0"], ["1B0", "1F0"]], None),
    ],
)
def test_what_torch_accepts_and_what_not(rows: list[list[str]], sentence: str | None, tmp_path: Path) -> None:
    """Both refuse the last three; the first four torch takes for good."""
    with open(tmp_path / "bad.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(ProgramError, match=sentence):
        validate(from_csv(tmp_path / "bad.csv"))
    actions = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    if sentence is not None:
        torch_schedules._validate_schedule(actions, len(rows), len(rows), 1)
    else:
        with pytest.raises(AssertionError):
            torch_schedules._validate_schedule(actions, len(rows), len(rows), 1)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_torch_interleaved_is_ours(microbatches: int) -> None:
    theirs = torch_schedules.ScheduleInterleaved1F1B(torch_stages(12, 4, 3), microbatches, loss).pipeline_order
    ours = format_rows(build("interleaved-1f1b", Shape(4, microbatches, 12, virtual_stages=3)))
    assert ours == [[str(action) for action in theirs[rank] if action is not None] for rank in range(4)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", Shape(4, 8, 4)),
        ("1f1b", Shape(4, 2, 4)),
        ("gpipe", Shape(3, 5, 3)),
        ("interleaved-1f1b", Shape(4, 8, 8)),
        ("interleaved-1f1b", Shape(2, 4, 6, virtual_stages=3)),
    ],
)
def test_our_files_load_in_torch(name: str, shape: Shape, tmp_path: Path) -> None:
    program = build(name, shape)
    path = tmp_path / "ours.csv"
    to_csv(program, path)
    num_stages = len(program.stages)
    runtime = torch_schedules._PipelineScheduleRuntime(
        torch_stages(num_stages, shape.ranks, num_stages // shape.ranks), shape.microbatches, loss
    )
    runtime._load_csv(str(path))  # reads every cell, validates, inserts communication
    assert format_rows(program) == [
        [str(action) for action in runtime.pipeline_order[rank]] for rank in range(shape.ranks)
    ]
    assert runtime.stage_index_to_group_rank == {stage: stage % shape.ranks for stage in range(num_stages)}
    bare = {  # what torch's simulator can read of torch's own lowering
        rank: [action for action in actions if "SHARD" not in str(action) and "REDUCE" not in str(action)]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    torch_schedules._simulate_comms_compute(bare, runtime.stage_index_to_group_rank.__getitem__, num_stages)


def test_split_programs_load_in_torch(tmp_path: Path) -> None:
    path = tmp_path / "zb.csv"
    torch_schedules.ScheduleZBVZeroBubble(torch_stages(8, 4, 2), 8, loss)._dump_csv(str(path), "compute_only")
    to_csv(from_csv(path), path)
    runtime = torch_schedules._PipelineScheduleRuntime(torch_stages(8, 4, 2), 8, loss)
    runtime._load_csv(str(path))
