"""What the ranks of test_equality.py run: every schedule on real ranks against plain megatron-core in one process."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from helixpipe.model.device import device, prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state

from helixpipe.costs.by_hand import PieceTimes, parse_piece_times, unit_costs
from helixpipe.lowering.lower import lower
from helixpipe.model import Microbatch, PipelineModel
from helixpipe.planning.recompute import RecomputeOptions, place_early
from helixpipe.program.program import Op, Piece, Program, Stage, forward_only, model_pieces, parse_rows
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.gloo import GlooTransport
from helixpipe.runtime.transport import Alone, Transport, make_transport
from schedules import Shape, build
from schedules.helix import HelixOptions
from schedules.weipipe import WeipipeOptions
from tests.model.common import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    gradients_of,
    make_config,
    make_options,
    make_reference,
    number_or_infinity,
    reference_forward,
    set_parallel,
    worst,
)
from tests.model.equality import whole

Reference = tuple[dict[str, Tensor], dict[int, float]]
"""Gradients by name and the loss sum of each microbatch."""


@dataclass(frozen=True)
class Case:
    """One run. `layers` of the model; v: virtual stages; tied: whether head and embedding share their weight."""

    schedule: str
    pp: int
    m: int
    style: str
    tp: int = 1
    v: int | None = None
    tied: bool = False
    sequence_parallel: bool = False
    layers: int = 4
    dropout: float = 0.0
    split: bool = False
    """B as I and W, every W as late as the rank's order allows."""
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    lengths: tuple[int, ...] = ()
    """Tokens of each chunk of a sequence; () for one chunk."""
    cut_after: str = ""
    """Cut the model over two ranks inside layer 2, after the piece of this kind."""
    memory_limit: float | None = None
    """In microbatch-layers, for schedules that choose by it what to recompute."""
    folds: int = 0
    """Of helix: microbatches of a slot."""
    ship: str = "none"
    """Of helix: the weights that travel with attention."""
    spread: bool = True
    """Of helix: heads on all ranks."""
    mlp_chunk: int = 0
    """Tokens of a slice of the MLP; 0: whole."""
    weipipe: WeipipeOptions | None = None
    """Of the WeiPipe family."""
    late: bool = False
    """Every message held back for a random time, so that they overtake each other."""
    dtype: torch.dtype = torch.float64
    """Of weights, hidden states and the reference."""

    def __str__(self) -> str:
        marks = (
            [f"v{self.v}"] * (self.v is not None)
            + ["sp"] * self.sequence_parallel
            + ["dropout"] * (self.dropout > 0)
            + ["split"] * self.split
            + _recompute_marks(self.recompute)
            + [f"cut-after-{self.cut_after}"] * bool(self.cut_after)
            + [f"folds{self.folds}-L{self.layers}-ship-{self.ship}"] * bool(self.folds)
            + ["one-head"] * (not self.spread)
            + (["tied"] if self.tied else ["untied"]) * (self.tied != (self.style == "gpt"))
            + ["chunks-" + "-".join(map(str, self.lengths))] * bool(self.lengths)
            + [f"mlp-slices-{self.mlp_chunk}"] * bool(self.mlp_chunk)
            + [f"L{self.layers}-limit-{self.memory_limit}"] * (self.memory_limit is not None)
            + _weipipe_marks(self.schedule, self.layers, self.weipipe or WeipipeOptions())
            + ["late"] * self.late
            + [str(self.dtype).removeprefix("torch.")] * (self.dtype is not torch.float64)
        )
        return "-".join([self.schedule, self.style, f"p{self.pp}", f"tp{self.tp}", f"m{self.m}", *marks])

    def alone(self) -> Case:
        """The run on one rank that this one is compared with, of all that the comparison depends on."""
        alone = Case("none", 1, self.m, self.style, tied=self.tied, layers=self.layers, dtype=self.dtype)
        if not self.dropout:
            return alone
        schedule = "seq1f1b" if self.lengths else "none"
        return replace(alone, schedule=schedule, dropout=self.dropout, lengths=self.lengths)

    @cache  # noqa: B019 (cases are as old as the process)
    def program(self) -> Program:
        costs = PieceTimes(parse_piece_times("qkv=1,attn=3,mlp=2")) if self.memory_limit is not None else None
        chunks, lengths = max(len(self.lengths), 1), self.lengths or None
        shape = Shape(self.pp, self.m, self.layers, chunks, self.v, lengths, costs, memory_limit=self.memory_limit)
        if self.schedule == "shared middle":
            return shared_middle()
        options: Any = self.weipipe
        if self.schedule == "helix":
            options = HelixOptions(self.folds, cast(Any, self.ship), False, helix_spread_head=self.spread)
        program = build(self.schedule, shape, options)
        if self.cut_after:
            chain = model_pieces(self.layers)
            cut = chain.index(Piece(self.cut_after, 2)) + 1
            program = replace(program, stages=(Stage(chain[:cut]), Stage(chain[cut:])))
        if self.split:
            program = replace(program, ranks=tuple(_split(ops) for ops in program.ranks))
        if self.recompute.granularity is not None:
            program = replace(program, stages=self.recompute.stages(program.stages))
        return place_early(program, unit_costs()) if self.recompute.recompute_early else program


