"""Runs on the ranks of test_split_heads.py: programs whose head is divided, against the whole model in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.lower import lower
from helixpipe.lowering.streams import check_streams
from helixpipe.model import PipelineModel, UnitContext
from helixpipe.model.device import device
from helixpipe.model.ends import Targets
from helixpipe.planning.reorder.starts import split
from helixpipe.planning.vocabulary.choice import split_heads
from helixpipe.program.program import Program, forward_only
from helixpipe.program.stages import Stage, model_pieces
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.transport import make_transport
from tests.distributed import gather_tensors
from tests.model.common import make_config, make_options, set_parallel, worst
from tests.model.equality import whole
from tests.runtime.case import Case, microbatches
from tests.runtime.equality import by_microbatch, left_in_tables, make_step


@dataclass(frozen=True)
class Divided:
    """A case whose head is divided over its ranks. vocabulary: rows. weights_apart: every backward is an I and a W.
    recomputed: the parts of the head are recomputed in their backward."""

    case: Case
    vocabulary: int = 48
    weights_apart: bool = False
    recomputed: bool = False

    def __str__(self) -> str:
        marks = ["split"] * self.weights_apart + ["recomputed"] * self.recomputed
        return "-".join([str(self.case), f"V{self.vocabulary}", *marks])

    def program(self) -> Program:
        program = split_heads(self.case.program(), unit_costs(), self.weights_apart)
        if self.recomputed:
            stages = (replace(each, recompute=(each.pieces,)) if each.part else each for each in program.stages)
            program = replace(program, stages=tuple[Stage, ...](stages))
        return split(program) if self.weights_apart else program


def run(rank: int, world_size: int, cases: list[Divided]) -> list[dict[str, Any]]:
    """For each case the largest relative error of a gradient and its parameter, also of a step whose opening was run
    again, and those of the losses, in training and in evaluation."""
    results: list[dict[str, Any]] = []
    for divided in cases:
        case = divided.case
        set_parallel()
        expected = reference(divided)
        set_parallel(case.tp, case.pp)
        group = parallel_state.get_pipeline_model_parallel_group()
        results.append(compared(divided, group, *expected))
    return results


def model_of(divided: Divided, pieces: Any, tp: int) -> PipelineModel:
    case = divided.case
    config = make_config(case.style, tp, num_layers=case.layers, sequence_parallel=case.sequence_parallel and tp > 1)
    options = replace(
        make_options(case.style, case.tied), vocab_size=divided.vocabulary, loss_chunk_size=case.loss_chunk
    )
    return PipelineModel(config, options, pieces, seed=7)


def reference(divided: Divided) -> tuple[dict[str, Tensor], dict[int, float]]:
    """Gradients of the whole model, and the loss of each microbatch, by torch's cross entropy."""
    case, chain = divided.case, model_pieces(divided.case.layers)
    model, losses = model_of(divided, chain, 1), {}
    for index, batch in enumerate(microbatches(case)):
        context = UnitContext(5, index)
        (hidden,) = model.run(chain[:-1], (), batch, context)
        targets = Targets.read(batch, context)
        each = F.cross_entropy(model.logits(hidden).flatten(0, 1), targets.labels.flatten(), reduction="none")
        loss = torch.sum(each * targets.weights.flatten())
        (loss * (1.0 / batch.loss_mask.sum() / case.m)).backward()
        losses[index] = loss.item()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, losses


def compared(divided: Divided, group: Any, expected: dict[str, Tensor], losses: dict[int, float]) -> dict[str, Any]:
    case, program = divided.case, divided.program()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model = model_of(divided, program.pieces_of_rank(rank), case.tp)
    transport = make_transport(group, device())
    executor = Executor(rank, model, transport, group=group)
    lowered, step = lower(program), make_step(case)
    check_streams(lowered)
    found = by_microbatch(executor.run(lowered, step)[0])
    left = sum(left_in_tables(executor))
    error = worst(gradients(model, group, case.tp), expected)
    model.zero_grad()  # once more: the opening is run again, as after an update that was not confirmed
    executor.run(lowered, replace(step, confirm=lambda: False))
    error = max(error, worst(gradients(model, group, case.tp), expected))
    evaluated = by_microbatch(executor.run(lower(forward_only(program)), make_step(case, training=False))[0])
    transport.close()
    return {
        "gradient": error,
        "loss": max((abs(value / losses[index] - 1) for index, value in found.items()), default=0.0),
        "evaluation": max((abs(value / losses[index] - 1) for index, value in evaluated.items()), default=0.0),
        "losses": len(found),
        "evaluated": len(evaluated),
        "left": left + sum(left_in_tables(executor)),
        "rows": None if model.head_part is None else model.output_layer.weight.size(0),
    }


def gradients(model: PipelineModel, group: Any, tp: int) -> dict[str, Tensor]:
    """Return the gradients of the whole model: rows of the output layer one after another."""
    own = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if tp > 1:
        own = whole(model, own, partial_sums=True)
    by_rank = gather_tensors(own, group)
    rows = [each["output_layer.weight"] for each in by_rank]
    result = {name: gradient for each in by_rank for name, gradient in each.items()}
    result["output_layer.weight"] = torch.cat([part.chunk(tp)[rank] for rank in range(tp) for part in rows])
    return result
