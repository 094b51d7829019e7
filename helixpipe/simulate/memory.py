"""Memory of every rank in bytes, by kind, from the lowered program: what is alive when."""

from __future__ import annotations

from dataclasses import dataclass

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.lowering.project import LoweredProgram
from helixpipe.simulate.graph_memory import CostsOutsideGraphs
from helixpipe.simulate.sweep import sweep

KINDS = ("weights", "gradients", "optimizer", "activations", "messages", "workspace")
HOST_KINDS = ("host_activations", "host_optimizer")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each GPU of one pipeline rank at the moment of its peak.

    weights, gradients: with copies of others' weights, and gradients summed for them; where the rank has parts of
    weights, with those that are whole around an op. optimizer: its state, and what its update needs beyond what ops
    have. activations: what units keep for their backward, with all that CUDA graphs keep. messages: received and not
    yet used (weights: not yet there), or made and not yet sent; the rest of what is kept to receive into. workspace: an
    estimate of what the op running then needs beside. received: all that is kept to receive into, from step to step,
    whose parts are among activations and messages. host_activations, host_optimizer: in the host's memory, the most
    there is of activations at any time, and what the optimizer has there; not of the GPU, nor in the total.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float
    workspace: float
    host_activations: float = 0.0
    host_optimizer: float = 0.0
    received: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def host(self) -> float:
        return sum(getattr(self, kind) for kind in HOST_KINDS)


def rank_memory(lowered: LoweredProgram, costs: ModelCosts, rank: int) -> RankMemory:
    """Return the memory of a rank at its peak. A program that only goes forward has neither gradients, optimizer nor
    activations."""
    program = lowered.program
    bound = CostsOutsideGraphs(program, costs, rank)
    swept, pieces = sweep(lowered, bound, rank), program.pieces_of_rank(rank)
    weights, optimizer = costs.kept_parameters(pieces), costs.optimizer_bytes(pieces)
    training = not program.forward_only
    peak, update = swept.most, max(swept.received + costs.update_memory(pieces) - swept.total, 0.0)
    return RankMemory(
        weights=weights * costs.weight_bytes + peak["weights"],
        gradients=weights * GRADIENT_BYTES * training + peak["gradients"],
        optimizer=(optimizer.device + update) * training,
        activations=peak["activations"] + bound.graphs(),
        messages=peak["messages"],
        workspace=peak["workspace"],
        host_activations=swept.host,
        host_optimizer=optimizer.host * training,
        received=swept.received,
    )