def shared_middle() -> Program:
    """Rank 0 runs the ends; the middle stage of two microbatches on rank 0, of two on rank 1."""
    chain = model_pieces(3)
    stages = (Stage(chain[:6]), Stage(chain[6:11], "replicated"), Stage(chain[11:]))
    first = "0F0,0F1,0F2,0F3,1F0,1F1,2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,1B0,1B1,0B0,0B1,0B2,0B3"
    return Program("shared middle", stages, parse_rows([first.split(","), ["1F2", "1F3", "1B2", "1B3"]]), 4)


def _recompute_marks(options: RecomputeOptions) -> list[str]:
    marks = (options.granularity, options.recompute_method, options.recompute_num_layers, options.recompute_modules)
    return [str(mark) for mark in marks if mark] + ["inside"] * (not options.recompute_early)


def _weipipe_marks(schedule: str, layers: int, options: WeipipeOptions) -> list[str]:
    if not schedule.startswith(("weipipe", "wzb")):
        return []
    turns = ["turn-by-turn"] * (not options.weipipe_eager)
    slots = [f"slots{options.weipipe_slots}"] * (options.weipipe_slots != WeipipeOptions().weipipe_slots)
    return [f"L{layers}", *turns, *slots, *["bf16-gradients"] * (options.weipipe_grad_dtype == "bf16")]


