"""Runs on the ranks of test_equality.py: every schedule on real ranks against plain megatron-core in one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.device import device, prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from helixpipe.costs.models import HALVES, OFF, PAIRS
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.model import PipelineModel, UnitContext
from helixpipe.program.program import Program, forward_only
from helixpipe.program.stages import Piece
from helixpipe.runtime.executor import Executor, Step, StepRun
from helixpipe.runtime.step import PlannedOp
from helixpipe.runtime.transport import SingleRankTransport, Transport, make_transport
from helixpipe.runtime.weights import WholeWeights
from tests.distributed import gather_tensors
from tests.model.common import (
    BATCH,
    SEQUENCE,
    gradients_of,
    in_float64,
    make_config,
    make_options,
    make_reference,
    number_or_infinity,
    reference_forward,
    set_parallel,
    with_global_experts,
    worst,
)
from tests.model.equality import whole
from tests.runtime.case import Case, microbatches, one_by_one
from tests.runtime.context import losses_over_context, over_context
from tests.runtime.late import LateTransport
from tests.runtime.offloading import spoiling
from tests.runtime.recorded_graphs import RecordedGraphs

Reference = tuple[dict[str, Tensor], dict[int, float]]
"""Gradients by name, the loads of experts among them, and the loss sum of each microbatch."""

LOADS, STEP = "loads", 5


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any] | None]:
    """For each case the largest relative error of the gradients and the parameter's name, the losses' error, and the
    forward-only losses' error; None where the case ran on other ranks. The ranks share the one-process references out
    among themselves, and where a case does not need all of them, as many run cases side by side as can. Process groups
    are made once for each size, since gloo gives every group threads of its own."""
    set_parallel(tp=1)
    balance_apart()
    alone, own = list(dict.fromkeys(case.alone() for case in cases)), dict[Case, Reference]()
    for each in alone[rank::world_size]:
        with precision(each):
            own[each] = reference(each)
    losses: list[dict[Case, dict[int, float]]] = [{} for _ in range(world_size)]
    torch.distributed.all_gather_object(losses, {each: found for each, (_, found) in own.items()})
    references: dict[Case, Reference] = {each: ({}, found) for part in losses for each, found in part.items()}
    tensors = {(each, name): value for each, (found, _) in own.items() for name, value in found.items()}
    for part in gather_tensors(tensors):
        for (each, name), value in part.items():
            references[each][0][name] = value
    results: dict[int, dict[str, Any]] = {}
    for tp, pp, cp, ep in sorted({(case.tp, case.pp, case.cp, case.ep) for case in cases}):
        set_parallel(tp=tp, pp=pp, cp=cp, ep=ep)
        balance_apart()
        group = parallel_state.get_pipeline_model_parallel_group()
        transport = make_transport(group, device())
        ours = [index for index, case in enumerate(cases) if (case.tp, case.pp, case.cp, case.ep) == (tp, pp, cp, ep)]
        side_by_side = parallel_state.get_data_parallel_world_size() // ep
        for index in ours[parallel_state.get_data_parallel_rank() // ep :: side_by_side]:
            case = cases[index]
            late = LateTransport(group, device()) if case.late else None
            with precision(case):
                results[index] = run_case(case, *references[case.alone()], late or transport)
            if late is not None:
                late.close()
        transport.close()
    return [results.get(index) for index in range(len(cases))]


def balance_apart() -> None:
    """Let `global_aux_loss` count the tokens of a case alone, as other data-parallel ranks run other cases."""
    parallel_state._TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP = parallel_state.get_tensor_and_context_parallel_group()


def precision(case: Case) -> AbstractContextManager[None]:
    """Return the context in which a case is as precise as its weights."""
    return in_float64() if case.dtype is torch.float64 else nullcontext()


class Told(WholeWeights):
    """The gradients of replicated weights when the sum over their replicas may start: they are whole here."""

    def __init__(self, case: Case, model: Any):
        self.case, self.model = case, model
        self.gradients: dict[str, Tensor] = {}

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        whole = {name: w for name, w in replicas(self.case, self.model).items() if self.model.piece_of(name) in pieces}
        have = {name: weight.grad for name, weight in whole.items() if weight.grad is not None}  # none ran here
        self.gradients.update((name, gradient.clone()) for name, gradient in have.items())


def run_case(case: Case, expected: dict[str, Tensor], losses: dict[int, float], transport: Transport) -> dict[str, Any]:
    model, executor = make_executor(case, transport)
    told = Told(case, model)
    executor.weights = told
    step, plan = make_step(case), lowered(case)
    found = executor.run(plan, step)[0]
    slots = finish_graphs(model, executor, plan, step)
    now = {name: weight.grad for name, weight in replicas(case, model).items() if name in told.gradients}
    changed = [name for name, gradient in told.gradients.items() if not torch.equal(gradient, now[name])]
    left = executor.keys_values.bytes_alive() + sum(left_in_tables(executor))
    own, ran = {id(weight): name for name, weight in model.named_parameters()}, pieces_run(case, executor.rank)
    for parameter in model.replicated_parameters().values():
        if parameter.grad is None:  # run by other ranks that hold it
            assert model.piece_of(own[id(parameter)]) not in ran
            parameter.grad = torch.zeros_like(parameter)
    loads, expected = over_ranks(case, model.routing.loads(STEP)), dict(expected)
    wanted = expected.pop(LOADS, loads)
    error = worst(of_all_experts(case, gather(model, gradients_of(model))), expected)
    keys_values = executor.keys_values.peak_bytes()
    evaluated = executor.run(lower(forward_only(case.program())), make_step(case, training=False))[0]
    left += executor.keys_values.bytes_alive() + sum(left_in_tables(executor))
    assert list(by_microbatch(evaluated)) == heads_of_rank(case.program(), executor.rank)
    if executor.offloader is not None:  # one more step, whose opening is run again
        model.zero_grad(set_to_none=case.graphs)
        executor.run(plan, replace(step, confirm=lambda: False))
        finish_graphs(model, executor, plan, step)
        left += executor.keys_values.bytes_alive() + sum(left_in_tables(executor))
        error = max(error, worst(of_all_experts(case, gather(model, gradients_of(model))), expected))
        executor.offloader.engine.close()
    return {
        "gradient": error,
        "loads": torch.equal(loads.sum(-1), wanted.sum(-1)) and not ((loads - wanted).abs() > OTHER[case.dtype]).any(),
        "losses": len(found),
        "loss": _loss_error(case, found, losses),
        "evaluation": 0.0 if case.dropout else _loss_error(case, evaluated, losses),
        "left": left,
        "slots": slots,
        "changed": changed,
        "keys and values": keys_values,
    }


def finish_graphs(model: PipelineModel, executor: Executor, plan: LoweredProgram, step: Step) -> int:
    """Of a case with graphs, run the step again, now all of it replayed; return the units in flight, run by run, that
    there are graphs for."""
    if not isinstance(model.graphs, RecordedGraphs):
        return 0
    executor.run(plan, step)
    model.graphs.finish()
    return model.graphs.slots


def over_ranks(case: Case, loads: Tensor) -> Tensor:
    """The sum of the loads that ranks of a case have counted."""
    total = loads.clone()
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        *([parallel_state.get_expert_model_parallel_group()] if case.ep > 1 else []),
    ):
        dist.all_reduce(total, group=group)
    return total


def pieces_run(case: Case, rank: int) -> set[Piece]:
    """The pieces that a rank has ops of."""
    program = case.program()
    return {piece for op in program.ranks[rank] for piece in program.stages[op.stage].pieces}


def replicas(case: Case, model: PipelineModel) -> dict[str, Any]:
    """The parameters of replicated stages by name; without a tied embedding, which the head adds to as well."""
    own = model.replicated_parameters()
    further = model.config.mtp_num_layers is not None
    return {
        name: weight
        for name, weight in own.items()
        if not (case.tied and "word_embeddings" in name) and not (further and name.startswith("embedding."))
    }


GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
BF16_GRADIENT_TOLERANCE = 2e-2  # of sums that travel in bfloat16, of 8 bits, and are rounded at each addition
OTHER = {torch.float64: 0, torch.float32: 0, torch.bfloat16: 2}
"""Tokens of a layer that may go to another expert: in 8 bits one that is near two of them."""
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""megatron-core's cross entropy computes in float32; sums over tokens differ in order."""


