"""Published cells, predicted: the training program's flags, the cell's hardware and the cell's runtime, on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.data import read
from benchmarks.published_cells import Cell
from benchmarks.report import FOLDER, progress
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import UserError
from helixpipe.costs.attention_kernels import FA2, UNFUSED
from helixpipe.costs.hardware import GIB, Hardware, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import AUTOGRAD, FUSED, IN_PLACE
from helixpipe.costs.verdict import MemoryVerdict
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation, simulate
from helixpipe.simulate.verdict import memory_verdict
from megatron.pretrain.arguments import parse_config
from megatron.pretrain.plan.costs import training_costs
from megatron.pretrain.plan.programs import full_batch, make_program

OP_OVERHEAD = 0.5e-3
"""Seconds of an op of Megatron-LM's engine: the host waits for the device after each exchange, and launches the next
op's first kernels while the device is idle."""

SEQ1F1B_OVERHEAD, SEQ1F1B_OVERHEAD_IN_NODE = 11e-3, 1.5e-3
"""The same of Seq1F1B's engine, with messages between nodes and without: it joins keys and values for every chunk and
waits more often. Its paper's cells show it, and no other paper's do."""

UNFUSED_UP_TO = 4096
"""Tokens of a sequence up to which Megatron-LM without --use-flash-attn computes attention unfused; longer ones were
never run that way, as the scores of one layer alone would fill a GPU."""

KV_PASSES = 10
"""How often the engine of Seq1F1B goes over the keys and values of earlier chunks in a chunk's backward."""

KV_COPIES = 2
"""It joins the keys and values so far for every chunk, and keeps both."""

ETHERNET, TCP = 25, 0.94
"""Networks up to so many Gb/s a node are taken to be Ethernet, of which TCP reaches 1448 of 1538 bytes a frame; with
messages in both directions, as of pipelines whose activations travel, the share of it that links to hosts have."""

LEAST_SPEED, MOST_SPEED, ROUNDS = 0.1, 2.0, 8
"""Speeds that are tried for a cell, and how often."""

MOST_OVERHEAD, FIT_ROUNDS = 0.05, 16
"""Seconds an op that are tried at most where a cell asks for them, and how often they are halved."""

_ZERO_BUBBLE = ("zb", "v-half", "v-min")
"""How names of zero bubble's schedules begin."""

_NOT_OURS = ("use-flash-attn", "attention-backend")
"""Flags of a cell that tell its kernel of attention; the training program has its own."""

_BY_MEMORY = ("infinipipe",)
"""Schedules that recompute what the GPU has no room for."""

_FLAGS = read(FOLDER / "assumed_flags.toml")
"""What tables leave out."""


@dataclass(frozen=True)
class Predicted:
    """A prediction of a cell: its throughput, and the memory of the fullest GPU."""

    tokens_per_gpu: float
    verdict: MemoryVerdict

    @property
    def memory(self) -> float:
        return self.verdict.allocated

    @property
    def gib(self) -> float:
        return self.memory / GIB

    @property
    def reserved_gib(self) -> float:
        return self.verdict.reserved / GIB

    @property
    def fits(self) -> bool:
        return self.verdict.fits


def hardware_of(cell: Cell) -> Hardware:
    """The cell's node."""
    hardware = replace(find_hardware(cell.hardware), gpus_per_node=cell.gpus_per_node)
    if cell.network_gbits_per_node is not None:
        network, adapter = cell.network_gbits_per_node * 1e9 / 8, hardware.network / hardware.adapters
        adapters = max(1, min(hardware.adapters, round(network / adapter)))
        if cell.network_gbits_per_node <= ETHERNET:
            network *= TCP / hardware.efficiency.network * (hardware.duplex if travels(cell) else 1.0)
        hardware = replace(hardware, network=network, adapters=adapters)
    if cell.pcie:  # GPUs behind one switch share its link to the host's bridge, over which all reach each other
        sharing = min(hardware.gpus_per_uplink, cell.gpus_per_node)
        hardware = replace(hardware, nvlink=hardware.host_link / sharing)
    return replace(hardware, interference=0.0) if _takes_turns(cell) else hardware


def arguments(cell: Cell) -> list[str]:
    """The training program's command line."""
    given = {name: value for name, value in cell.flags.items() if value is not None and name not in _NOT_OURS}
    if cell.runtime == "megatron" and "recompute-granularity" in {**_told(cell), **given}:
        given.setdefault("no-recompute-early", True)  # its engine recomputes inside the backward
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
    others = ("wei", "wzb", *_ZERO_BUBBLE)
    return cell.runtime == "megatron" and cell.schedule != "fsdp" and not cell.schedule.startswith(others)


def without_flush(cell: Cell) -> bool:
    """Whether a rank's next step may start where this one ends on it: engines of zero bubble check the norm of all
    gradients afterwards."""
    return cell.runtime == "megatron" and cell.schedule.startswith(_ZERO_BUBBLE)


