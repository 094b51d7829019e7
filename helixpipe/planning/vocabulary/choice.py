"""Where the head's work is done, `--pipeline-vocab-parallel`: on the last rank, or on every rank.

With a vocabulary of 128k the head takes as long as several layers. On the last stage it holds up all ranks for every
microbatch. Spread, every rank holds the head whole and runs it for the microbatches that fall to it in turn, which
takes memory on every rank, two messages a microbatch, and more microbatches in flight, as gradients come back later.
Split, every rank has a part of the vocabulary and works on every microbatch, which takes no more memory for weights but
three collectives a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option, setting
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.memory.early import makespan, peak_memory
from helixpipe.planning.vocabulary.lanes import BACKWARDS, FORWARDS, HEAD_BACKWARDS, HEADS, WEIGHTS, reordered
from helixpipe.planning.vocabulary.spread import HEAD, head_ops, spread_heads, spreadable, with_heads, without_head
from helixpipe.program.costs import Contents, Costs, Load, Work
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LayerKinds, Piece, Stage, split_head

AHEAD = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Units more in flight that are tried, for each stage of a rank."""

PATIENCE = 3
"""After so many of `AHEAD` that are no faster no more are tried."""

PREFERENCES = (
    (HEAD_BACKWARDS, HEADS, FORWARDS, BACKWARDS, WEIGHTS),
    (HEAD_BACKWARDS, HEADS, BACKWARDS, FORWARDS, WEIGHTS),
)
"""The preferences of a free rank that are tried. What a head has made for its backward is large, so that goes first."""


@dataclass(frozen=True)
class VocabularyOptions:
    """The flag about the head's place."""

    pipeline_vocab_parallel: Literal["ends", "spread", "split", "auto"] = option(
        "ends",
        "The output layer and the loss: ends, on the last pipeline stage; spread, whole on every rank, each of which "
        "runs it for some of the microbatches; split, a part of the vocabulary on every rank; auto, what is fastest "
        "and fits. Schedules that spread the output layer themselves stay as they are.",
    )

    vocab_parallel_splits: bool = setting(True, "Whether auto may choose split.")

    @property
    def over_pipeline(self) -> bool:
        """Whether other ranks than the last may have a share of the head's work."""
        return self.pipeline_vocab_parallel != "ends"


_BEFORE_A_CUT = ("activation", "gradient", "graph_slot", "graph_gradients")
"""Kinds of contents that name the piece after a cut, which may be the head; theirs it is not."""


@dataclass(frozen=True)
class WithoutHead:
    """Costs of a model whose head takes no time, and no memory but that of its weights on every rank: for the order of
    all other pieces."""

    costs: Costs

    @property
    def by_kind(self) -> bool:
        return getattr(self.costs, "by_kind", False)

    @property
    def link_class(self) -> Callable[[int, int], Hashable] | None:
        return getattr(self.costs, "link_class", None)

    @property
    def captures(self) -> bool:
        return getattr(self.costs, "captures", False)

    @property
    def memory_unit(self) -> str:
        return self.costs.memory_unit

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return self.costs.layer_kinds(layers)

    @property
    def head_kind(self) -> str:
        return self.costs.head_kind

    def op_time(self, work: Work) -> float:
        pieces = tuple(piece for piece in work.pieces if piece != HEAD)
        return self.costs.op_time(work._replace(pieces=pieces)) if pieces else 0.0

    def transfer_time(self, load: Load) -> float:
        return self.costs.transfer_time(load)

    def handling_time(self, load: Load, sends: bool) -> float:
        return self.costs.handling_time(load, sends)

    def size(self, contents: Contents) -> float:
        if contents.kind in _BEFORE_A_CUT:
            return self.costs.size(contents)
        segments = tuple(
            each._replace(pieces=tuple(piece for piece in each.pieces if piece != HEAD)) for each in contents.segments
        )
        rest = tuple(each for each in segments if each.pieces)
        return self.costs.size(contents._replace(segments=rest)) if rest else 0.0

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        return self.costs.static_memory(_with_head(pieces))

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return self.costs.static_host_memory(_with_head(pieces))

    def update_memory(self, pieces: Sequence[Piece]) -> float:
        return self.costs.update_memory(_with_head(pieces))


def _with_head(pieces: Sequence[Piece]) -> list[Piece]:
    return [*(piece for piece in pieces if piece != HEAD), HEAD]


def over_pipeline(
    build: Callable[[Costs | None], Program],
    options: VocabularyOptions,
    costs: Costs,
    limit: float | None,
    finished: Callable[[Program], Program] = lambda program: program,
) -> Program:
    """Return a schedule's program with its head where the options say.

    build: the schedule's program found with these costs; None: with those of its shape. limit: the memory of a rank, in
    the costs' unit; None: none. finished: makes of a program what will run, with what it recomputes. Within the limit
    the fastest program of those tried; where none fits, the one that needs least. auto: the schedule's own where that
    fits and no other is faster.
    """
    ends, mode = build(None), options.pipeline_vocab_parallel
    found: list[Program] = []
    if mode in ("spread", "auto") and spreadable(ends):
        found += _on_all_ranks(spread_heads, build, costs, limit)
    if (mode == "split" or (mode == "auto" and options.vocab_parallel_splits)) and splittable(ends):
        found += _on_all_ranks(split_heads, build, costs, limit)
    if not found or mode == "auto":
        found.insert(0, ends)
    return found[0] if len(found) == 1 else min(found, key=lambda program: _rating(finished(program), costs, limit))


