"""Schedules of the catalogue in torch's runtime, and torch's own schedules with our order of communication."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.lowering.torch_actions import action_rows, compute_rows, with_fsdp
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Op
from helixpipe.program.text import parse_cell
from helixpipe.torch_pipelining import relower, schedule, stages_of_rank
from schedules import CATALOGUE, Shape, build
from tests.distributed import run_ranks
from tests.program.test_torch_programs import loss, torch_stages
from tests.selection import graded
from tests.torch_pipelining.queues import Queues, ends, makespan
from tests.torch_pipelining.steps import OWN, catalogue_beside_torch, relowered_beside_torch

QUEUES: tuple[Queues, ...] = ("pair", "direction", "rank")
TORCH = [
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleInterleaved1F1B", 3),
    ("ScheduleLoopedBFS", 2),
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleDualPipeV", 2),
]
SIZES = [(p, m) for p in (2, 3, 4, 6, 8) for m in (p, 2 * p, 3 * p, 4 * p)]
PROGRAMS = [
    (*each, *size) for each in TORCH for size in SIZES if each[0] != "ScheduleDualPipeV" or size[1] >= 2 * size[0]
]
CORE = [case for case in PROGRAMS if case[2:] in ((2, 4), (4, 8))]
MESSAGE = 0.1
"""Of the time of a forward of one stage, as `relower` takes it to be."""


def made_by_torch(name: str, local: int, p: int, m: int, defer: bool = False) -> Any:
    made = getattr(torch_schedules, name)(torch_stages(local * p, p, local), m, loss, defer_pp_recv=defer)
    made._prepare_schedule_with_comms(made.pipeline_order)
    return made


def cells(made: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in made.pipeline_order_with_comms.values()]


def own_actions(row: list[str]) -> list[str]:
    return [cell for cell in row if "SEND" not in cell and "RECV" not in cell]


def test_there_are_as_many_programs_as_were_counted() -> None:
    assert len(PROGRAMS) == 115


@pytest.mark.parametrize("case", graded(PROGRAMS, CORE), ids=lambda case: "-".join(map(str, case)))
def test_no_program_of_torch_stops_once_relowered_nor_takes_longer(case: tuple[str, int, int, int]) -> None:
    """Whatever torch had deferred. With one queue a direction it takes no longer than torch's order that ends there;
    with queues shared by both directions, or by all of a rank, 1.02 of that."""
    theirs, made = cells(made_by_torch(*case)), made_by_torch(*case, defer=True)
    before = cells(made)
    assert relower(made) is made
    ours = cells(made)
    best, torchs = (makespan(rows, MESSAGE, "direction") for rows in (ours, theirs))
    assert best is not None and torchs is not None and best <= torchs * (1 + 1e-9)
    assert all((time := makespan(ours, MESSAGE, queues)) is not None and time <= 1.02 * best for queues in QUEUES)
    assert [own_actions(row) for row in ours] == [own_actions(row) for row in before]
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]


def test_torch_s_deferred_order_stops() -> None:
    """What `relower` is for; in the docs as figures."""
    stopped = {
        queues: sum(makespan(cells(made_by_torch(*case, defer=True)), MESSAGE, queues) is None for case in CORE)
        for queues in QUEUES
    }
    assert stopped == {"pair": 11, "direction": 4, "rank": 12}


EXPRESSIBLE = [name for name in CATALOGUE if not CATALOGUE[name].spread and not CATALOGUE[name].chunks]
VIRTUAL = {"interleaved-1f1b": 2, "zb-interleaved": 2, "hanayo": 2}


def cases(p: int) -> list[tuple[str, int | None, int]]:
    """Every schedule that torch's runtime can run."""
    names = [name for name in EXPRESSIBLE if not CATALOGUE[name].one_rank]
    return [(name, VIRTUAL.get(name, 1 if CATALOGUE[name].virtual_stages else None), 2 * p) for name in names]


