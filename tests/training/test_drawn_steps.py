"""Steps of documents as data may have them (of one token, all alike, one alone, all short, as long as can be, fewer and
more than there are microbatches) under every schedule that takes documents: planned and trained."""

from __future__ import annotations

from functools import cache
from itertools import chain

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.program import Op, Program
from helixpipe.program.workload import Slice, Workload
from megatron.pretrain.plan.documents import DocumentPlanner, StepRequest
from schedules import CATALOGUE, Schedule
from tests.distributed import run_ranks
from tests.selection import graded
from tests.training.drawn_steps import BALANCED, Steps, found_by_runs
from tests.training.steps import Run

LONGEST, SAMPLES = 24, 8
PLAIN = (
    f"--seq-length {LONGEST} --max-position-embeddings {LONGEST} --variable-seq-lengths --clip-grad 0 --lr 1e-30 "
    "--weight-decay 0 --eval-iters 1"
)

TAKERS = [schedule for schedule in CATALOGUE.values() if schedule.ragged]

ALL_KINDS = (3, 1, LONGEST, 1, 7, 2, 2, 2, 5)
KINDS = (((1, 1, 1, 1, 1), ALL_KINDS), ((6, 6, 6), (1,)))
"""All of one token, all kinds; all alike, one token."""

LAYOUTS = ("packed over two pipelines", "alone over two pipelines", "packed over context", "cut over two pipelines")
"""How documents are packed, and what the four ranks are beside two pipeline ranks."""

lengths = st.one_of(
    st.lists(st.integers(1, LONGEST), min_size=1, max_size=12),
    st.builds(lambda length, count: [length] * count, st.integers(1, LONGEST), st.integers(1, 9)),
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
    st.lists(st.sampled_from((1, LONGEST)), min_size=1, max_size=6),
).map(tuple)


EXPERT_LAYOUTS = (*LAYOUTS, "shared over two pipelines", "padded over two pipelines", "padded by twos over context")
"""The same with layers of experts, also where pipelines share these out, and of samples with padding behind them."""