def head_place(program: Program) -> Literal["ends", "spread", "split"]:
    """Return the value of the flag that the program is an example of."""
    if program.stages[-1].part is not None:
        return "split"
    return "spread" if program.stages[-1].placement == "replicated" else "ends"


def check_heads(name: str, program: Program, options: VocabularyOptions) -> None:
    """Raise ScheduleError where the flag says another place of the head than a file does."""
    asked, own = options.pipeline_vocab_parallel, head_place(program)
    if asked not in ("ends", "auto", own):
        raise ScheduleError(
            f"{name} says itself where the output layer is; leave --pipeline-vocab-parallel {asked} out (the file's "
            f"place is {own})."
        )


def _rating(program: Program, costs: Costs, limit: float | None) -> tuple[float, float]:
    """Return how far the program exceeds the memory, and how long a step takes, with the sums of gradients over copies
    of the head where the costs know them.
    """
    excess = 0.0 if limit is None else max(0.0, max(peak_memory(program, costs)) - limit * (1 + 1e-9))
    after = sum(costs.after_time(program)) if isinstance(costs, ModelCosts) else 0.0
    return excess, float(f"{makespan(program, costs) + after:.9g}")


def _on_all_ranks(
    place: Callable[[Program, Costs, bool], Program],
    build: Callable[[Costs | None], Program],
    costs: Costs,
    limit: float | None,
) -> Iterator[Program]:
    """Yield programs with a head on every rank: one for each way to go about it, the fastest that fits. place: puts the
    heads into a program.
    """
    given = build(WithoutHead(costs))
    halves = any(op.kind == "I" for ops in given.ranks for op in ops)
    for split in (False, True)[: 1 + halves]:
        program = place(given, costs, split)
        yield program
        for prefer in PREFERENCES:
            yield from _ahead(program, costs, prefer, limit)


def _ahead(program: Program, costs: Costs, prefer: Sequence[str], limit: float | None) -> Iterator[Program]:
    """Yield the fastest order within the limit of those with more units in flight."""
    last = len(program.stages) - 1
    heads = range(min(program.chain, last), last + 1)
    own = max(len({op.stage for op in ops} - set(heads)) for ops in program.ranks)
    units = sum(map(len, program.workload.microbatches))
    best, fastest, later = None, inf, 0
    exceeds = False
    for ahead in AHEAD:
        if ahead > units or later >= PATIENCE:
            break
        order = reordered(program, costs, heads, prefer, ahead * own)
        time = scheduled(order, costs).makespan
        if time >= fastest * (1 - 1e-9):
            later += 1
            continue
        if limit is not None and max(peak_memory(order, costs)) > limit:
            exceeds = True
            if best is not None:
                break
        best, fastest, later = order, time, 0
    if best is not None:
        yield best
    if limit is not None and exceeds:
        yield from _fewer(program, costs, heads, prefer, limit)


def _fewer(program: Program, costs: Costs, heads: range, prefer: Sequence[str], limit: float) -> Iterator[Program]:
    """Yield the order with the most units in flight on a rank that the memory allows, if there is one."""
    own = max(len({op.stage for op in ops}) for ops in program.ranks)
    least, most, best = 1, own * min(sum(map(len, program.workload.microbatches)), 4 * program.num_ranks), None
    while least < most:
        tried = (least + most) // 2
        order = reordered(program, costs, heads, prefer, most=tried)
        complete = all(len(found) == len(given) for found, given in zip(order.ranks, program.ranks, strict=True))
        if complete and max(peak_memory(order, costs)) > limit:
            most = tried
        else:
            least, best = tried + 1, order if complete else best
    if best is not None:
        yield best


def splittable(program: Program) -> bool:
    """Return whether the head can be divided over all ranks: there are several, it is whole and in one place, and no
    weights travel.
    """
    return (
        program.num_ranks > 1
        and not program.forward_only
        and all(stage.owner is None for stage in program.stages)
        and program.stages[-1].pieces[-1] == HEAD
        and program.stages[-1].placement == "resident"
    )


def split_heads(program: Program, costs: Costs, split: bool = False) -> Program:
    """Divide the head's vocabulary over all ranks (`stages.split_head`): the final norm stays with the last stage, and
    each part is a stage of its own.

    Each part goes forward and at once backward, on every rank, when the rest of the last stage would have begun its
    backward. split: where the last stage's backward is split, so are the parts'. The program must be `splittable`.
    """
    last, rest = program.stages[-1], len(program.stages) - 1
    norm, *parts = split_head(program.num_ranks)
    own = without_head(last.activations)
    rest_of_last = replace(last, pieces=(*last.pieces[:-1], norm), recompute=own.recompute)
    stages = (*program.stages[:rest], rest_of_last, *(Stage((part,)) for part in parts))

    def heads(op: Op) -> list[tuple[int, tuple[Op, ...]]]:
        return [(rank, head_ops(op, rest + 1 + rank, split)) for rank in range(program.num_ranks)]

    ranks = with_heads(program, costs, rest, heads)
    activations = {
        unit: without_head(each) if unit.stage == rest else each for unit, each in program.activations.items()
    }
    return replace(program, stages=stages, ranks=ranks, activations=activations)
