"""Defines the interface of cost models: times of work and of messages, sizes of buffers.

Nothing here knows a microbatch's number: equal work has equal costs and is asked for once (see `lowering.bound`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from helixpipe.program.stages import LayerKinds, Piece, Segment
from helixpipe.program.workload import Extents


class Work(NamedTuple):
    """The work of an op, by which a cost model knows its time.

    kind: F, B, I, W or R (a recomputation, whether it is an op of its own or part of a backward). pieces: those it
    works on; of R, those that are recomputed. extents: of its chunk. whole: tokens of a microbatch, on average over the
    step; None where the extents are parts of a microbatch, of a program that does not say how long a sequence is.
    receives, sends: the first piece after the cut at which the op takes what another rank sent, and after that at which
    it gives what another rank needs; None where there is no such cut. alone: whether no backward follows an F, as in an
    evaluation. starts: first pieces of the segments, which run one after another, each in a graph of its own.
    beside: the work of the op that runs at the same time, a backward beside a forward or the other way round; the times
    of both add up to what the pair takes.
    """

    kind: str
    pieces: tuple[Piece, ...]
    extents: Extents
    whole: float | None
    receives: Piece | None = None
    sends: Piece | None = None
    alone: bool = False
    starts: tuple[Piece, ...] = ()
    beside: Work | None = None


class Leaving(NamedTuple):
    """The part of a unit's saved tensors that is offloaded.

    runs: of pieces, with the share of each run's bytes; whole tensors go, the largest first, as long as they are within
    the share. before, after: the pieces beside the unit's stage, None at the model's ends: what crosses the cut to
    `after` may still be read by another, and stays; so does what `before` saves, too. min_bytes: of a tensor that goes.
    """

    runs: tuple[tuple[tuple[Piece, ...], float], ...]
    before: Piece | None = None
    after: Piece | None = None
    min_bytes: int = 0


class Contents(NamedTuple):
    """The content of a buffer, by which a cost model knows its size.

    kind: one of `tasks.BUFFER_KINDS`. segments: of the unit's stage (of `activation` and `gradient` one with the one
    piece after the cut). extents, whole: as of `Work`; of `keys_values` one extent, the tokens of the row or block, and
    of `kv_gradients` one with those that have gradients to sum. in_backward: of `recomputed` and `workspace`, whether
    that is made run by run inside the backward, where the most at a time counts, and not all of it by an R before.
    gradient_bytes: of an element of a weight's gradient. leaving: of `offloaded`, which part of what the segments save.
    outside: of `saved`, `recomputed` and `workspace`, what does not lie in the memory of CUDA graphs. op: of
    `workspace`, the kind of the op that needs it. beside: of a backward's `workspace`, what the forward that
    runs at the same time will have saved, which then counts as workspace of both.
    """

    kind: str
    segments: tuple[Segment, ...]
    extents: Extents
    whole: float | None
    in_backward: bool = False
    gradient_bytes: int = 4
    leaving: Leaving | None = None
    outside: bool = False
    op: str = "B"
    beside: Contents | None = None


class Load(NamedTuple):
    """The data that a transfer moves, by which a cost model knows its time.

    kind: a key of `transfer.TRANSFER_KINDS`. ranks: of a link the two pipeline ranks that it goes between. contents: of
    the buffer that moves; of a collective the whole of which each member has, or gets, a part. members: of a
    collective's group. ends: of a link, of how many (source, target) the busiest rank of the pipeline is one; 0 where
    that is not known.
    """

    kind: str
    ranks: tuple[int, ...]
    contents: Contents
    members: int = 1
    ends: int = 0


class Costs(Protocol):
    """Times in one unit, whatever it is, and memory in one unit, of a model.

    layer_kinds: the kinds of the pieces of each layer of the model, had it so many layers. head_kind: that of its head.
    op_time: of an op alone; recomputation inside a backward is asked for as R. transfer_time: of a transfer whose link,
    group or copy engine has nothing else to do (copies with both directions in use). handling_time: how long sending
    (or receiving) it, or making a copy, keeps the rank itself from computing beside what is in op_time. size: of a
    buffer; 0 where the unit of memory does not count its kind. static_memory: all that a rank that holds these pieces
    has at all times (weights, gradients, optimizer; 0 where unknown). static_host_memory: what of that is in its host's
    memory instead.

    update_memory: what a rank that holds these pieces needs beside while its optimizer updates its weights.

    Costs may have `by_kind = True`, which says that a piece's kind and place within its stage decide, and not which
    layer it is of: then stages alike are asked for once; `link_class(source, target)`, which is equal for links on
    which equal messages take equally long: then one of them is asked for; and `captures = True`, which says that pieces
    run as CUDA graphs where the program lets them: then the sizes of those are known (`simulate/graph_memory.py`).
    """

    @property
    def memory_unit(self) -> str: ...

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]: ...

    @property
    def head_kind(self) -> str: ...

    def op_time(self, work: Work) -> float: ...

    def transfer_time(self, load: Load) -> float: ...

    def handling_time(self, load: Load, sends: bool) -> float: ...

    def size(self, contents: Contents) -> float: ...

    def static_memory(self, pieces: Sequence[Piece]) -> float: ...

    def static_host_memory(self, pieces: Sequence[Piece]) -> float: ...

    def update_memory(self, pieces: Sequence[Piece]) -> float: ...