def check(case: Case, by_rank: list[dict[str, Any] | None]) -> None:
    """Assert that what `run_cases` returned for a case, by rank, is as it should be."""
    results = [result for result in by_rank if result is not None]
    assert len(results) == case.tp * case.pp * case.cp * case.ep
    tolerance = GRADIENT_TOLERANCE[case.dtype]
    if case.weipipe is not None and case.weipipe.weipipe_grad_dtype == "bf16":
        tolerance = max(tolerance, BF16_GRADIENT_TOLERANCE)
    for result in results:
        error, parameter = result["gradient"]
        assert error < tolerance, parameter
        assert result["loss"] < LOSS_TOLERANCE[case.dtype]
        assert result["evaluation"] < LOSS_TOLERANCE[case.dtype]
    reporting = case.tp * case.cp * case.ep  # the ranks of a stage
    program = case.program()
    head = len(program.stages) - 1
    losses = [sum(op.stage == head and op.kind == "F" for op in ops) for ops in program.ranks]
    assert sum(losses) == len(list(program.workload.units()))
    assert sorted(result["losses"] for result in results) == sorted(losses * reporting)
    assert all(result["left"] == 0 for result in results)
    assert all(result["loads"] for result in results), "experts had other loads than in one process"
    assert not any(result["changed"] for result in results), "gradients that were said to be complete have changed"
    assert any(result["keys and values"] > 0 for result in results) == (program.num_chunks > 1)