@pytest.mark.parametrize("ranks", graded([2, 4], [2]))
def test_gradients_are_torch_s_own_to_the_bit(ranks: int) -> None:
    """Of the same ops under torch's communication; of torch's own schedule of the name, to rounding where that sums
    microbatches in another order."""
    every = cases(ranks)
    assert len(every) >= 10
    for results in run_ranks(catalogue_beside_torch, ranks, every):
        for (name, _, _), (values, different, own) in zip(every, results, strict=True):
            assert values >= 4 and different == [], name
            assert own < (1e-6 if name in ("zbv", "zb-interleaved") else 1e-30), name
    assert set(OWN) <= {name for name, _, _ in every}


def test_one_rank_runs_as_well() -> None:
    for (values, different, _), *_ in run_ranks(catalogue_beside_torch, 1, [("none", None, 3)]):
        assert values == 7 and different == []


@pytest.mark.parametrize("ranks", graded([2, 4], [2]))
def test_relowering_changes_no_bit(ranks: int) -> None:
    every = [(name, local, 2 * ranks) for name, local in TORCH]
    for results in run_ranks(relowered_beside_torch, ranks, every):
        for case, (values, different) in zip(every, results, strict=True):
            assert values > 4 and different == [], case


def test_pairs_stay_one_action_and_send_after_both() -> None:
    made = relower(made_by_torch("ScheduleDualPipeV", 2, 4, 8))
    pairs = 0
    for row in cells(made):
        sent: set[str] = set()
        for cell in row:
            if "OVERLAP" in cell:
                pairs += 1
                assert (
                    not {f"{op.stage}SEND_{'F' if op.kind == 'F' else 'B'}{op.microbatch}" for op in parse_cell(cell)}
                    & sent
                )
            if "SEND" in cell:
                sent.add(cell)
    assert pairs > 8


def test_a_pair_that_waits_for_itself_is_refused() -> None:
    made = made_by_torch("ScheduleInterleaved1F1B", 2, 2, 4)
    for rank, row in made.pipeline_order_with_comms.items():
        text = [str(action) for action in row]
        if "3F0" in text and "3B0" in text:
            parts = tuple(torch_schedules._Action.from_str(cell) for cell in ("1F3", "3B0"))
            kept = [action for action in row if str(action) not in ("1F3", "3B0")]
            pair = torch_schedules._Action(-1, torch_schedules.OVERLAP_F_B, None, parts)
            made.pipeline_order_with_comms[rank] = [pair, *kept]
    with pytest.raises(ProgramError, match="comes before"):
        relower(made)


def test_what_has_no_actions_is_refused() -> None:
    (stage,) = torch_stages(2, 2, 1)
    with pytest.raises(UserError, match="Schedule1F1B has no actions to be put into another order"):
        relower(torch_schedules.Schedule1F1B(stage, 4, loss))


def test_fsdp_gathers_before_use_and_reduces_once() -> None:
    """As torch does: the stages of the next three ops are there, others are not; each is reduced after its last W."""
    row = with_fsdp([(Op("F", stage, mb),) for mb in range(2) for stage in range(5)] + [(Op("B", 4, 0),)])
    held: set[str] = set()
    reduced = []
    for place, between in enumerate(row.between):
        for cell in between:
            if cell.endswith("UNSHARD"):
                held.add(cell[0])
            elif cell.endswith("RESHARD"):
                held.remove(cell[0])
            else:
                reduced.append((place, cell))
        coming = dict.fromkeys(str(group[0].stage) for group in row.groups[place:])
        assert held == set(list(coming)[:3])
    assert reduced == [(len(row.groups), "4REDUCE_GRAD")]


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("seq1f1b", Shape(2, 4, 4, chunks=2), "schedule seq1f1b runs sequences in chunks, which torch"),
        ("helix", Shape(2, 4, 4), "which torch.distributed.pipelining's runtime has no action for"),
        ("weipipe", Shape(2, 4, 4), "has weights that travel between ranks"),
        ("chimera", Shape(2, 4, 4), "runs a stage on several ranks"),
        ("1f1b", Shape(2, 4, 4, offload=OffloadOptions("0.5")), "says what becomes of single units' activations"),
        ("1f1b", Shape(2, 4, 4, recompute=RecomputeOptions("full")), "recomputes activations itself"),
    ],
)
def test_what_torch_cannot_run_is_refused(name: str, shape: Shape, sentence: str) -> None:
    with pytest.raises(ProgramError, match=sentence):
        compute_rows(build(name, shape))


