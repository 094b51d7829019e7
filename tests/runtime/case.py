"""A case of test_equality.py: a schedule, a model and a layout, and its program."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch

from helixpipe.model.device import device, prepare
from helixpipe.program.workload import Slice, Workload, uniform

prepare()  # before megatron-core is imported, whose notices it silences


from helixpipe.costs.by_hand import PieceTimes, parse_piece_times, unit_costs
from helixpipe.model import Microbatch
from helixpipe.model.documents import Documents
from helixpipe.model.options import layers_of
from helixpipe.model.real_tokens import RealTokens
from helixpipe.planning.memory.early import place_early
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.orders import one_forward_one_backward
from helixpipe.planning.overlap.pairs import may_pair
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.planning.vocabulary.lanes import BACKWARDS, FORWARDS, WEIGHTS, reordered
from helixpipe.program.program import Op, Program, of_layers, with_head
from helixpipe.program.stages import HEAD_MTP, LayerKinds, Stage, even_stages, model_pieces
from helixpipe.program.text import parse_rows
from schedules import Shape, build
from schedules.helix import HelixOptions
from schedules.sppo import SppoOptions
from schedules.weipipe import WeipipeOptions
from tests.lowering.offloads import offloading_program
from tests.model.common import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    make_config,
)


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
    loss_chunk: int = 0
    """Tokens of a slice of the head and the loss; 0: whole."""
    halves: bool = False
    """Tokens in two halves, to hide tensor-parallel collectives."""
    pairs: bool = False
    """Forwards beside backwards of other units, to hide tensor-parallel collectives."""
    again: bool = False
    """The step's opening is run twice, as with weights that were not confirmed."""
    weipipe: WeipipeOptions | None = None
    """Of the WeiPipe family."""
    late: bool = False
    """Every message held back for a random time, so that they overtake each other."""
    offload: int | None = None
    """Seed of what is offloaded, at random, with copies that come late; None: nothing."""
    documents: int | None = None
    """Seed of the documents that every sample is made of; None: each is one. Of `ragged` the documents of its rows."""
    padded: int | None = None
    """Seed of the padding at the ends of samples; None: none."""
    blocks: bool = False
    """Keys and values in a block for each chunk."""
    multiplex: str = "off"
    """Of sppo: at which ends ranks help each other."""
    cp: int = 1
    """Context-parallel ranks."""
    cp_comm_type: str = "a2a"
    """What they exchange."""
    ep: int = 1
    """Expert-parallel ranks: as many pipelines, each with m microbatches of its own."""
    vocabulary: str = "ends"
    """Where the head is."""
    sharded: bool = False
    """Of test_happens_before.py: weights in parts over data-parallel ranks."""
    gathered_once: bool = False
    """Weights in parts are gathered once a step."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; () for equally many."""
    graphs: bool = False
    """Pieces replayed from graphs, of two steps."""
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
            + [f"loss-slices-{self.loss_chunk}"] * bool(self.loss_chunk)
            + [f"L{self.layers}-limit-{self.memory_limit}"] * (self.memory_limit is not None)
            + _weipipe_marks(self.schedule, self.layers, self.weipipe or WeipipeOptions())
            + ["late"] * self.late
            + [f"offload{self.offload}"] * (self.offload is not None)
            + ["halves"] * self.halves
            + ["pairs"] * self.pairs
            + ["again"] * self.again
            + [f"documents{self.documents}"] * (self.documents is not None)
            + [f"padded{self.padded}"] * (self.padded is not None)
            + ["blocks"] * self.blocks
            + [f"multiplex-{self.multiplex}"] * (self.multiplex != "off")
            + [f"cp{self.cp}-{self.cp_comm_type}"] * (self.cp > 1)
            + ["sharded"] * self.sharded
            + ["gathered-once"] * self.gathered_once
            + ["layers-" + "-".join(map(str, self.stage_layers))] * bool(self.stage_layers)
            + [f"ep{self.ep}"] * (self.ep > 1)
            + ["graphs"] * self.graphs
            + [f"heads-{self.vocabulary}"] * (self.vocabulary != "ends")
            + [str(self.dtype).removeprefix("torch.")] * (self.dtype is not torch.float64)
        )
        return "-".join([self.schedule, self.style, f"p{self.pp}", f"tp{self.tp}", f"m{self.m}", *marks])

    def alone(self) -> Case:
        """The run on one rank that this one is compared with, of all that the comparison depends on."""
        alone = Case("none", 1, self.m * self.ep, self.style, tied=self.tied, layers=self.layers, dtype=self.dtype)
        alone = replace(
            alone, documents=self.documents, padded=self.padded, schedule=RAGGED if self.schedule == RAGGED else "none"
        )
        if not self.dropout:
            return alone
        schedule = "seq1f1b" if self.lengths else "none"
        return replace(alone, schedule=schedule, dropout=self.dropout, lengths=self.lengths)

    def program(self) -> Program:
        return self._program

    @cached_property
    def _program(self) -> Program:
        """Kept in the case, so that it goes where the case is sent."""
        times = parse_piece_times("qkv=1,attn=3,mlp=2")
        head = {"head": 4.0} if self.vocabulary != "ends" else {}
        costs = PieceTimes({**times, **head}) if self.memory_limit is not None or head else None
        if self.style not in ("gpt", "llama"):
            costs = MixedTimes(times, style=self.style)
        chunks, lengths = max(len(self.lengths), 1), self.lengths or None
        shape = Shape(self.pp, self.m, self.layers, chunks, self.v, lengths, costs, memory_limit=self.memory_limit)
        shape = replace(shape, vocabulary=VocabularyOptions(cast(Any, self.vocabulary)))
        shape = replace(shape, stage_layers=self.stage_layers or None)
        if self.schedule == "shared middle":
            return shared_middle(self.split)
        options: Any = self.weipipe
        if self.schedule == RAGGED:
            return self._changed(ragged_program(self.pp, self.layers))
        if self.schedule == "helix":
            options = HelixOptions(self.folds, cast(Any, self.ship), False, helix_spread_head=self.spread)
        if self.multiplex != "off":
            options = SppoOptions(sppo_multiplex=cast(Any, self.multiplex))
        program = build(self.schedule, shape, options)
        assert program.layer_kinds == self.layer_kinds
        if self.cut_after:
            chain = model_pieces(self.layer_kinds)
            cut = [(piece.role, piece.layer) for piece in chain].index((self.cut_after, 2)) + 1
            program = replace(program, stages=(Stage(chain[:cut]), Stage(chain[cut:])))
        return self._changed(program)

    @property
    def layer_kinds(self) -> tuple[LayerKinds, ...]:
        """Of its model."""
        return layers_of(make_config(self.style, num_layers=self.layers))

    def _changed(self, program: Program) -> Program:
        program = of_layers(program, self.layer_kinds)
        program = with_head(program, HEAD_MTP) if make_config(self.style).mtp_num_layers else program
        if self.split:
            program = replace(program, ranks=tuple(_split(ops) for ops in program.ranks))
        if self.recompute.granularity is not None:
            program = replace(program, stages=self.recompute.stages(program.stages))
        program = replace(program, kv_blocks=program.kv_blocks or self.blocks)
        program = place_early(program, unit_costs()) if self.recompute.recompute_early else program
        program = program if self.offload is None else offloading_program(program, self.offload)
        return paired(program) if self.pairs else program


