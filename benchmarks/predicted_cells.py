"""Published cells, predicted: the training program's flags, the cell's hardware and the cell's runtime, on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.data import read
from benchmarks.published_cells import Cell
from benchmarks.report import FOLDER
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB, RESERVED_MEMORY, Hardware, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Program
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import Simulation, simulate
from megatron.pretrain.arguments import parse_config
from megatron.pretrain.plan.costs import training_costs
from megatron.pretrain.plan.programs import full_batch, make_program

OP_OVERHEAD = 11e-3
"""Seconds of an op of Megatron-LM's engine between nodes: the host waits for the device after each exchange, and so
launches the kernels of the next op, with those of tensor parallelism, while the device is idle."""

OP_OVERHEAD_IN_NODE = 0.5e-3
"""The same where no message leaves its node."""

KV_PASSES = 10
"""How often the engine of Seq1F1B goes over the keys and values of earlier chunks in a chunk's backward."""

KV_COPIES = 2
"""It joins the keys and values so far for every chunk, and keeps both."""

ETHERNET, TCP = 25, 0.94
"""Networks up to so many Gb/s a node are taken to be Ethernet, of which TCP reaches 1448 of 1538 bytes a frame; with
messages in both directions, as of pipelines whose activations travel, the share of it that links to hosts have."""

LEAST_SPEED, MOST_SPEED, ROUNDS = 0.1, 2.0, 8
"""Speeds that are tried for a cell, and how often."""

_BY_MEMORY = ("infinipipe",)
"""Schedules that recompute what the GPU has no room for."""

_FLAGS = read(FOLDER / "assumed_flags.toml")
"""What tables leave out."""


@dataclass(frozen=True)
class Predicted:
    """Before any calibration. memory: bytes allocated on the fullest GPU; fits: whether that, and what is reserved for
    the driver and communicators, is within the GPU's memory."""

    tokens_per_gpu: float
    memory: float
    limit: float

    @property
    def gib(self) -> float:
        return self.memory / GIB

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit


def hardware_of(cell: Cell) -> Hardware:
    """The cell's node."""
    hardware = replace(find_hardware(cell.hardware), gpus_per_node=cell.gpus_per_node)
    if cell.network_gbits_per_node is not None:
        network, adapter = cell.network_gbits_per_node * 1e9 / 8, hardware.network / hardware.adapters
        adapters = max(1, min(hardware.adapters, round(network / adapter)))
        if cell.network_gbits_per_node <= ETHERNET:
            network *= TCP / hardware.efficiency.network * (hardware.duplex if travels(cell) else 1.0)
        hardware = replace(hardware, network=network, adapters=adapters)
    return replace(hardware, nvlink=hardware.host_link) if cell.pcie else hardware


def arguments(cell: Cell) -> list[str]:
    """The training program's command line."""
    given = {name: value for name, value in cell.flags.items() if value is not None}
    flags, schedule = {**_FLAGS["always"], **_told(cell), **given}, _FLAGS["names"].get(cell.schedule, cell.schedule)
    flags.setdefault("max-position-embeddings", flags.get("seq-length", 1))
    if schedule == "fsdp":
        flags |= {"data-parallel-sharding-strategy": "optim_grads_params", "use-distributed-optimizer": True}
    else:
        flags["pipeline-schedule"] = schedule
    words = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(each) for each in (value if isinstance(value, list) else [value])]
    return words


def _told(cell: Cell) -> Mapping[str, Any]:
    """Return what the cell's paper leaves out and its scripts say, where the cell's flags do not."""
    told = dict(_FLAGS["schedule"].get(cell.schedule, {}))
    if str(cell.flags.get("tensor-model-parallel-size") or 1) != "1":
        told |= _FLAGS["tensor-parallel"]
    if cell.schedule in _BY_MEMORY or "offload-activations" in cell.flags:
        told["hardware"] = cell.hardware
    if is_plain(cell):
        told |= _FLAGS["model"]["weipipe"]
        if not cell.schedule.startswith("zb"):
            told["recompute-granularity"] = "full"
    elif any("seq1f1b" in name.lower() for name in (cell.table, cell.id)):
        told |= _FLAGS["model"]["seq1f1b"]
    return told


def travels(cell: Cell) -> bool:
    """Whether the cell's engine waits for its messages: that of the pipelines whose activations travel."""
    return cell.runtime == "megatron" and cell.schedule != "fsdp" and not cell.schedule.startswith(("wei", "wzb"))


def is_plain(cell: Cell) -> bool:
    """Whether the cell's model is one of plain PyTorch: WeiPipe's is."""
    return any("weipipe" in name.lower() for name in (cell.table, cell.id))


