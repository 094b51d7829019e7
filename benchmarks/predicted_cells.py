"""Published cells, predicted: the training program's flags, the cell's hardware and the cell's runtime, on paper."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published_cells import Cell
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB, RESERVED_MEMORY, Hardware, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.lower import lower
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from megatron.training.arguments import parse_args
from megatron.training.plan.costs import training_costs
from megatron.training.plan.programs import full_batch, make_program

OP_OVERHEAD = 12e-3
"""Seconds of an op of Megatron-LM's engine that sends and receives between nodes: the host waits for the device after
each exchange, so that the op's kernels are launched one by one again."""

OP_OVERHEAD_IN_NODE = 0.0
KV_PASSES = 10
"""How often the engine of Seq1F1B goes over the keys and values of earlier chunks in a chunk's backward."""

KV_COPIES = 2
"""It joins the keys and values so far for every chunk, and keeps both."""

_ALWAYS = {
    "lr": 1e-3,
    "train-iters": 1,
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 50257,
    "bf16": True,
    "loss-chunk-size": 0,
}
"""Flags that no table says and training needs, or chooses by memory."""


@dataclass(frozen=True)
class Predicted:
    """Before any calibration. memory: bytes allocated on the fullest GPU; fits: whether that, and what is reserved for
    the driver and communicators, is within the GPU's memory."""

    tokens_per_gpu: float
    memory: float
    limit: float

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit


def hardware_of(cell: Cell) -> Hardware:
    """The cell's node."""
    hardware = replace(find_hardware(cell.hardware), gpus_per_node=cell.gpus_per_node)
    if cell.network_gbits_per_node is not None:
        network = cell.network_gbits_per_node * 1e9 / 8
        adapter = hardware.network / hardware.adapters
        hardware = replace(hardware, network=network, adapters=max(1, min(hardware.adapters, round(network / adapter))))
    return replace(hardware, nvlink=hardware.host_link) if cell.pcie else hardware


def arguments(cell: Cell) -> list[str]:
    """The training program's command line."""
    flags = {**_ALWAYS, **cell.flags}
    flags.setdefault("max-position-embeddings", flags.get("seq-length", 1))
    if cell.schedule == "fsdp":
        flags |= {"data-parallel-sharding-strategy": "optim_grads_params", "use-distributed-optimizer": True}
    else:
        flags["pipeline-schedule"] = cell.schedule
    words = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(each) for each in (value if isinstance(value, list) else [value])]
    return words


def travels(cell: Cell) -> bool:
    """Whether the cell's engine waits for its messages: that of the pipelines whose activations travel."""
    return cell.runtime == "megatron" and cell.schedule != "fsdp" and not cell.schedule.startswith(("wei", "wzb"))


@collector_paused()
def predict(cell: Cell, hardware: Hardware | None = None) -> Predicted:
    """Simulate the cell's step. Raises UserError, in the words of the flags, for one that cannot be."""
    config = parse_args(arguments(cell), environ={"WORLD_SIZE": str(cell.gpus), "RANK": "0", "LOCAL_RANK": "0"})
    assumed = training_costs(config)
    if not isinstance(assumed, ModelCosts):
        raise UserError("--cost-profile says what another machine takes; leave it out.")
    hardware = hardware or hardware_of(cell)
    theirs = cell.runtime == "megatron"
    layout = replace(assumed.layout, kv_passes=KV_PASSES, kv_copies=KV_COPIES) if theirs else assumed.layout
    overhead = (OP_OVERHEAD if cell.gpus > cell.gpus_per_node else OP_OVERHEAD_IN_NODE) if travels(cell) else 0.0
    costs = replace(assumed, hardware=hardware, layout=layout, op_overhead=overhead)
    program = make_program(config, full_batch(config), costs)
    lowered = lower(program, costs)
    simulation = simulate(lowered, costs, "s", blocking=travels(cell))
    seconds = simulation.makespan + sum(costs.after_time(program))
    tokens = (config.training.global_batch_size or 1) * costs.seq_length
    memory = max(rank_memory(lowered, costs, rank).total for rank in range(program.num_ranks))
    return Predicted(tokens / seconds / cell.gpus, memory, hardware.memory - RESERVED_MEMORY)