def run_of(schedule: Schedule, layout: str, style: str = "llama", steps: int = 4) -> Run:
    """Of a schedule on four ranks."""
    flags = f"{PLAIN} --pipeline-schedule {schedule.name}"
    if layout.startswith("padded"):
        flags = flags.replace("--variable-seq-lengths", "--calculate-per-token-loss --num-workers 0")
        flags += " --micro-batch-size 2" * ("by twos" in layout)
    flags += f" {BALANCED}" * (style == "experts" and layout.startswith(("alone", "padded")))
    flags += " --num-virtual-stages-per-pipeline-rank 2" * schedule.virtual_stages
    flags += " --infinipipe-packing none" * layout.startswith("alone")
    flags += " --infinipipe-chunks 3" * layout.startswith("cut")
    context, shared = 1 + layout.endswith("context"), 1 + layout.startswith("shared")
    return Run(style, flags, 1, 1 if schedule.one_rank else 2, SAMPLES, context, steps, ep=shared)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_every_schedule_trains_on_all_kinds_as_one_process_does(part: int) -> None:
    """Every fourth schedule on some of them."""
    layouts = [LAYOUTS[number // 4 % len(LAYOUTS)] for number in range(len(TAKERS))]
    check_training(KINDS[part % 2], layouts[part::4], TAKERS[part::4])


@pytest.mark.thorough
@settings(max_examples=1, phases=(Phase.generate,))  # each example launches ranks
@given(
    st.lists(lengths, min_size=4, max_size=4).map(tuple),
    st.lists(st.sampled_from(LAYOUTS), min_size=len(TAKERS), max_size=len(TAKERS)),
)
def test_every_schedule_trains_on_them_as_one_process_does(steps: Steps, layouts: list[str]) -> None:
    check_training(steps, layouts, TAKERS)


FEW = [CATALOGUE[name] for name in ("helix", "1f1b", "weipipe", "zbv", "infinipipe", "interleaved-1f1b")]


@pytest.mark.parametrize("takers", graded((FEW, TAKERS), (FEW,)), ids=("few", "all"))
@settings(max_examples=1, phases=(Phase.generate,))
@given(
    st.lists(st.lists(st.integers(1, LONGEST), min_size=SAMPLES, max_size=SAMPLES).map(tuple), min_size=2, max_size=2),
    st.permutations(EXPERT_LAYOUTS),
)
def test_experts_count_documents_and_no_padding(
    takers: list[Schedule], steps: list[tuple[int, ...]], layouts: list[str]
) -> None:
    """Whatever pads: the ends of samples, of rows on context-parallel ranks, rows that make up a multiple, and rows
    that other pipelines have more of. Losses of routers are then those of each document in one process."""
    several = [layouts[number % len(layouts)] for number in range(len(takers))]
    check_training(tuple(steps), several, takers, ("experts",))


def check_training(
    steps: Steps, layouts: list[str], takers: list[Schedule], styles: tuple[str, ...] = ("llama", "gpt", "mixed")
) -> None:
    """Every weight's gradient, of two pipelines or context-parallel ranks, and the losses, in an evaluation too."""
    runs = [
        run_of(schedule, layout, style, len(steps))
        for schedule, layout, style in zip(takers, layouts, styles * len(TAKERS), strict=False)
    ]
    by_rank = run_ranks(found_by_runs, 4, runs, PLAIN, steps, timeout=1200.0)
    for number, run in enumerate(runs):
        for step, found in enumerate(chain.from_iterable(zip(*(each[number] for each in by_rank), strict=True))):
            said = f"{run}, documents of {steps[step // 4]} tokens"
            assert found.gradient[0] < 1e-9, (said, found.gradient)
            assert found.loss < 1e-6 and found.evaluation < 1e-6, said


@settings(max_examples=1)
@given(lengths, st.sampled_from(LAYOUTS))
@example((1,), LAYOUTS[0])
@example((1, 1, 1, 1, 1), LAYOUTS[2])
@example((LONGEST, LONGEST), LAYOUTS[3])
def test_every_schedule_has_a_plan_for_them(documents: tuple[int, ...], layout: str) -> None:
    """Which has every document whole, places the model as every other step's does, and says what a step takes: of
    longer documents more."""
    for schedule in TAKERS:
        planner, placement = planner_of(schedule.name, layout)
        pipelines = planner.config.parallel.data_parallel_size
        for quick in (False, True):
            plans = [planner(StepRequest("train", 0, documents, rank, quick)) for rank in range(pipelines)]
            assert sorted(number for plan in plans for number in plan.numbers) == list(range(len(documents)))
            for plan in plans:
                program = plan.lowered.program
                assert placed(program) == placement, schedule.name
                workload = program.workload
                trained = dict(chain.from_iterable(workload.documents(row) or () for row in range(len(workload))))
                assert [trained[each] for each in range(len(plan.numbers))] == [documents[n] for n in plan.numbers]
                assert 0 <= plan.report.bubble < 1 and plan.report.tokens == sum(documents)
            longest = (LONGEST,) * len(documents)
            longer = [planner(StepRequest("train", 0, longest, rank, quick)) for rank in range(pipelines)]
            if max(documents) <= LONGEST // 4:
                taken, more = (max(plan.report.predicted for plan in each) for each in (plans, longer))
                assert taken < more, schedule.name


@cache
def planner_of(name: str, layout: str) -> tuple[DocumentPlanner, list[object]]:
    """And how the longest documents there may be place the model."""
    planner = DocumentPlanner(run_of(CATALOGUE[name], layout).config(0, 4))
    return planner, placed(planner.nominal())


def placed(program: Program) -> list[object]:
    return [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]


@settings(max_examples=25)
@given(lengths)
@example((1,))
def test_what_a_chunk_takes_depends_on_it_alone(documents: tuple[int, ...]) -> None:
    """And not on what else is in its step: not even a chunk of one token's, which might be taken for a whole."""
    planner, _ = planner_of("seq1f1b", LAYOUTS[0])
    program = planner.nominal()
    rows = tuple(((Slice(number, 0, length),),) for number, length in enumerate(documents))
    beside = (*rows, ((Slice(len(rows), 0, LONGEST),),))
    alone, among = (
        BoundCosts(Program("rows", program.stages, ((),) * 2, Workload(each)), planner.costs) for each in (rows, beside)
    )
    for number in range(len(rows)):
        for kind in "FB":
            op = Op(kind, 0, number)
            assert alone.op_time(op) == among.op_time(op)