def slower(hardware: Hardware, factor: float) -> Hardware:
    """With so much of the GPU's arithmetic and of its memory's bandwidth."""
    return replace(hardware, flops=hardware.flops * factor, memory_bandwidth=hardware.memory_bandwidth * factor)


def _in_turn(simulation: Simulation) -> float:
    """Seconds of a rank that gathers weights, computes and scatters gradients (of 16 bits) one after the other."""
    sharing = sum(
        (event.end - event.start) * (0.5 if event.kind == "scatter" else 1.0)
        for event in simulation.timeline.sharing
        if event.source == 0
    )
    return simulation.busy[0] + sharing


def _turn_by_turn(program: Program, costs: ModelCosts) -> float:
    """Seconds of a ring whose turns begin together, and whose weights for the next turn travel during this one: the
    longer of the turns with nothing to wait for and of the messages that a ring which passes on at once has."""
    hardware = replace(costs.hardware, network=math.inf, nvlink=math.inf, latency=0.0)
    instant = replace(costs, hardware=hardware)
    at_once = replace(program, ring=replace(program.ring, eager=True))
    return max(simulate(lower(each, by), by).makespan for each, by in ((program, instant), (at_once, costs)))


@dataclass(frozen=True)
class Prepared:
    """A cell's program and costs, with hardware as fast as the cost model takes it to be."""

    cell: Cell
    program: Program
    costs: ModelCosts
    tokens: int

    @collector_paused()
    def at(self, speed: float) -> Predicted:
        """The step with GPUs of that speed: the program stays, as made for the others."""
        costs = replace(self.costs, hardware=slower(self.costs.hardware, speed))
        lowered = lower(self.program, costs)
        if not self.program.ring.eager:
            seconds = _turn_by_turn(self.program, costs)
        else:
            simulation = simulate(lowered, costs, "s", blocking=travels(self.cell))
            in_turn = self.cell.schedule == "fsdp" and self.cell.runtime == "megatron"
            seconds = _in_turn(simulation) if in_turn else simulation.makespan
        seconds += sum(costs.after_time(self.program))
        memory = max(rank_memory(lowered, costs, rank).total for rank in range(self.program.num_ranks))
        return Predicted(self.tokens / seconds / self.cell.gpus, memory, costs.hardware.memory - RESERVED_MEMORY)

    def fitting_speed(self) -> float:
        """With which the step takes as long as was published."""
        published = self.cell.published.tokens_per_second_per_gpu
        assert published is not None
        speed = 1.0
        for _ in range(ROUNDS):
            error = self.at(speed).tokens_per_gpu / published
            speed = min(max(speed / error, LEAST_SPEED), MOST_SPEED)
            if abs(error - 1) < 0.002:
                break
        return speed


@collector_paused()
def prepare(cell: Cell) -> Prepared:
    """Plan the cell's step. Raises UserError, in the words of the flags, for one that cannot be."""
    kept = _planned(cell)
    if cell.schedule != "sppo" or "offload-activations" in cell.flags or (there := kept.at(1.0)).fits:
        return kept
    left = _planned(replace(cell, flags={**cell.flags, **_FLAGS["all-leaves"]}))
    return left if left.at(1.0).memory < there.memory else kept


def _planned(cell: Cell) -> Prepared:
    config = parse_config(arguments(cell), environ={"WORLD_SIZE": str(cell.gpus), "RANK": "0", "LOCAL_RANK": "0"})
    assumed = training_costs(config)
    if not isinstance(assumed, ModelCosts):
        raise UserError("--cost-profile says what another machine takes; leave it out.")
    layout = assumed.layout
    if is_plain(cell):
        layout = replace(layout, eager=True)
    elif cell.runtime == "megatron":
        layout = replace(layout, kv_passes=KV_PASSES, kv_copies=KV_COPIES, own_values=True)
    overhead = (OP_OVERHEAD if cell.gpus > cell.gpus_per_node else OP_OVERHEAD_IN_NODE) if travels(cell) else 0.0
    costs = replace(assumed, hardware=hardware_of(cell), layout=layout, op_overhead=overhead)
    program = make_program(config, full_batch(config), costs)
    return Prepared(cell, program, costs, (config.training.global_batch_size or 1) * costs.seq_length)


def predict(cell: Cell, speed: float = 1.0) -> Predicted:
    """Simulate the cell's step. speed: of what its GPUs are taken to reach. Raises UserError as `prepare`."""
    return prepare(cell).at(speed)