def heads_of_rank(program: Program, rank: int) -> list[int]:
    """The microbatches whose head a rank runs."""
    head = len(program.stages) - 1
    return sorted({op.microbatch for op in program.ranks[rank] if op.stage == head})


def by_microbatch(found: list[Any]) -> dict[int, float]:
    losses: dict[int, float] = {}
    for each in found:
        losses[each.microbatch] = losses.get(each.microbatch, 0.0) + each.value.item()
    return dict(sorted(losses.items()))


def _loss_error(case: Case, found: list[Any], expected: dict[int, float]) -> float:
    """Of whole microbatches, whose chunks' losses may be on several ranks of the pipeline."""
    losses = {index * case.ep + pipeline_of(case): loss for index, loss in by_microbatch(found).items()}
    losses = losses_over_context(losses)
    for group in (
        *([parallel_state.get_pipeline_model_parallel_group()] if case.pp > 1 else []),
        *([parallel_state.get_expert_model_parallel_group()] if case.ep > 1 else []),
    ):
        every: list[dict[int, float]] = [{} for _ in range(group.size())]
        dist.all_gather_object(every, losses, group=group)
        losses = {index: sum(own.get(index, 0.0) for own in every) for index in expected}
    errors = (abs(value / expected[index] - 1) for index, value in losses.items())
    return max((number_or_infinity(error) for error in errors), default=0.0)