def paired(program: Program, ahead: int = 2) -> Program:
    """The program with as many more units in flight, and every backward beside a forward where both can start."""
    prefer, none = (BACKWARDS, FORWARDS, WEIGHTS), range(len(program.stages), len(program.stages))
    made = reordered(program, unit_costs(), none, prefer, ahead, lambda *pair: may_pair(program, *pair))
    assert made.pairs, "a case of pairs has some"
    return made


@dataclass(frozen=True)
class MixedTimes(PieceTimes):
    """Of a model whose layers are those of a style."""

    style: str = "mixed"

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return layers_of(make_config(self.style, num_layers=layers))

    @property
    def head_kind(self) -> str:  # type: ignore[override]
        return HEAD_MTP if make_config(self.style).mtp_num_layers else "head"


def built(cases: Sequence[Case]) -> list[Case]:
    """The same cases with their programs, which every rank they are sent to would search for again."""
    for case in cases:
        case.program()
    return list(cases)


def shared_middle(split: bool) -> Program:
    """Rank 0 runs the ends; the middle stage of two microbatches on rank 0, of two on rank 1. split: as in `Case`."""
    chain = model_pieces(3)
    stages = (Stage(chain[:6]), Stage(chain[6:11], "replicated"), Stage(chain[11:]))
    first = "0F0,0F1,0F2,0F3,1F0,1F1,2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,1B0,1B1,0B0,0B1,0B2,0B3"
    ranks = parse_rows([first.split(","), ["1F2", "1F3", "1B2", "1B3"]])
    return Program("shared middle", stages, tuple(map(_split, ranks)) if split else ranks, uniform(4))


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