def kernel_of(cell: Cell) -> str:
    """The cell's kernel of core attention: its own; else, by its paper and engine, what that had."""
    if cell.attention_kernel is not None:
        return cell.attention_kernel
    for name, kernel in _FLAGS["attention-kernel"].items():
        if name in f"{cell.table} {cell.id}".lower():
            return str(kernel)
    generation = find_hardware(cell.hardware).generation
    short = int(cell.flags.get("seq-length") or 1) <= UNFUSED_UP_TO
    flash = cell.flags.get("use-flash-attn") or cell.flags.get("attention-backend") not in (None, "unfused")
    old = cell.runtime == "megatron" and cell.schedule != "fsdp" and generation == "ampere"
    return UNFUSED if old and short and not flash else FA2


def overhead_of(cell: Cell) -> float:
    """Seconds of an op beside its kernels: the cell's own, or its runtime's; 0 where it is to be found."""
    if cell.op_overhead is not None:
        return 0.0 if isinstance(cell.op_overhead, str) else cell.op_overhead
    if not travels(cell) and not without_flush(cell):
        return 0.0
    if "seq1f1b" not in f"{cell.table} {cell.id}".lower():
        return OP_OVERHEAD
    return SEQ1F1B_OVERHEAD if cell.gpus > cell.gpus_per_node else SEQ1F1B_OVERHEAD_IN_NODE


def is_plain(cell: Cell) -> bool:
    """Whether the cell's model is one of plain PyTorch: WeiPipe's is."""
    return any("weipipe" in name.lower() for name in (cell.table, cell.id))


def is_torch_fsdp(cell: Cell) -> bool:
    """Whether torch's FSDP shards the cell's weights, in float32, and torch's checkpoints recompute its layers."""
    return cell.schedule == "fsdp" and cell.runtime == "ours"


def _takes_turns(cell: Cell) -> bool:
    """Whether its ranks gather weights, compute and scatter gradients one after the other, nothing beside anything."""
    return cell.schedule == "fsdp" and cell.runtime == "megatron"


def _loss_of(cell: Cell) -> str:
    """How the cell's engine computes the loss of its logits, of `models.IN_PLACE`, `AUTOGRAD` and `FUSED`."""
    if any(name in f"{cell.table} {cell.id}".lower() for name in _FLAGS["fused-loss"]["of"]):
        return FUSED
    return AUTOGRAD if is_plain(cell) or is_torch_fsdp(cell) else IN_PLACE


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
    at_once = replace(program, turns=())
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
        simulation = simulate(lowered, costs, "s", blocking=travels(self.cell))
        seconds = simulation.makespan
        if self.program.turns:
            seconds = _turn_by_turn(self.program, costs)
        elif _takes_turns(self.cell):
            seconds = _in_turn(simulation)
        elif without_flush(self.cell):
            seconds = simulation.ideal + simulation.shifted_bubble_time
        seconds += sum(costs.after_time(self.program))
        return Predicted(self.tokens / seconds / self.cell.gpus, memory_verdict(simulation, costs.hardware.memory))

    def fitting_overhead(self) -> float:
        """Seconds an op with which the step takes as long as was published; 0 where it takes longer without any."""
        published = self.cell.published.tokens_per_second_per_gpu
        assert published is not None
        low, high = 0.0, MOST_OVERHEAD
        for _ in range(FIT_ROUNDS):
            middle = (low + high) / 2
            costs = replace(self.costs, op_overhead=middle)
            slow = replace(self, costs=costs).at(1.0).tokens_per_gpu < published
            low, high = (low, middle) if slow else (middle, high)
        return low

    def fitting_speed(self) -> float:
        """With which the step takes as long as was published."""
        published = self.cell.published.tokens_per_second_per_gpu
        assert published is not None
        speed = 1.0
        for _ in range(ROUNDS):
            error = self.at(speed).tokens_per_gpu / published
            speed = min(max(speed / error, LEAST_SPEED), MOST_SPEED)
            if abs(error - 1) < 0.002:
                return speed
        if speed in (LEAST_SPEED, MOST_SPEED):
            progress(f"{self.cell.id}: no speed from {LEAST_SPEED:g} to {MOST_SPEED:g} gives what was published.")
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
    layout = replace(assumed.layout, views_of_qkv=cell.runtime != "megatron" or is_plain(cell))
    if is_plain(cell):
        layout = replace(layout, eager=True)
    elif cell.runtime == "megatron":
        layout = replace(layout, kv_passes=KV_PASSES, kv_copies=KV_COPIES, scatters_messages=True)
    own_fsdp = is_torch_fsdp(cell)
    layout = replace(layout, attention_kernel=kernel_of(cell), loss=_loss_of(cell))
    layout = replace(layout, batch_first=own_fsdp, stops_recomputing=own_fsdp)
    costs = replace(assumed, hardware=hardware_of(cell), layout=layout, op_overhead=overhead_of(cell))
    costs = replace(costs, float32_weights=own_fsdp)
    program = make_program(config, full_batch(config), costs)
    return Prepared(cell, program, costs, (config.training.global_batch_size or 1) * costs.seq_length)


def predict(cell: Cell, speed: float = 1.0) -> Predicted:
    """Simulate the cell's step. speed: of what its GPUs are taken to reach. Raises UserError as `prepare`."""
    return prepare(cell).at(speed)