def reference(case: Case) -> Reference:
    """Of a case on one rank, from megatron-core's GPTModel; with dropout, from our own model run whole, microbatch by
    microbatch, since the random states differ."""
    if case.dropout:
        ours, executor = make_executor(case)
        found = executor.run(lowered(case), make_step(case))[0]
        return gradients_of(ours), by_microbatch(found)
    documents = any(batch.documents for batch in microbatches(case))
    if case.style in ("further", "deepseek") or (case.style == "experts" and documents) or case.padded is not None:
        return whole_microbatches(case)
    model = make_reference(case.style, case.tied, num_layers=case.layers, **_types(case))
    model.load_state_dict(make_model(case).state_dict())
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.set_loss_scale(torch.tensor(1.0 / case.m, dtype=torch.float64))
    losses = {}
    for index, batch in enumerate(microbatches(case)):
        loss = sum(
            torch.sum(reference_forward(model, part, part.labels) * part.loss_mask) for part in one_by_one(batch)
        )
        assert isinstance(loss, Tensor)
        (loss * (1.0 / batch.loss_mask.sum() / case.m)).backward()
        losses[index] = loss.item()
    routers = {name: each for name, each in model.named_modules() if hasattr(each, "local_tokens_per_expert")}
    loads = torch.zeros(case.layers, model.config.num_moe_experts or 0, dtype=torch.float64, device=device())
    for name, router in routers.items():
        loads[int(name.split(".")[2])] = router.local_tokens_per_expert
    return {**gradients_of(model), **({LOADS: loads} if routers else {})}, losses


def whole_microbatches(case: Case) -> Reference:
    """From our own model, run whole: megatron-core's runs documents one by one, but auxiliary losses are those of the
    microbatch that they make; and it divides those of further tokens by their number in float32. test_further.py
    compares these losses with megatron-core's."""
    model, losses = make_model(case), {}
    for index, batch in enumerate(microbatches(case)):
        unit = UnitContext(STEP, index, auxiliary_gradient=lambda: 1.0 / case.m, number=index)
        (loss,) = model.run(model.pieces, (), batch, unit)
        (loss * (1.0 / batch.loss_mask.sum() / case.m)).backward()
        losses[index] = loss.item()
    return {
        **gradients_of(model),
        **({LOADS: model.routing.loads(STEP)} if case.style in ("experts", "balanced") else {}),
    }, losses


def make_model(case: Case) -> PipelineModel:
    config = make_config(
        case.style,
        case.tp,
        num_layers=case.layers,
        sequence_parallel=case.sequence_parallel,
        **_expert_sizes(case),
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        **_types(case),
    )
    rank = parallel_state.get_pipeline_model_parallel_rank() if case.pp > 1 else 0
    options = make_options(case.style, case.tied)
    options = replace(
        options,
        chunk_size=case.mlp_chunk,
        loss_chunk_size=case.loss_chunk,
        cp_comm_type=case.cp_comm_type,
        overlap_tp_comm=HALVES if case.halves else PAIRS if case.pairs else OFF,
    )
    program = case.program()
    model = PipelineModel(config, options, program.pieces_of_rank(rank), seed=7, copies=program.copies(rank))
    if model.routing.biases is not None:
        numbers = torch.arange(model.routing.biases.numel(), dtype=torch.float32, device=device())
        model.routing.biases.copy_(0.02 * torch.sin(numbers).view_as(model.routing.biases))
    return model


def _expert_sizes(case: Case) -> dict[str, Any]:
    """Experts are split over tensor-parallel ranks as all weights are."""
    if case.ep == 1:
        return {}
    sizes: dict[str, Any] = {"expert_model_parallel_size": case.ep, "expert_tensor_parallel_size": case.tp}
    return {**sizes, "moe_token_dispatcher_type": "allgather"} if case.tp > 1 else sizes


def _types(case: Case) -> dict[str, Any]:
    return {"params_dtype": case.dtype, "bf16": case.dtype is torch.bfloat16}


def make_executor(case: Case, transport: Transport | None = None) -> tuple[Any, Executor]:
    """transport None: for a case on one rank, which sends nothing."""
    model = make_model(case)
    if case.graphs:
        model.graphs = RecordedGraphs(model)
    rank = parallel_state.get_pipeline_model_parallel_rank() if case.pp > 1 else 0
    transport = transport or SingleRankTransport()
    offloader = None if case.offload is None else spoiling(case.offload)
    group = parallel_state.get_pipeline_model_parallel_group() if case.pp > 1 else None
    return model, Executor(rank, model, transport, offloader=offloader, group=group)


def lowered(case: Case) -> LoweredProgram:
    """Return what its executor runs."""
    return lower(case.program())


