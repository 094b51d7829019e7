"""Defines what the rows of bench.py compare: engines on one problem, and which of them is set beside which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench import CORE
from benchmarks.engines import Engine, OurEngine, Pairs, Problem, found
from benchmarks.other_engines import (
    megatron_core,
    torch_1f1b,
    torch_gpipe,
    torch_interleaved,
    torch_interleaved_1f1b,
    torch_zbv,
)
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.model import Microbatch, UnitContext
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_lengths import average_lengths, balanced_lengths
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece, even_stages
from schedules.helix import HelixOptions


def one_f_one_b(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        CORE: megatron_core(problem, whole=True),
        "megatron-core 1F1B, our pieces": megatron_core(problem, whole=False),
        "torch Schedule1F1B": torch_1f1b(problem),
    }
    first, *others = every
    return every, [(first, other) for other in others]


def zero_bubble(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Ours are found from measured times; torch's orders run under torch and under our engine.

    torch splits a backward well only where linear layers are its own (see `engines.py`): so they are in two rows of it.
    """
    their_v, v = torch_zbv(problem)
    their_interleaved, interleaved = torch_interleaved(problem)
    zbv, zb1p, interleaving, *less = ("zbv", "zb1p", "zb-interleaved", "zb2p", "v-half", "v-min")
    ours: dict[str, Engine] = {"ours, 1f1b": OurEngine(problem, problem.program("1f1b"))}
    for name in (zbv, zb1p, interleaving, *less):
        ours[f"ours, {name}"] = OurEngine(problem, found(problem, name))
    others = {
        "ours, torch's ZBV order": OurEngine(problem, v),
        "ours, torch's InterleavedZeroBubble order": OurEngine(problem, interleaved),
        "torch ScheduleZBVZeroBubble": their_v,
        "torch ScheduleInterleavedZeroBubble": their_interleaved,
        "torch ScheduleZBVZeroBubble, Megatron's linear": torch_zbv(problem, plain=False)[0],
    }
    same_v, same_interleaved, other_v, other_interleaved, unsplit = others
    pairs = [
        *((name, other_v) for name in (zbv, *less)),
        *((name, other_interleaved) for name in (zbv, zb1p, interleaving)),
    ]
    more = [*((f"ours, {name}", other) for name, other in pairs), (f"ours, {zbv}", unsplit)]
    engine_alone = [(same_v, other_v), (same_interleaved, other_interleaved)]
    return _beside_1f1b(
        ours, megatron_core(problem, whole=True), others, [*more, *engine_alone, (f"ours, {zbv}", same_v)]
    )


# ---------------------------------------------------------------------------------------------- stages and microbatches


