"""Reports a simulated step, for `helixpipe simulate --model` and `helixpipe memory`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from helixpipe.cli.model import ModelOnCluster
from helixpipe.costs.hardware import GIB, TERA
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import HALVES, OFF, PAIRS, Layout
from helixpipe.costs.piece_kinds import num_parameters
from helixpipe.costs.verdict import MemoryVerdict
from helixpipe.draw.style import count
from helixpipe.draw.table import figure_lines, right_aligned
from helixpipe.draw.text import MAX_RANK_LINES, shape_line
from helixpipe.lowering.project import LoweredProgram
from helixpipe.simulate.memory import HOST_KINDS, KINDS, RankMemory, rank_memory
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.verdict import memory_verdict


@dataclass(frozen=True)
class StepReport:
    """Figures of one step; times in seconds. reduction, optimizer: after the last backward. with_loss_slices: the most
    that a rank would need if head and loss ran over slices; None where the step fits, or has them. verdict: whether it
    fits."""

    simulation: Simulation
    plan: ModelOnCluster
    reduction: float
    optimizer: float
    memory: list[RankMemory]
    verdict: MemoryVerdict
    with_loss_slices: float | None = None

    @property
    def step_time(self) -> float:
        return self.simulation.makespan + self.reduction + self.optimizer

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.plan.tokens / (self.step_time * self.plan.gpus)

    @property
    def flops_per_gpu(self) -> float:
        """A second: those that the mathematics needs, causal attention at half the square."""
        return self.plan.costs.step_flops(self.simulation.lowered.program) / (self.step_time * self.plan.gpus)

    @property
    def utilization(self) -> float:
        return self.flops_per_gpu / self.plan.costs.hardware.flops

    @property
    def peak(self) -> float:
        """Bytes of tensors on the GPU that needs most."""
        return self.verdict.allocated

    @property
    def columns(self) -> tuple[str, ...]:
        """The kinds of memory reported for each rank."""
        host = [kind for kind in HOST_KINDS if any(getattr(memory, kind) for memory in self.memory)]
        return (*KINDS, "total", *host)

    @property
    def host_peak(self) -> float:
        """Bytes of its host's memory that a GPU needs, at most."""
        return max(memory.host for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether the step fits into the GPUs and their hosts."""
        return self.verdict.fits

    def to_json(self) -> dict[str, Any]:
        costs = self.plan.costs
        return {
            "simulated": True,
            "model": costs.model.name,
            "parameters": num_parameters(costs.model),
            "seq_length": costs.seq_length,
            "micro_batch_size": costs.layout.micro_batch_size,
            "global_batch_size": self.plan.sequences,
            "hardware": costs.hardware.name,
            "nodes": self.plan.nodes,
            "gpus": self.plan.gpus,
            "tensor_parallel": costs.layout.tensor_parallel,
            "sequence_parallel": costs.layout.sequence_parallel,
            "context_parallel": costs.layout.context_parallel,
            "chunk_size": costs.layout.mlp_chunk,
            "loss_chunk_size": costs.layout.loss_chunk,
            "data_parallel": costs.data_parallel,
            "efficiency": dict(vars(costs.hardware.efficiency)),
            "efficiency_from": self.plan.efficiency_from,
            "step_time": self.step_time,
            "reduction_time": self.reduction,
            "optimizer_time": self.optimizer,
            "tokens_per_second_per_gpu": self.tokens_per_gpu,
            "tflops_per_gpu": self.flops_per_gpu / TERA,
            "mfu": self.utilization,
            **self.memory_json(),
        }

    def memory_json(self) -> dict[str, Any]:
        ranks = [{kind: round(getattr(m, kind)) for kind in self.columns} for m in self.memory]
        host = {"host_memory_limit": round(self.plan.costs.host_memory)} if self.host_peak else {}
        verdict = self.verdict
        figures = {"memory_allocated": round(verdict.allocated), "memory_reserved": round(verdict.reserved)}
        return {"memory": ranks, **figures, "memory_limit": round(verdict.limit), **host, "fits": verdict.fits}


def report(simulation: Simulation, plan: ModelOnCluster) -> StepReport:
    """Return the figures of a simulated step."""
    lowered, costs = simulation.lowered, plan.costs
    training = not lowered.program.forward_only
    reduction, optimizer = costs.after_time(lowered.program) if training else (0.0, 0.0)
    verdict = memory_verdict(simulation, costs.hardware.memory, plan.memory_limit, costs.host_memory)
    step = StepReport(simulation, plan, reduction, optimizer, _memory(lowered, costs), verdict)
    if verdict.allocated <= verdict.limit or costs.layout.loss_chunk or costs.model.further:
        return step
    sliced = _memory(lowered, replace(costs, layout=costs.layout.with_loss_slices()))
    return replace(step, with_loss_slices=max(memory.total for memory in sliced))


def _memory(lowered: LoweredProgram, costs: ModelCosts) -> list[RankMemory]:
    return [rank_memory(lowered, costs, rank) for rank in range(lowered.program.num_ranks)]


def step_text(step: StepReport) -> str:
    """Return the whole report: setup, times, memory, assumptions."""
    simulation, plan = step.simulation, step.plan
    flops = f"{step.flops_per_gpu / TERA:.1f} TFLOP/s a GPU of {plan.costs.hardware.flops / TERA:.0f}"
    after = f"pipeline {simulation.makespan:.4g} s, gradients {step.reduction:.2g} s, optimizer {step.optimizer:.2g} s"
    figures = [
        ("step time", f"{step.step_time:.4g} s", after),
        ("throughput", f"{step.tokens_per_gpu:.1f}", "tokens a second and GPU"),
        ("MFU", f"{100 * step.utilization:.1f} %", f"{flops}; causal attention counts half, recomputation nothing"),
        (
            "bubble",
            f"{simulation.bubble_time:.4g} s",
            f"{100 * simulation.bubble_ratio:.1f} % of the makespan, the pipeline's time",
        ),
        ("messages", str(len(simulation.lowered.messages)), "between ranks"),
    ]
    lines = figure_lines(figures)
    return "\n".join(
        [_setup(step), "", "Simulated, not measured:", *lines, "", memory_text(step), "", _assumptions(step)]
    )


def memory_text(step: StepReport) -> str:
    """Return a line a rank with GiB of each kind at the rank's memory peak; of many ranks, only the extremes."""
    ranks = list(range(len(step.memory)))
    if len(ranks) > MAX_RANK_LINES:
        ranks.sort(key=lambda rank: step.memory[rank].total)
        ranks = [ranks[0], ranks[-1]]
    names = {"host_activations": "on host", "host_optimizer": "Adam on host"}
    headers = ("rank", *(names.get(kind, kind) for kind in step.columns))
    rows = [(str(rank), *(f"{getattr(step.memory[rank], kind) / GIB:.2f}" for kind in step.columns)) for rank in ranks]
    lines = right_aligned(headers, rows, [7] * len(headers))
    what = "least and most of all ranks, " if len(ranks) < len(step.memory) else ""
    lines = [f"Memory of each GPU, GiB ({what}simulated):", *lines, *_host_line(step)]
    lines.append(step.verdict.sentence)
    if step.with_loss_slices is not None and step.with_loss_slices < step.peak:
        size = step.plan.costs.layout.with_loss_slices().loss_chunk
        lines.append(f"with --loss-chunk-size {size} a rank needs {step.with_loss_slices / GIB:.1f} GiB at most")
    return "\n".join(lines)


def _host_line(step: StepReport) -> list[str]:
    """Return the line on host memory, if any is used."""
    if not step.host_peak:
        return []
    share, peak = step.plan.costs.host_memory / GIB, step.host_peak / GIB
    return [f"Host memory of each GPU: {peak:.1f} GiB of {share:.1f}, its part of the node's"]


_HIDDEN = {
    OFF: "each backward hides those of layers split by columns, a ring its messages, and nothing else",
    HALVES: "each op hides most behind the other half of its tokens",
    PAIRS: "those of a pair hide most behind each other, and each backward those of layers split by columns",
}
"""How ops run -> what of their collectives is hidden."""


_KERNELS = {
    "unfused": "unfused attention with dropout's mask",
    "fa1": "FlashAttention-1, no dropout",
    "fa2": "flash attention, no dropout",
    "fa3": "FlashAttention-3, no dropout",
    "cudnn": "cuDNN's attention, no dropout",
}
"""Kernel of core attention -> what is assumed of it."""


def _experts(layout: Layout) -> str:
    """Return how experts are shared out, if they are."""
    if layout.expert_parallel == 1:
        return ""
    split = f", each split over {layout.expert_tensor}" if layout.expert_tensor else ""
    load = f", the busiest with {layout.expert_load:.3g} times the mean" if layout.expert_load > 1 else ""
    return f", experts over {layout.expert_parallel}{split}{load}"


def _setup(step: StepReport) -> str:
    plan, costs = step.plan, step.plan.costs
    split = ", sequence parallel" if costs.layout.sequence_parallel else ""
    split += ", tokens in halves" if costs.layout.halves else ""
    split += ", forwards beside backwards" if costs.layout.pairs else ""
    if costs.layout.context_parallel > 1:
        split += f", context parallel {costs.layout.context_parallel} ({costs.layout.cp_comm_type})"
    split += _experts(costs.layout)
    sizes = {"MLP": costs.layout.mlp_chunk, "loss": costs.layout.loss_chunk}
    sliced = "".join(f"; {what} over slices of {size} tokens" for what, size in sizes.items() if size)
    shared = " with weights in parts" if costs.sharded > 1 else ""
    optimizer = "distributed " if costs.distributed_optimizer and costs.weight_holders > 1 else ""
    moved = f", {100 * costs.adam_on_host:.0f} % of it on the host" if costs.adam_on_host else ""
    sequences = f"{costs.seq_length} tokens a sequence, {costs.layout.micro_batch_size} in a microbatch, "
    if plan.documents is not None:
        sequences = f"documents of up to {max(plan.documents.lengths)} tokens, "
    return "\n".join(
        [
            shape_line(step.simulation),
            f"{costs.model.name}: {num_parameters(costs.model) / 1e9:.2f} G weights; {sequences}"
            f"{plan.sequences} a step{sliced}",
            f"{plan.gpus} x {costs.hardware.title} in {count(plan.nodes, 'node')}: "
            f"tensor parallel {costs.layout.tensor_parallel}{split}, "
            f"pipeline {plan.ranks}, data parallel {costs.data_parallel}{shared}, {optimizer}Adam{moved}",
        ]
    )


def _assumptions(step: StepReport) -> str:
    hardware = step.plan.costs.hardware
    share, path = hardware.efficiency, step.plan.efficiency_from
    source = "" if path is None else f"Shares of peaks not given by flags are from {path}, the network's aside.\n"
    return (
        f"{source}Assumed: {100 * share.matmul:.0f} % of peak in matrix products, {100 * share.attention:.0f} % in "
        f"attention, {100 * share.memory:.0f} % of memory bandwidth,\n"
        f"{100 * share.network:.0f} % of NVLink and network; bfloat16, gradients and optimizer in float32, "
        f"{_KERNELS[step.plan.costs.layout.attention_kernel]};\n"
        f"of collectives inside ops {_HIDDEN[step.plan.costs.layout.overlap_tp_comm]};\n"
        "the reduction of gradients overlaps nothing, messages overlap computing.\n"
        "--matmul-efficiency, --attention-efficiency, --memory-efficiency and --network-efficiency change the shares;\n"
        "--efficiency-from takes them from a file of `helixpipe profile`."
    )
