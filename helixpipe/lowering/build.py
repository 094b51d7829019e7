"""From a program to its graph: the passes, one after the other. No torch here."""

from __future__ import annotations

from helixpipe.lowering.graph import Draft, Graph
from helixpipe.lowering.index import OpIndex
from helixpipe.lowering.passes.activations import activations
from helixpipe.lowering.passes.borrowed import borrowed_weights
from helixpipe.lowering.passes.keys_values import keys_values
from helixpipe.lowering.passes.offload import offloaded
from helixpipe.lowering.passes.replicas import replica_sums
from helixpipe.lowering.passes.sharded import sharded_weights
from helixpipe.program.program import Program

PASSES = (activations, keys_values, borrowed_weights, replica_sums, sharded_weights, offloaded)
"""Each adds its buffers and transfers to the draft; one that a program does not need adds nothing."""


def build_graph(program: Program, index: OpIndex | None = None) -> Graph:
    """Tasks, buffers and edges of a complete program (one that has every op its ops wait for; see `validate`).
    index: of its ops, if it is at hand."""
    draft = Draft(program, index or OpIndex(program))
    for add in PASSES:
        add(draft)
    return draft.graph
