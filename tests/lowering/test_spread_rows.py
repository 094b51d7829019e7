"""Chunks of a row on several ranks: every block of keys and values is where it is read, every sum comes home, once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random

import pytest

from helixpipe.common.errors import ProgramError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.program.json_text import from_json, to_json
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.program.stages import Stage, model_pieces
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import simulate
from helixpipe.simulate.sweep import sweep
from schedules import Shape, build
from schedules.sppo import SppoOptions
from tests.lowering.random_programs import random_costs
from tests.lowering.rendezvous import Machine

CHUNKS = 4


def program_of(rng: Random) -> Program:
    """Layers cut around attention, or before them; weights shipped; every unit of a layer on some rank, in a random
    order that respects what units wait for."""
    ranks, fine = rng.randint(2, 3), rng.random() < 0.7
    chain = model_pieces(2)
    if fine:
        runs = [tuple(run) for _, run in groupby(chain, key=lambda piece: piece.kind == "attn")]
    else:
        runs = [chain[:1], chain[1:6], chain[6:11], chain[11:]]
    stages = tuple(
        Stage(run, "shipped", owner=rng.randrange(ranks))
        if {"qkv", "proj"} & {each.kind for each in run}
        else Stage(run)
        for run in runs
    )
    alike = rng.random() < 0.7  # attention where its queries are
    homes = {(stage, chunk): rng.randrange(ranks) for stage in range(len(stages)) for chunk in range(CHUNKS)}
    for stage, each in enumerate(stages):
        for chunk in range(CHUNKS):
            if alike and each.pieces[0].kind == "attn":
                homes[stage, chunk] = homes[stage - 1, chunk]
            elif each.placement == "resident" and each.has_weights:
                homes[stage, chunk] = homes[stage, 0]
    drawn = sorted((stage * rng.choice((1, 2)) + chunk, stage, chunk) for stage, chunk in homes)
    forwards = _in_turn([(stage, chunk) for _, stage, chunk in drawn])
    orders: list[list[Op]] = [[] for _ in range(ranks)]
    for stage, chunk in forwards:
        orders[homes[stage, chunk]].append(Op("F", stage, 0, chunk))
    for stage, chunk in reversed(forwards):
        orders[homes[stage, chunk]].append(Op("B", stage, 0, chunk))
    return Program("spread", stages, tuple(map(tuple, orders)), uniform(1, CHUNKS), kv_blocks=True)


def _in_turn(units: list[tuple[int, int]]) -> list[tuple[int, int]]:
    done: list[tuple[int, int]] = []
    while len(done) < len(units):
        done.append(next(
            (stage, chunk) for stage, chunk in units if (stage, chunk) not in done
            and (not stage or (stage - 1, chunk) in done) and (not chunk or (stage, chunk - 1) in done)
        ))  # fmt: skip
    return done


class SpreadMachine(Machine):
    """Keeps which blocks of keys and values each rank has, and whose sums of gradients, as an executor would."""

    def check_run(self, rank: int, op: Op) -> None:
        program, graph = self.lowered.program, self.lowered.graph
        assert op == program.ranks[rank][len(self.ran[rank])]
        if program.stages[op.stage].has_attention:
            kind = "keys_values" if op.kind == "F" else "kv_gradients"
            waited = {m.unit for m in self.waited[rank] if m.kind == kind}
            if op.kind == "F":
                for chunk in range(op.chunk):
                    made = {Op("F", op.stage - back, 0, chunk) for back in range(2)}
                    assert made & set(self.ran[rank]) or op._replace(chunk=chunk).unit in waited
            else:
                later = [each for each in self.ran[rank] if each.kind == "B" and each.stage == op.stage]
                assert all(each.chunk > op.chunk for each in later)
        came = {m for m in self.waited[rank] if m.consumer == op}
        assert came == {m for m in graph.messages if m.consumer == op and m.target == rank and not m.of_stage} | {
            m for m in came if m.of_stage
        }
        self.travel.run(rank, op)


def check(program: Program, rng: Random) -> None:
    costs = random_costs(rng)
    lowered = lower(program, costs)
    for blocking in (False, True):
        assert SpreadMachine(lowered, rng, blocking).run()
    homes = {op: rank for rank, ops in enumerate(program.ranks) for op in ops}
    messages = Counter(
        (m.kind, m.unit, m.source, m.target) for m in lowered.messages if m.kind in ("keys_values", "kv_gradients")
    )
    expected: Counter[tuple[object, ...]] = Counter()
    for stage, each in enumerate(program.stages):
        for unit in (unit for unit in program.units() if unit.stage == stage and each.has_attention):
            home = homes[Op("F", *unit)]
            readers = {homes[Op("F", stage, 0, chunk)] for chunk in range(unit.chunk + 1, program.num_chunks)} - {home}
            for rank in readers:
                expected["keys_values", unit, home, rank] += 1
                if not program.forward_only:
                    expected["kv_gradients", unit, rank, home] += 1
    assert messages == expected
    simulation = simulate(lowered, costs)
    assert simulation.makespan >= simulation.ideal


@pytest.mark.parametrize("seed", range(25))
def test_blocks_are_where_they_are_read(seed: int) -> None:
    rng = Random(seed)
    program = program_of(rng)
    check(forward_only(program) if seed % 5 == 4 else program, rng)


@pytest.mark.parametrize(("p", "chunks", "way"), [(2, 3, "left"), (3, 5, "both"), (4, 4, "both")])
def test_multiplexed_programs(p: int, chunks: int, way: str) -> None:
    program = build("sppo", Shape(p, 1, p, chunks), SppoOptions(sppo_multiplex=way))
    check(program, Random(p))


def test_a_member_of_a_team_waits_for_keys_and_not_for_attention() -> None:
    program = build("sppo", Shape(2, 1, 2, 3), SppoOptions(sppo_multiplex="left"))
    lowered = lower(program)
    message: Transfer = next(m for m in lowered.messages if m.kind == "keys_values")
    assert message.producer == Op("F", 1, 0, 0) and message.consumer == Op("F", 2, 0, 1)
    back = next(m for m in lowered.messages if m.kind == "kv_gradients")
    assert back.producer == Op("B", 2, 0, 1) and back.consumer == Op("B", 1, 0, 0)


def test_blocks_come_and_go_chunk_by_chunk() -> None:
    """One rank, nothing else counted: after the last forward all keys and values are there, and during the backward of
    chunk c those up to c with the gradients of those before it."""
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["h100"], Layout(), 4096, fp32_kv_gradients=True)
    lengths = (2048, 1024, 1024)
    rows = build("terapipe", Shape(1, 1, 1, 3, chunk_lengths=lengths))
    blocks = replace(rows, kv_blocks=True)
    token = 2 * 4096 * 2  # keys and values in half precision
    alive = {}
    for program in (rows, blocks):
        lowered, bound = lower(program), BoundCosts(program, costs)
        buffers = [b for b in lowered.graph.buffers if b.kind in ("keys_values", "kv_gradients")]
        alive[program.kv_blocks] = sorted((b.kind, b.chunk, bound.size(b)) for b in buffers)
        assert sweep(lowered, bound, 0).activations > 0
    assert alive[False] == [("keys_values", -1, token * 4096), ("kv_gradients", -1, 2 * token * 3072)]
    assert alive[True] == [
        *(("keys_values", chunk, token * length) for chunk, length in enumerate(lengths)),
        *(("kv_gradients", chunk, 2 * token * length) for chunk, length in enumerate(lengths[:2])),
    ]
    graph = lower(blocks).graph
    freed = {
        op: [graph.buffers[n].chunk for n in graph.frees[task] if graph.buffers[n].kind == "kv_gradients"]
        for task, op in enumerate(graph.ops)
    }
    assert freed[Op("B", 0, 0, 1)] == [1] and freed[Op("B", 0, 0, 0)] == [0] and freed[Op("B", 0, 0, 2)] == []


def test_without_blocks_chunks_stay_on_one_rank(tmp_path: Path) -> None:
    program = build("sppo", Shape(2, 1, 2, 3), SppoOptions(sppo_multiplex="left"))
    to_json(program, tmp_path / "spread.json")
    assert from_json(tmp_path / "spread.json") == program
    with pytest.raises(ProgramError, match="keys and values of microbatch 0 in stage 2 stay on one rank"):
        lower(replace(program, kv_blocks=False))


def test_times_and_sizes_of_messages() -> None:
    """A block's keys and values in a message, in the type of its gradients on the way back."""
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["h100"], Layout(), 4096, fp32_kv_gradients=True)
    shape = Shape(2, 1, 2, 2, chunk_lengths=(2048, 2048), costs=costs)
    program = build("sppo", shape, SppoOptions(sppo_multiplex="left"))
    lowered, bound = lower(program, costs), BoundCosts(program, costs)
    for message in (each for each in lowered.messages if each.kind in ("keys_values", "kv_gradients")):
        tokens = program.workload.tokens(0)[message.unit.chunk]
        element = 2 if message.kind == "keys_values" else 4
        assert costs.size(bound.load(message.kind, message.ranks, message.unit).contents) == tokens * 2 * 4096 * element
    assert simulate(lowered, PieceTimes({"mlp": 1.0})).makespan > 0