def test_schedules_made_for_chunks_are_refused() -> None:
    for name in CATALOGUE:
        if CATALOGUE[name].chunks:
            with pytest.raises(
                ScheduleError, match=f"^schedule {name} runs sequences in chunks, which torch's runtime"
            ):
                stages_of_rank(name, 0, 2, 4)


def test_stages_that_are_not_the_schedule_s_are_refused() -> None:
    assert stages_of_rank("zbv", 0, 2, 4) == [0, 3]
    with pytest.raises(ScheduleError, match="has stages 0, 3 on rank 0, but the PipelineStages given are 0, 1"):
        schedule("zbv", torch_stages(4, 2, 2), 4, loss)
    with pytest.raises(ScheduleError, match="has 2 ranks and 2 stages, but the PipelineStages were built for 2 and 4"):
        schedule("1f1b", torch_stages(4, 2, 1), 4, loss)
    with pytest.raises(ScheduleError, match="is for 4 microbatches, but n_microbatches is 6"):
        schedule(build("1f1b", Shape(2, 4, 2)), torch_stages(2, 2, 1), 6, loss)
    with pytest.raises(ScheduleError, match="no option zb_max: known are zb_max_inflight"):
        stages_of_rank("zb1p", 0, 2, 4, zb_max=1)


def test_options_and_files_reach_the_program(tmp_path: Path) -> None:
    made = schedule("zb1p", torch_stages(4, 4, 1), 8, loss, zb_max_inflight=1)
    most = schedule("zb1p", torch_stages(4, 4, 1), 8, loss, zb_max_inflight=4)
    assert made.pipeline_order[0] != most.pipeline_order[0]
    with pytest.raises(ProgramError, match=r"absent\.csv"):
        stages_of_rank(str(tmp_path / "absent.csv"), 0, 2, 4)


def test_sends_and_receives_pair_up() -> None:
    rows = action_rows(program := build("zbv", Shape(4, 8, 8)), compute_rows(program))
    sent = [ends(cell)[0] for row in rows for cell in row if "SEND" in cell]
    received = [ends(cell)[0] for row in rows for cell in row if "RECV" in cell]
    assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)


def stopped(programs: list[tuple[str, int, int, int]], defer: bool) -> list[int]:
    """How many never end, by kind of queues."""
    rows = [cells(made_by_torch(*case, defer=defer)) for case in programs]
    return [sum(makespan(each, MESSAGE, queues) is None for each in rows) for queues in QUEUES]


UPSTREAM = Path(__file__).resolve().parents[2] / "docs" / "upstream"


@pytest.mark.thorough
def test_the_report_to_torch_reproduces() -> None:
    script = UPSTREAM / "deferred_receives.py"
    code = [line for line in script.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 20
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = (UPSTREAM / "deferred_receives.md").read_text(encoding="utf-8")
    assert all(f"    {line}\n" in text for line in done.stdout.splitlines()) and "SEND" in done.stdout


@pytest.mark.thorough
def test_the_report_s_figures_and_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (UPSTREAM / "deferred_receives.md").read_text(encoding="utf-8")
    table = [
        [int(number) for number in re.findall(r"\| (\d+)", line)] for line in text.splitlines() if "| one for" in line
    ]
    assert stopped(PROGRAMS, defer=True) == [row[0] for row in table]
    assert stopped(PROGRAMS, defer=False) == [row[2] for row in table]
    source = inspect.getsource(torch_schedules._defer_recv_ops)
    changed = source.replace("if rank < peer:", "if True:")
    assert changed != source
    monkeypatch.setattr(torch_schedules, "_defer_recv_ops", None)
    exec(compile(changed, "patched", "exec"), vars(torch_schedules))
    assert stopped(PROGRAMS, defer=True) == [row[1] for row in table]