def stages(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Whole backwards in other orders: several stages a rank, two directions, uneven stages. megatron-core's own
    interleaved schedule needs three ranks: of two each takes the other's gradients for activations."""
    programs = {
        "1f1b": problem.program("1f1b"),
        "gpipe": problem.program("gpipe"),
        "interleaved-1f1b": problem.program("interleaved-1f1b", virtual_stages=2),
        "hanayo": problem.program("hanayo", virtual_stages=2),
        "chimera": problem.program("chimera"),
        "adapipe": problem.program("adapipe", costs=layer_times(problem)),
    }
    ours = {f"ours, {name}": OurEngine(problem, program) for name, program in programs.items()}
    others: dict[str, Engine] = {
        "torch ScheduleGPipe": torch_gpipe(problem),
        "torch ScheduleInterleaved1F1B": torch_interleaved_1f1b(problem),
    }
    same = list(zip(("ours, gpipe", "ours, interleaved-1f1b"), others, strict=True))
    return _beside_1f1b(ours, megatron_core(problem, whole=True), others, same)


def weights(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Schedules whose weights travel."""
    names = ("1f1b", "weipipe-naive", "weipipe", "wzb1", "wzb2")
    ours = {f"ours, {name}": OurEngine(problem, problem.program(name)) for name in names}
    return _beside_1f1b(ours, megatron_core(problem, whole=True))


def _beside_1f1b(
    ours: Mapping[str, Engine],
    core: Engine,
    others: Mapping[str, Engine] = MappingProxyType({}),
    more: Sequence[tuple[str, str]] = (),
) -> tuple[dict[str, Engine], Pairs]:
    """Ours, the first of which is 1f1b, beside that and megatron-core's 1F1B; and more pairs, with other engines."""
    plain, *mine = ours
    pairs = [(plain, CORE), *((name, other) for other in (plain, CORE) for name in mine)]
    return {**ours, CORE: core, **others}, [*pairs, *more]


def layer_times(problem: Problem) -> PieceTimes:
    """Return what a layer and the head take here forward, a third of forward and backward, of a recorded 1f1b."""
    program = problem.program("1f1b")
    times = OurEngine(problem, program).op_times().times
    first, last = (times["F", stage, 0] + times["B", stage, 0] for stage in range(2))
    layers = len({piece.layer for piece in program.stages[0].pieces if piece.role == "mlp"})
    return PieceTimes({"mlp": first / layers / 3, "head": max(0.0, last - first) / 3})


# -------------------------------------------------------------------------------------------------- attention in shares


def helix(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Attention-heavy sequences, attention of a layer on both ranks at once.

    Without recomputation all do the same work; with it all make everything but attention twice."""
    folds = [folds for folds in (1, 2) if problem.count % (2 * folds) == 0]
    again = RecomputeOptions("without-attention")
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        CORE: megatron_core(problem, whole=True),
        "ours, zb1p": OurEngine(problem, found(problem, "zb1p")),
    }
    others = list(every)
    for fold in folds:
        for ship in ("none", "qkv", "attention"):
            options = HelixOptions(fold, ship, helix_recompute=False)
            every[f"ours, helix, {fold} folds, ship {ship}"] = OurEngine(problem, problem.program("helix", options))
    pairs = [(name, other) for other in others for name in every if "helix" in name]
    recomputed = {
        "ours, 1f1b, all but attention recomputed": problem.program("1f1b", recompute=again),
        "ours, helix, all but attention recomputed": problem.program("helix", HelixOptions(folds[-1]), recompute=again),
    }
    every |= {name: OurEngine(problem, program) for name, program in recomputed.items()}
    plain, ours = recomputed
    return every, [*pairs, (ours, plain)]


# ---------------------------------------------------------------------------------------------- sequences in chunks

CHUNK_COUNTS = (2, 4, 8)

ALIGNMENT = 32
"""Tokens that lengths are multiples of, where there are enough: the smallest tile of torch's attention for the CPU."""


def seq1f1b(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Chunks are of lengths that take equally long here, but for one row of equal lengths."""
    costs = fitted(problem)
    stages = even_stages(problem.layers, 1)
    lengths = {k: balanced_lengths(costs, stages, problem.sequence, k, _alignment(problem, k)) for k in CHUNK_COUNTS}
    of_four = {"chunks": 4, "chunk_lengths": lengths[4]}
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        CORE: megatron_core(problem, whole=True),
        **{
            f"ours, seq1f1b k = {k}": OurEngine(problem, problem.program("seq1f1b", chunks=k, chunk_lengths=lengths[k]))
            for k in CHUNK_COUNTS
        },
        "ours, seq1f1b k = 4, equal lengths": OurEngine(problem, equal(problem, 4)),
        "ours, seq1f1b-zb k = 4": OurEngine(problem, found(problem, "seq1f1b-zb", **of_four)),
        "ours, seq1f1b-interleaved k = 4, v = 2": OurEngine(
            problem, problem.program("seq1f1b-interleaved", virtual_stages=2, **of_four)
        ),
    }
    plain, core, *chunked = every
    pairs = [(mine, other) for other in (plain, core) for mine in chunked]
    return every, [(plain, core), *pairs, ("ours, seq1f1b k = 4", "ours, seq1f1b k = 4, equal lengths")]


def chunks(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """The other orders of four chunks, of lengths that take equally long, beside whole sequences and seq1f1b."""
    lengths = balanced_lengths(
        fitted(problem), even_stages(problem.layers, 1), problem.sequence, 4, _alignment(problem, 4)
    )
    names = ("seq1f1b", "terapipe", "infinipipe", "sppo")
    ours: dict[str, Engine] = {"ours, 1f1b": OurEngine(problem, problem.program("1f1b"))}
    for name in names:
        ours[f"ours, {name} k = 4"] = OurEngine(problem, problem.program(name, chunks=4, chunk_lengths=lengths))
    pairs = [(f"ours, {name} k = 4", "ours, seq1f1b k = 4") for name in names[1:]]
    return _beside_1f1b(ours, megatron_core(problem, whole=True), more=pairs)


def equal(problem: Problem, chunks: int) -> Program:
    lengths = average_lengths(problem.sequence, chunks, _alignment(problem, chunks))
    return problem.program("seq1f1b", chunks=chunks, chunk_lengths=lengths)


def fitted(problem: Problem) -> PieceTimes:
    """Return what n tokens after c earlier ones take here, forward and backward of the whole model: u n + v n (c + n/2)
    + w, fitted to times recorded with equal lengths. w is the same for every chunk, so lengths do not depend on it.
    Only the proportion of the two times is meant."""
    rows, seconds = [], []
    for k in CHUNK_COUNTS:
        program = equal(problem, k)
        costs, lengths = OurEngine(problem, program).op_times(), program.chunk_lengths or ()
        for chunk, (earlier, tokens) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
            share = tokens / problem.sequence
            rows.append([share, share * (2 * earlier + tokens) / problem.sequence, 1.0])
            seconds.append(sum(time for (_, _, number), time in costs.times.items() if number == chunk))
    times = torch.tensor(seconds, dtype=torch.float64)
    shares = torch.tensor(rows, dtype=torch.float64)
    # Each equation over its time, so that what is least is the sum of squares of relative errors.
    tokens_time, attention_time, _ = torch.linalg.lstsq(shares / times[:, None], torch.ones_like(times)).solution
    return PieceTimes({"mlp": max(0.0, float(tokens_time)), "attn": max(0.0, float(attention_time))})


def _alignment(problem: Problem, chunks: int) -> int:
    return min(ALIGNMENT, problem.sequence // chunks)


# ------------------------------------------------------------------------------------------------ next to no arithmetic


class EmptyModel(torch.nn.Module):
    """Multiplies by a weight of its rank, whatever its pieces are."""

    payload_dtype = torch.float32

    def __init__(self, pieces: Sequence[Piece], shape: Sequence[int]):
        super().__init__()
        self._shape, self._piece = torch.Size(shape), pieces[0]
        self._ones = torch.ones(self._shape)
        weight = torch.nn.Parameter(torch.full(self._shape, 0.5))
        name = "embedding" if pieces[0].kind == "embed" else "output_layer"
        self.add_module(name, torch.nn.ParameterDict({"weight": weight}))

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> tuple[Tensor, ...]:
        """(hidden_states [s, b, h],), of the head its sum."""
        (weight,) = self.parameters()
        output = weight * (self._ones if pieces[0].kind == "embed" else inputs[0])
        return (output.sum() if pieces[-1].kind == "head" else output,)

    def piece_of(self, parameter: str) -> Piece:
        """The weight's, whatever its name."""
        return self._piece

    def logits(self, hidden: Tensor) -> Tensor:
        """Return what torch's schedule takes the loss of."""
        return hidden

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        return (self._shape,)

    def attention_layers(self, pieces: Sequence[Piece], training: bool) -> list[int]:
        return []


class EmptyProblem(Problem):
    """A problem of the same shape with the empty model, whose logits are as long as a hidden state."""

    def __init__(self, size: Sequence[int]):
        super().__init__(size, vocabulary=size[1])

    def model(self, pieces: Sequence[Piece], copies: Mapping[Piece, int] | None = None) -> Any:
        return EmptyModel(pieces, (self.sequence, self.micro, self.config.hidden_size))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return output.sum()


def empty(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Each op is one product of a few elements, each message one tensor."""
    problem = EmptyProblem(problem.size)
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        "megatron-core 1F1B, same pieces": megatron_core(problem, whole=False),
        "torch Schedule1F1B": torch_1f1b(problem),
    }
    first, *others = every
    return every, [(first, other) for other in others]


FAMILIES = MappingProxyType(
    {
        "empty": empty,
        "1f1b": one_f_one_b,
        "stages": stages,
        "zero-bubble": zero_bubble,
        "weights": weights,
        "seq1f1b": seq1f1b,
        "chunks": chunks,
        "helix": helix,
    }
)
"""By the name of the row."""
