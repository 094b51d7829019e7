"""Traffic that is no part of helixpipe, added by a file of a test: right gradients, streams, times and memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.streams import check_streams
from helixpipe.model import Microbatch
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece, Stage, model_pieces
from helixpipe.program.workload import uniform
from helixpipe.runtime.executor import Step
from helixpipe.runtime.transport import make_transport
from helixpipe.simulate.simulator import simulate
from tests.distributed import run_ranks
from tests.runtime.all_to_all import exchanged, expert_executor, two_more_kinds, with_experts

LAYERS, MICROBATCHES, EXPERTS, BATCH, LENGTH, SIZE = 2, 3, 2, 2, 8, 16
HOMES = {"together": (0, 0, 1, 1, 1), "apart": (0, 1, 0, 1, 0)}
"""The rank of each stage: an exchange comes after, and before, an op of its own rank or a message."""


def program_of(homes: tuple[int, ...], split: bool = False, number: int = MICROBATCHES) -> Program:
    """All forwards, then all backwards, of five stages, two of which are an MLP alone."""
    pieces = model_pieces(LAYERS)
    cuts = [0, *(at + side for at, piece in enumerate(pieces) if piece.kind == "mlp" for side in (0, 1)), len(pieces)]
    stages = tuple(Stage(pieces[begin:end]) for begin, end in pairwise(cuts))
    orders: tuple[list[Op], ...] = ([], [])
    for kinds, order in (("F", range(5)), ("IW" if split else "B", reversed(range(5)))):
        for stage in order:
            for microbatch in range(number):
                orders[homes[stage]].extend(Op(kind, stage, microbatch) for kind in kinds)
    return Program("experts", stages, tuple(map(tuple, orders)), uniform(number))


def batches(pipeline: int) -> list[Microbatch]:
    tokens = torch.randint(SIZE, (MICROBATCHES, BATCH, LENGTH), generator=torch.Generator().manual_seed(pipeline))
    return [Microbatch(each, (3 * each + 1) % SIZE, torch.ones(each.shape)) for each in tokens]


def weights(piece: Piece, expert: int) -> Tensor:
    """Of a piece; of an MLP, those of one expert."""
    seed = 100 * piece.layer + 10 * len(piece.kind) + expert * (piece.kind == "mlp") + 200
    return 0.5 * torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Toy(torch.nn.Module):
    """Embedding, a factor in place of attention, MLPs of one matrix with a tanh, and head."""

    payload_dtype = torch.float64

    def __init__(self, pieces: tuple[Piece, ...], expert: int):
        super().__init__()
        drawn = {str(piece): weights(piece, expert) for piece in pieces if piece.kind in ("embed", "mlp", "head")}
        self.parts = torch.nn.ParameterDict(drawn)

    def run(self, pieces: Any, inputs: Any, batch: Any, context: Any) -> tuple[Tensor, ...]:
        hidden: Any = inputs[0] if inputs else None
        for piece in pieces:
            if piece.kind == "embed":
                hidden = self.parts[str(piece)][batch.tokens]
            elif piece.kind == "mlp":
                hidden = torch.tanh(hidden @ self.parts[str(piece)])
            elif piece.kind == "proj":
                hidden = 1.5 * hidden
            elif piece.kind == "head":
                logits = hidden @ self.parts[str(piece)]
                hidden = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        return (hidden,)

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        return (torch.Size((micro_batch_size, length, SIZE)),)


def train(rank: int, world_size: int, name: str) -> dict[tuple[str, int], Any]:
    """The gradients of one step on one rank, as lists; those of an MLP by expert."""
    pipeline, pp_rank = divmod(rank, 2)
    pipelines = [torch.distributed.new_group([2 * each, 2 * each + 1]) for each in range(EXPERTS)]
    experts = [torch.distributed.new_group([2 * each + at for each in range(EXPERTS)]) for at in range(2)]
    own, data = program_of(HOMES[name]), batches(pipeline)
    with two_more_kinds():
        lowered = with_experts(own, EXPERTS)
        model = Toy(own.pieces_of_rank(pp_rank), pipeline)
        make = expert_executor(lambda hidden: exchanged(hidden, experts[pp_rank]))
        executor = make(pp_rank, model, make_transport(pipelines[pipeline], torch.device("cpu")))
        step = Step(0, int, data.__getitem__, lambda i: torch.tensor(1.0, dtype=torch.float64), BATCH, LENGTH)
        executor.run(lowered, step)
    found = {}
    for piece, weight in model.parts.items():
        assert weight.grad is not None
        found[piece, pipeline if piece.startswith("mlp") else -1] = weight.grad.tolist()
    return found


def expected() -> dict[tuple[str, int], Tensor]:
    """The same in one process: half of each sequence goes through each expert."""
    pieces = [piece for piece in model_pieces(LAYERS) if piece.kind in ("embed", "mlp", "head")]
    named = {
        (str(piece), expert if piece.kind == "mlp" else -1): weights(piece, expert).requires_grad_()
        for expert in range(EXPERTS)
        for piece in pieces
    }
    for pipeline in range(EXPERTS):
        for batch in batches(pipeline):
            hidden = named["embed", -1][batch.tokens]
            for layer in range(LAYERS):
                halves = (1.5 * hidden).chunk(EXPERTS, dim=1)
                made = [torch.tanh(half @ named[f"mlp[{layer}]", expert]) for expert, half in enumerate(halves)]
                hidden = torch.cat(made, dim=1)
            logits = hidden @ named["head", -1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    return {name: weight.grad for name, weight in named.items() if weight.grad is not None}


@pytest.mark.parametrize("name", HOMES)
def test_gradients_of_tokens_that_went_to_experts_of_other_pipelines(name: str) -> None:
    totals: dict[tuple[str, int], Any] = {}
    for gradients in run_ranks(train, 2 * EXPERTS, name):
        for place, gradient in gradients.items():
            totals[place] = totals.get(place, 0.0) + torch.tensor(gradient, dtype=torch.float64)
    right = expected()
    assert totals.keys() == right.keys() and len(right) == 2 + LAYERS * EXPERTS
    for place, gradient in right.items():
        torch.testing.assert_close(totals[place], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", HOMES)
def test_streams_times_and_memory_follow_from_the_row(name: str, split: bool) -> None:
    costs = PieceTimes({"mlp": 1.0}, message=0.25)
    with two_more_kinds():
        lowered = with_experts(program_of(HOMES[name], split), EXPERTS, costs)
        check_streams(lowered)
        simulation = simulate(lowered, costs)
        assert len(lowered.graph.collectives) == 2 * 2 * LAYERS * MICROBATCHES
        taken = {event.kind for event in simulation.timeline.sharing}
        assert taken == {"dispatch", "combine"}
        assert simulation.sharing_time == [
            pytest.approx(0.25 * sum(each.ranks == (rank,) for each in lowered.graph.collectives)) for rank in range(2)
        ]
        rank = HOMES[name][1]
        stream = [str(each) for each in lowered.streams[rank]]
        run, exchange = stream.index("RUN 1F0"), f"dispatch for 1F0 (rank {rank})"
        assert stream.index(f"START {exchange}") < run and stream[run - 1] == f"WAIT {exchange}"


@pytest.mark.parametrize(("name", "messages"), [("together", 2), ("apart", 8)])
def test_every_exchange_of_a_lone_microbatch_is_waited_for(name: str, messages: int) -> None:
    """Ops of 1 (F) and 2 (B) in two stages, eight exchanges, and the messages between ranks."""
    costs = PieceTimes({"mlp": 1.0}, message=0.25)
    with two_more_kinds():
        simulation = simulate(with_experts(program_of(HOMES[name], number=1), EXPERTS, costs), costs)
    assert simulation.makespan == pytest.approx(6 + 0.25 * (8 + messages))


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'dispatch' is no kind of transfer; known are activation, gradient, "):
        with_experts(program_of(HOMES["apart"]), EXPERTS)
