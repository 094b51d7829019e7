"""Judges whether a simulated step fits into its GPUs."""

from __future__ import annotations

from math import inf

from helixpipe.costs.verdict import MemoryVerdict, tensor_limit
from helixpipe.lowering.bound import BoundCosts
from helixpipe.simulate.simulator import Simulation


def memory_verdict(
    simulation: Simulation, gpu: float, limit: float | None = None, host_limit: float = inf
) -> MemoryVerdict:
    """Return whether a simulated step fits, with the figures of the GPU that needs most.

    Args:
        simulation: a step whose costs are in bytes.
        gpu: bytes of a GPU's memory; infinite if unknown.
        limit: bytes of tensors that a GPU may hold; None: as many as fit.
        host_limit: bytes of the host's memory for each GPU.
    """
    needs = simulation.device_needs
    fullest = max(range(len(needs)), key=needs.__getitem__)
    cached = cached_workspaces(simulation, fullest)
    return MemoryVerdict(needs[fullest], cached, gpu, tensor_limit(gpu, limit), max(simulation.host_needs), host_limit)


def cached_workspaces(simulation: Simulation, rank: int) -> float:
    """Return the bytes of workspaces that a rank's allocator caches at the peak of memory: for each length of a chunk
    the largest of an op, but for the one in use then. Blocks of one length do not serve another's tensors.
    """
    program = simulation.lowered.program
    bound, workload = BoundCosts(program, simulation.costs), program.workload
    lengths = [workload.tokens(microbatch) for microbatch in range(len(workload))]
    largest: dict[float, float] = {}
    for op in program.ranks[rank]:
        length = lengths[op.microbatch][op.chunk]
        largest[length] = max(largest.get(length, 0.0), bound.workspace(op))
    return max(sum(largest.values()) - simulation.peaks[rank].most["workspace"], 0.0)