def _split(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """I where B was; the W of all but every third unit at the end, in another order than their I's."""
    now, late = [], []
    for op in ops:
        now.append(op._replace(kind="I") if op.kind == "B" else op)
        if op.kind == "B":
            (now if op.microbatch % 3 == 2 else late).append(op._replace(kind="W"))
    return (*now, *reversed(late))


def microbatches(count: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(11)
    return [
        Microbatch(
            torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(device()),
            torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(device()),
            torch.randint(0, 2, (BATCH, SEQUENCE), generator=generator).float().to(device()),
        )
        for _ in range(count)
    ]


class LateTransport(GlooTransport):
    """Every message leaves up to 20 ms late, each by a time of its own: as over links of several speeds."""

    def _start(self, tensors: list[Tensor], target: int, number: int) -> None:
        start, seconds = super()._start, random.Random(number).uniform(0.0, 0.02)

        def later() -> None:
            time.sleep(seconds)
            start(tensors, target, number)

        thread = threading.Thread(target=later, daemon=True)
        thread.start()
        self._starting.append(thread)


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For each case the largest relative error of the gradients and the parameter's name, the losses' error, and the
    forward-only losses' error. The ranks share the one-process references out among themselves. Process groups are made
    once for each size, since gloo gives every group threads of its own."""
    set_parallel(tp=1)
    alone = list(dict.fromkeys(case.alone() for case in cases))
    shares: list[dict[Case, Reference]] = [{} for _ in range(world_size)]
    torch.distributed.all_gather_object(shares, {each: reference(each) for each in alone[rank::world_size]})
    references = {each: found for share in shares for each, found in share.items()}
    results: dict[int, dict[str, Any]] = {}
    for tp, pp in sorted({(case.tp, case.pp) for case in cases}):
        set_parallel(tp=tp, pp=pp)
        transport = make_transport(parallel_state.get_pipeline_model_parallel_group(), device())
        for index, case in enumerate(cases):
            if (case.tp, case.pp) == (tp, pp):
                results[index] = run_case(case, *references[case.alone()], transport)
        transport.close()
    return [results[index] for index in range(len(cases))]


def run_case(case: Case, expected: dict[str, Tensor], losses: dict[int, float], transport: Transport) -> dict[str, Any]:
    if case.late:
        late = LateTransport(parallel_state.get_pipeline_model_parallel_group(), device())
        result = run_case(replace(case, late=False), expected, losses, late)
        late.close()
        return result
    model, executor = make_executor(case, transport)
    found = executor.run(make_step(case))[0]
    left = executor.keys_values.bytes_alive() + sum(left_in_tables(executor))
    if not case.program().ranks[executor.rank]:
        for parameter in model.replicated_parameters().values():  # run by the other ranks that hold it
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
    error = worst(gather(model, gradients_of(model)), expected)
    evaluator = Executor(lower(forward_only(case.program())), executor.rank, model, transport)
    evaluated = evaluator.run(make_step(case, training=False))[0]
    left += evaluator.keys_values.bytes_alive() + sum(left_in_tables(evaluator))
    assert list(_by_microbatch(evaluated)) == heads_of_rank(case.program(), executor.rank)
    return {
        "gradient": error,
        "losses": len(found),
        "loss": _loss_error(found, losses),
        "evaluation": 0.0 if case.dropout else _loss_error(evaluated, losses),
        "left": left,
        "keys and values": executor.keys_values.peak_bytes(),
    }


GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
SPLIT_VOCABULARY_TOLERANCE = 1e-6  # with a split vocabulary, float32 cross entropy sums in another order
BF16_GRADIENT_TOLERANCE = 2e-2  # of sums that travel in bfloat16, of 8 bits, and are rounded at each addition
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""megatron-core's cross entropy computes in float32; sums over tokens differ in order."""


def check(case: Case, results: list[dict[str, Any]]) -> None:
    """Assert that what `run_cases` returned for a case, by rank, is as it should be."""
    tolerance = GRADIENT_TOLERANCE[case.dtype]
    if case.tp > 1:
        tolerance = max(tolerance, SPLIT_VOCABULARY_TOLERANCE)
    if case.weipipe is not None and case.weipipe.weipipe_grad_dtype == "bf16":
        tolerance = max(tolerance, BF16_GRADIENT_TOLERANCE)
    for result in results:
        error, parameter = result["gradient"]
        assert error < tolerance, parameter
        assert result["loss"] < LOSS_TOLERANCE[case.dtype]
        assert result["evaluation"] < LOSS_TOLERANCE[case.dtype]
    reporting = 4 // case.pp  # the ranks of a stage, over data and tensor parallelism
    program, chunks = case.program(), max(len(case.lengths), 1)
    losses = [len(heads_of_rank(program, rank)) * chunks for rank in range(case.pp)]
    assert sum(losses) == case.m * chunks
    assert sorted(result["losses"] for result in results) == sorted(losses * reporting)
    assert all(result["left"] == 0 for result in results)
    assert any(result["keys and values"] > 0 for result in results) == bool(case.lengths)


def heads_of_rank(program: Program, rank: int) -> list[int]:
    """The microbatches whose head a rank runs."""
    head = len(program.stages) - 1
    return sorted({op.microbatch for op in program.ranks[rank] if op.stage == head})


def _by_microbatch(found: list[Any]) -> dict[int, float]:
    losses: dict[int, float] = {}
    for each in found:
        losses[each.microbatch] = losses.get(each.microbatch, 0.0) + each.value.item()
    return dict(sorted(losses.items()))


def _loss_error(found: list[Any], expected: dict[int, float]) -> float:
    errors = (abs(value / expected[index] - 1) for index, value in _by_microbatch(found).items())
    return max((number_or_infinity(error) for error in errors), default=0.0)


def reference(case: Case) -> Reference:
    """Of a case on one rank, from megatron-core's GPTModel; with dropout, from our own model run whole, microbatch by
    microbatch, since the random states differ."""
    if case.dropout:
        ours, executor = make_executor(case)
        found = executor.run(make_step(case))[0]
        return gradients_of(ours), _by_microbatch(found)
    model = make_reference(case.style, case.tied, num_layers=case.layers, **_types(case))
    model.load_state_dict(make_model(case).state_dict())
    losses = {}
    for index, batch in enumerate(microbatches(case.m)):
        loss = torch.sum(reference_forward(model, batch, batch.labels) * batch.loss_mask)
        (loss * (1.0 / batch.loss_mask.sum() / case.m)).backward()
        losses[index] = loss.item()
    return gradients_of(model), losses


def make_model(case: Case) -> PipelineModel:
    config = make_config(
        case.style,
        case.tp,
        num_layers=case.layers,
        sequence_parallel=case.sequence_parallel,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        **_types(case),
    )
    rank = parallel_state.get_pipeline_model_parallel_rank() if case.pp > 1 else 0
    options = replace(make_options(case.style, case.tied), chunk_size=case.mlp_chunk)
    program = case.program()
    return PipelineModel(config, options, program.pieces_of_rank(rank), seed=7, copies=program.copies(rank))


def _types(case: Case) -> dict[str, Any]:
    return {"params_dtype": case.dtype, "bf16": case.dtype is torch.bfloat16}


def make_executor(case: Case, transport: Transport | None = None) -> tuple[Any, Executor]:
    """transport None: for a case on one rank, which sends nothing."""
    model = make_model(case)
    rank = parallel_state.get_pipeline_model_parallel_rank() if case.pp > 1 else 0
    transport = transport or Alone()
    ahead = 1 if transport.independent_channels else 0
    return model, Executor(lower(case.program(), receive_ahead=ahead), rank, model, transport)


def make_step(case: Case, training: bool = True) -> Step:
    batches = microbatches(case.m)
    return Step(
        iteration=5,
        microbatch_number=lambda index: index,
        batch=batches.__getitem__,
        root_gradient=lambda index: 1.0 / batches[index].loss_mask.sum() / case.m,
        micro_batch_size=BATCH,
        seq_length=SEQUENCE,
        training=training,
    )


def gather(model: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients by name on every rank: tensor-parallel shards joined, copies on several pipeline ranks summed."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        copies = {id(copy): key for key, copy in model.replicated_parameters().items()}
        names = {name: copies.get(id(parameter), name) for name, parameter in model.named_parameters()}
        shards = {name: parameter.grad for name, parameter in model.named_parameters()}
        gradients = {names[name]: value for name, value in whole(model, shards, partial_sums=True).items()}
    group = parallel_state.get_pipeline_model_parallel_group()
    gathered: list[dict[str, Tensor]] = [{} for _ in range(group.size())]
    torch.distributed.all_gather_object(gathered, gradients, group=group)
    result: dict[str, Tensor] = {}
    for each in gathered:
        for name, value in each.items():
            result[name] = result[name] + value if name in result else value
    return result


def run_csv(rank: int, world_size: int, path: str, m: int) -> list[dict[str, Any]]:
    """A program from a file, with the same checks."""
    return run_cases(rank, world_size, [Case(path, world_size, m, "llama")])


def fail_in_the_middle(rank: int, world_size: int) -> str:
    """Rank 1 fails in its second forward; what every rank's error says."""
    case = Case("1f1b", world_size, 4, "gpt")
    set_parallel(tp=1, pp=world_size)
    transport = make_transport(parallel_state.get_pipeline_model_parallel_group(), device())
    model, executor = make_executor(case, transport)
    run = model.run

    def broken(pieces: Any, inputs: Any, batch: Any, context: Any) -> Any:
        if rank == 1 and context.microbatch == 1:
            raise RuntimeError("out of order")
        return run(pieces, inputs, batch, context)

    model.run = broken
    try:
        executor.run(make_step(case))
    except Exception as error:
        if rank == 1:  # as a program does: its exit closes the connections
            torch.distributed.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return "finished"


def peaks_of_stash(rank: int, world_size: int, schedules: list[str], m: int) -> dict[str, tuple[int, list[int]]]:
    """For each schedule (units stashed at once at most, what is left in each of the executor's tables after a step)."""
    set_parallel(tp=1, pp=world_size)
    transport = make_transport(parallel_state.get_pipeline_model_parallel_group(), device())
    return {schedule: peak_of_stash(Case(schedule, world_size, m, "llama"), transport) for schedule in schedules}


def peak_of_stash(case: Case, transport: Transport) -> tuple[int, list[int]]:
    _, executor = make_executor(case, transport)
    peak = 0
    forward = executor._ops["F"]

    def counted(op: Op) -> None:
        nonlocal peak
        forward(op)
        peak = max(peak, len(executor._stash))

    executor._ops["F"] = counted
    executor.run(make_step(case))
    return peak, left_in_tables(executor)


def left_in_tables(executor: Executor) -> list[int]:
    """How much is in each of the executor's tables."""
    copies = executor._copies
    own = (executor._stash, executor._inbox, executor._outbox, executor._receipts)
    return [len(table) for table in (*own, copies._copies, copies._sums, copies._bound, copies._packed)]