RAGGED = "ragged"

ROWS = Workload(
    (
        ((Slice(0, 0, 4),), (Slice(0, 4, 3), Slice(1, 0, 3), Slice(2, 0, 2))),  # a tail with short documents behind it
        ((Slice(3, 0, 5), Slice(4, 0, 4)),),
        ((Slice(5, 0, 4),), (Slice(5, 4, 3),), (Slice(5, 7, 2),)),
        ((Slice(6, 0, 1),),),
        ((Slice(7, 0, 2), Slice(8, 0, 3)), (Slice(8, 3, 2), Slice(9, 0, 5))),  # a chunk begins in a row's second one
    )
)
"""Microbatches that are not alike."""


def ragged_program(ranks: int, layers: int) -> Program:
    """One forward, one backward over `ROWS`, whose chunks run backward in reverse."""
    orders = []
    forwards = list(ROWS.units())
    backwards = [(m, chunk) for m in range(len(ROWS)) for chunk in reversed(range(len(ROWS.chunks(m))))]
    for rank in range(ranks):
        f, b = ([Op(kind, rank, *unit) for unit in units] for kind, units in (("F", forwards), ("B", backwards)))
        orders.append(tuple(one_forward_one_backward(f, b, ranks - rank - 1 + ROWS.most_chunks - 1)))
    return Program(RAGGED, even_stages(layers, ranks), tuple(orders), ROWS)


def microbatches(case: Case) -> list[Microbatch]:
    generator, rng = torch.Generator().manual_seed(11), random.Random(case.documents)
    batches = []
    for number in range(case.m):
        documents = None
        if case.schedule == RAGGED:
            documents = Documents([[length for _, length in ROWS.documents(number) or ()]] * BATCH)
        elif case.documents is not None:
            documents = Documents([_lengths(rng) for _ in range(BATCH)])
        shape = (BATCH, SEQUENCE if documents is None else documents.tokens)
        tokens, labels = (torch.randint(0, VOCABULARY, shape, generator=generator).to(device()) for _ in range(2))
        mask = torch.randint(0, 2, shape, generator=generator).float().to(device())
        mask[0, 0] = 1
        real = None if case.padded is None else _real(shape, random.Random(case.padded + number))
        if real is not None:
            mask *= real.mask.to(mask)
        batches.append(Microbatch(tokens, labels, mask, documents=documents, real=real))
    return batches


def _real(shape: tuple[int, int], rng: random.Random) -> RealTokens:
    """Return which tokens are real where samples end in padding. One that is not the first may be padding alone."""
    lengths = [rng.randint(int(sample == 0), shape[1]) for sample in range(shape[0])]
    return RealTokens(torch.arange(shape[1]) < torch.tensor(lengths)[:, None], device())


def _lengths(rng: random.Random) -> list[int]:
    """Of documents that make a sample."""
    cuts = sorted(rng.sample(range(1, SEQUENCE), rng.randint(0, 4)))
    return [end - start for start, end in pairwise([0, *cuts, SEQUENCE])]


def one_by_one(batch: Microbatch) -> list[Microbatch]:
    """Every document of every sample alone."""
    if batch.documents is None:
        return [batch]
    parts = []
    for sample, lengths in enumerate(batch.documents.lengths):
        rows = (
            tensor[sample : sample + 1].split(lengths, dim=1)
            for tensor in (batch.tokens, batch.labels, batch.loss_mask)
        )
        parts += [Microbatch(*part) for part in zip(*rows, strict=True)]
    return parts
