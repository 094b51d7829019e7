"""From a program to its graph: the passes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from helixpipe.lowering.compiled import draft_of, incomplete
from helixpipe.lowering.graph import Draft, Graph
from helixpipe.lowering.index import OpIndex
from helixpipe.lowering.passes.activations import activations
from helixpipe.lowering.passes.borrowed import borrowed_weights
from helixpipe.lowering.passes.keys_values import keys_values
from helixpipe.lowering.passes.offload import offloaded
from helixpipe.lowering.passes.pairs import pairs
from helixpipe.lowering.passes.replicas import replica_sums
from helixpipe.lowering.passes.sharded import sharded_weights
from helixpipe.lowering.passes.split_head import split_head
from helixpipe.lowering.passes.turns import turns
from helixpipe.program.program import Program


class Pass(NamedTuple):
    """A function that adds its buffers and transfers to a draft, and nothing where a program does not need it.

    gives: the kinds of transfers that it adds. needs: the kinds that must be there before. A pass needs what its own
    transfers wait for; and since transfers are numbered as they are added, which decides between those of one time,
    collectives of weights come after all messages and copies after both.
    """

    add: Callable[[Draft], None]
    gives: frozenset[str]
    needs: frozenset[str]


_ACTIVATIONS = frozenset({"activation", "gradient"})
_KEYS_VALUES = frozenset({"keys_values", "kv_gradients"})
_HEAD = frozenset({"head_input", "head_sums", "head_gradient"})
_TURNS = frozenset({"turn"})
_WEIGHTS = frozenset({"weights", "weight_gradients"})
_REPLICA_SUMS = frozenset({"replica_sum"})
_SHARDED = frozenset({"gather", "scatter"})
_COPIES = frozenset({"offload", "fetch"})
_MESSAGES = _ACTIVATIONS | _KEYS_VALUES | _WEIGHTS

PASSES = (
    Pass(activations, _ACTIVATIONS, frozenset()),
    Pass(keys_values, _KEYS_VALUES, frozenset()),
    Pass(split_head, _HEAD, frozenset()),
    Pass(turns, _TURNS, _ACTIVATIONS | _KEYS_VALUES | _HEAD),
    Pass(
        borrowed_weights, _WEIGHTS, _ACTIVATIONS | _KEYS_VALUES | _HEAD | _TURNS
    ),  # the turns must respect all that ops wait for
    Pass(replica_sums, _REPLICA_SUMS, _MESSAGES),
    Pass(sharded_weights, _SHARDED, _MESSAGES | _REPLICA_SUMS),  # a stage's sum waits for its last scatters
    Pass(offloaded, _COPIES, _MESSAGES | _REPLICA_SUMS | _SHARDED),
    Pass(pairs, frozenset(), _MESSAGES | _REPLICA_SUMS | _SHARDED | _COPIES | _HEAD),  # moves all edges there are
)


def check_passes(passes: Sequence[Pass]) -> None:
    """Check that each pass comes after those that give what it needs. Raises ValueError, which names it."""
    there: set[str] = set()
    for own in passes:
        if missing := sorted(own.needs - there):
            raise ValueError(f"pass {own.add.__name__} needs {', '.join(missing)}, which no pass before it gives")
        there |= own.gives


def graph_of(program: Program, index: OpIndex | None = None) -> Graph:
    """The graph of a program, built once; that of an equal program which keeps nothing. index: as in `build_graph`."""
    return program.derive("graph", None, lambda: build_graph(replace(program), index))


def build_graph(program: Program, index: OpIndex | None = None, passes: Sequence[Pass] = PASSES) -> Graph:
    """Tasks, buffers and edges of a complete program (one that has every op its ops wait for; see `validate`).
    index: of its ops, if it is at hand. Raises ValueError where a pass comes before one that it needs."""
    check_passes(passes)
    draft = draft_of(program) if passes is PASSES else None
    if draft is not None:
        try:
            return _made(draft, passes)
        except incomplete():  # for validation to describe
            pass
    return _made(Draft(program, index or OpIndex(program)), passes)


def _made(draft: Draft, passes: Sequence[Pass]) -> Graph:
    for own in passes:
        if not draft.adds(own.add.__name__):
            own.add(draft)
    return draft.finished()