def make_step(case: Case, training: bool = True) -> Step:
    """Of this rank's pipeline, which has every ep-th microbatch."""
    total = case.m * case.ep
    batches = microbatches(replace(case, m=total))[pipeline_of(case) :: case.ep]
    return Step(
        iteration=STEP,
        microbatch_number=lambda index: index,
        batch=batches.__getitem__,
        root_gradient=lambda index: 1.0 / batches[index].loss_mask.sum() / total,
        micro_batch_size=BATCH,
        seq_length=SEQUENCE,
        training=training,
        confirm=(lambda: False) if case.again and training else None,
        auxiliary_gradient=lambda index: 1.0 / total,
    )


def pipeline_of(case: Case) -> int:
    """The expert-parallel rank of this one's pipeline."""
    return parallel_state.get_expert_model_parallel_rank() if case.ep > 1 else 0


def of_all_experts(case: Case, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients summed over the pipelines, of which each has some of the experts, by the experts' numbers."""
    if case.ep == 1:
        return gradients
    named = with_global_experts(
        gradients, pipeline_of(case) * (make_config(case.style).num_moe_experts or 0) // case.ep
    )
    result: dict[str, Tensor] = {}
    for part in gather_tensors(named, parallel_state.get_expert_model_parallel_group()):
        for name, value in part.items():
            result[name] = result[name] + value if name in result else value
    return result


def gather(model: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients by name on every rank: tensor-parallel shards joined, copies on several pipeline ranks summed."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        copies = {id(copy): key for key, copy in model.replicated_parameters().items()}
        names = {name: copies.get(id(parameter), name) for name, parameter in model.named_parameters()}
        shards = {name: parameter.grad for name, parameter in model.named_parameters()}
        gradients = {names[name]: value for name, value in whole(model, shards, partial_sums=True).items()}
    gradients = over_context(gradients)
    group = parallel_state.get_pipeline_model_parallel_group()
    by_rank = gather_tensors(gradients, group)
    if model.head_part is not None:
        name = "embedding.word_embeddings.weight"
        rows = joined_rows([each.pop("output_layer.weight") for each in by_rank])
        by_rank.append({name if model.share_embeddings_and_output_weights else "output_layer.weight": rows})
    result: dict[str, Tensor] = {}
    for each in by_rank:
        for name, value in each.items():
            result[name] = result[name] + value if name in result else value
    return result


def joined_rows(parts: list[Tensor]) -> Tensor:
    """Of the whole vocabulary, of which each tensor-parallel rank has a part, and each pipeline rank a part of that.
    parts: of each pipeline rank, those of its tensor-parallel ranks one after another."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return torch.cat([part.chunk(tp)[rank] for rank in range(tp) for part in parts])


def run_csv(rank: int, world_size: int, path: str, m: int) -> list[dict[str, Any] | None]:
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
        executor.run(lowered(case), make_step(case))
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


class _Counting(StepRun):
    """Counts the units whose saved tensors are there at once."""

    peak = 0

    def _forward(self, op: PlannedOp) -> None:
        super()._forward(op)
        saved = {self.graph.saved[each] for each in self.graph.rank_tasks[self.executor.rank]}
        self.peak = max(self.peak, len(saved & set(self.buffers)))


def peak_of_stash(case: Case, transport: Transport) -> tuple[int, list[int]]:
    _, executor = make_executor(case, transport)
    executor.step_run = _Counting
    executor.run(lowered(case), make_step(case))
    assert isinstance(executor.last, _Counting)
    return executor.last.peak, left_in_tables(executor)


def left_in_tables(executor: Executor) -> list[int]:
    """How much is in each of the executor's tables, and in the host's memory."""
    borrowed, last = executor.borrowed, executor.last
    tables = (borrowed._copies, borrowed._sums, borrowed._bound, borrowed._packed)
    offloader = executor.offloader
    away = [] if offloader is None else [len(offloader._away), offloader.arena.used]
    return [len(table) for table in (last.buffers, last.receipts, *tables)] + away
