"""Emulated clusters: the engine runs all of a lowered program on ops that wait. No time is looked at."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks import run
from benchmarks.report import written_into
from helixpipe.lowering.project import LoweredProgram
from helixpipe.simulate.simulator import simulate
from netlab import emulate, skewed
from netlab.emulated_costs import CASES, EmulatedCosts, Link, Size
from netlab.emulated_ranks import Emulated, emulated_steps
from tests.distributed import run_ranks

RANKS, STEPS = 2, 1
SIZE = Size(RANKS, 4, 4, tokens=32, hidden=16, time_scale=1e-3)
NAMES = ("1f1b, recomputed", "zbv", "seq1f1b, k = 4", "infinipipe, documents", "helix", "weipipe")
LINK = Link(1e-5, 1e-9)


def programs(costs: EmulatedCosts) -> dict[str, LoweredProgram]:
    return {name: CASES[name].lowered(SIZE, costs) for name in NAMES}


def rank_steps(rank: int, world_size: int) -> dict[str, Emulated]:
    torch.set_num_threads(1)
    costs = SIZE.costs(LINK, LINK)
    return emulated_steps(rank, programs(costs), SIZE, costs, STEPS)


def test_all_ops_of_a_program_run_and_every_unit_adds_to_its_weights_once() -> None:
    results = run_ranks(rank_steps, RANKS)
    for name, lowered in programs(SIZE.costs(LINK, LINK)).items():
        program = lowered.program
        gradients: Counter[str] = Counter()
        for rank, result in enumerate(results):
            found = result[name]
            assert [op for op, _, _ in found.record.ops] == list(program.ranks[rank]), name
            assert len(found.seconds) == STEPS
            gradients.update(found.gradients)
        units = sum(len(chunks) for chunks in program.workload.microbatches)
        pieces = [str(piece) for stage in program.stages for piece in stage.pieces if piece.kind != "attn"]
        assert gradients == dict.fromkeys(pieces, units * (1 + STEPS)), name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--schedules 1f2b", "did you mean '1f1b'?"),
        ("--ranks 1", "--ranks 1 must be at least 2."),
        ("--steps 0", "--steps 0 must be at least 1."),
        ("--ranks-per-host 3", "--ranks-per-host 3 must divide --ranks 8 into two or more."),
        ("--rate fast", "--rate 'fast' is not a rate"),
        ("--time-scale 0", "--time-scale 0 must be more than 0."),
    ],
)
def test_what_is_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["emulate", *flags.split()]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_all_ways_of_a_step_train_on_the_same_documents() -> None:
    lengths = [3, 40, 64, 7, 2, 128, 9, 30]
    size = Size(RANKS, len(lengths), 2 * RANKS, tokens=32, hidden=16, time_scale=1e-3)
    costs = size.costs(LINK, LINK)
    for way, lowered in skewed.programs(size, costs, lengths).items():
        tokens: Counter[int] = Counter()
        for chunks in lowered.program.workload.microbatches:
            for part in (part for chunk in chunks for part in chunk):
                tokens[part.document] += part.length
        assert tokens == dict(enumerate(lengths)), way
        assert simulate(lowered, costs, "s").ideal == pytest.approx(
            sum(document_time(costs, size, length) for length in lengths) / RANKS
        ), way


def document_time(costs: EmulatedCosts, size: Size, length: int) -> float:
    """Of all ops of a document: a forward once, a backward twice; attention by the square of its tokens."""
    share = length / size.tokens
    layer = share * sum(costs.forward[piece] for piece in ("norm", "qkv", "proj", "mlp"))
    layer += share**2 * costs.forward["attn"]
    return 3 * (size.layers * layer + share * (costs.forward["embed"] + costs.forward["head"]))


def test_tables_have_their_places_in_the_page() -> None:
    where = {"ranks": 8, "network": "pairs", "rate": "50mbit", "time_scale": 2.0, "ideal": 1.5}
    rows = [
        {"schedule": "near", "predicted": 2.0, "seconds": [2.02, 2.06, 2.04], **where},
        {"schedule": "off", "predicted": 2.0, "seconds": [2.1], **where, "network": "adapters"},
        {"schedule": "larger", "predicted": 2.0, "seconds": [2.0], **where, "ranks": 16},
    ]
    page = written_into(emulate.PAGE.read_text(encoding="utf-8"), emulate.tables(rows))
    pairs, more, adapters = (page.split(f"<!-- bench: {name} -->\n")[1] for name in ("pairs", "more", "adapters"))
    assert pairs.splitlines()[2].startswith("| near | 2 x, 50mbit | 2.000 | 1.020 | 1.33 |")
    assert more.splitlines()[2].startswith("| larger, 16 ranks |")
    assert "1.050 (!)" in adapters.splitlines()[2]
