"""From a program to its graph: the passes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from helixpipe.lowering.graph import Draft, Graph
from helixpipe.lowering.index import OpIndex
from helixpipe.lowering.passes.activations import activations
from helixpipe.lowering.passes.borrowed import borrowed_weights
from helixpipe.lowering.passes.keys_values import keys_values
from helixpipe.lowering.passes.offload import offloaded
from helixpipe.lowering.passes.replicas import replica_sums
from helixpipe.lowering.passes.sharded import sharded_weights
from helixpipe.program.program import Program


class Pass(NamedTuple):
    """A function that adds its buffers and transfers to a draft, and nothing where a program does not need it.

    gives: the kinds of transfers that it adds. needs: the kinds that must be there before. A pass needs what its own
    transfers wait for; and since tasks are numbered messages first, then collectives, then copies, whoever adds a
    collective needs all messages, and whoever adds a copy all of both.
    """

    add: Callable[[Draft], None]
    gives: frozenset[str]
    needs: frozenset[str]


ACTIVATIONS = frozenset({"activation", "gradient"})
KEYS_VALUES = frozenset({"keys_values", "kv_gradients"})
WEIGHTS = frozenset({"weights", "weight_gradients"})
REPLICA_SUMS = frozenset({"replica_sum"})
SHARDED = frozenset({"gather", "scatter"})
COPIES = frozenset({"offload", "fetch"})
_MESSAGES = ACTIVATIONS | KEYS_VALUES | WEIGHTS

PASSES = (
    Pass(activations, ACTIVATIONS, frozenset()),
    Pass(keys_values, KEYS_VALUES, frozenset()),
    Pass(borrowed_weights, WEIGHTS, ACTIVATIONS | KEYS_VALUES),  # the turns must respect all that ops wait for
    Pass(replica_sums, REPLICA_SUMS, _MESSAGES),
    Pass(sharded_weights, SHARDED, _MESSAGES | REPLICA_SUMS),  # a stage's sum waits for its last scatters
    Pass(offloaded, COPIES, _MESSAGES | REPLICA_SUMS | SHARDED),
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
    if "graph" not in program.derived:
        program.derived["graph"] = build_graph(replace(program), index)
    graph: Graph = program.derived["graph"]
    return graph


def build_graph(program: Program, index: OpIndex | None = None, passes: Sequence[Pass] = PASSES) -> Graph:
    """Tasks, buffers and edges of a complete program (one that has every op its ops wait for; see `validate`).
    index: of its ops, if it is at hand. Raises ValueError where a pass comes before one that it needs."""
    check_passes(passes)
    draft = Draft(program, index or OpIndex(program))
    for own in passes:
        own.add(draft)
    return draft.graph
