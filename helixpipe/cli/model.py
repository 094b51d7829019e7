"""Flags that name a model and hardware for `helixpipe simulate`, `draw` and `memory`, and what they come to."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from helixpipe.cli.hardware import HardwareFlags, as_flags_say
from helixpipe.cli.model_shape import ShapeFlags, described
from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges, option
from helixpipe.common.ranges import MOST_RANKS, MOST_TOKENS
from helixpipe.costs.attention_kernels import FA2
from helixpipe.costs.efficiency import hardware_as_measured
from helixpipe.costs.expert_loads import ExpertLoads, parse_loads
from helixpipe.costs.hardware import DEFAULT_HARDWARE, GIB, HARDWARE, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import IN_PARTS, MODELS, OFF, OPTIM_GRADS, P2P, Layout, ModelShape
from helixpipe.costs.verdict import tensor_limit
from helixpipe.planning.documents.lengths import DocumentLengths

MAX_GPUS = MOST_RANKS


def _share(of: str) -> Any:
    """Return the flag for a share of a peak."""
    return option(None, f"Share of {of} (default: the hardware's).", more_than=0, at_most=1)


@dataclass(frozen=True)
class ModelOptions(ShapeFlags, HardwareFlags):
    """Costs of a model on named hardware, in place of times given by hand. None: not given."""

    model: str | None = option(
        None,
        f"Take costs from a model: {', '.join(MODELS)}; or a Hugging Face folder, or its config.json.",
        metavar="NAME|FOLDER",
    )
    seq_length: int | None = option(
        None, "Tokens of a sequence (default: the model's).", at_least=1, at_most=MOST_TOKENS
    )
    micro_batch_size: int | None = option(None, "Sequences in a microbatch (default: 1).", at_least=1)
    global_batch_size: int | None = option(
        None,
        "Sequences a step over all pipelines; gives the number of microbatches (default: 2p microbatches each).",
        at_least=1,
    )
    hardware: str | None = option(
        None, f"GPUs: {', '.join(HARDWARE)} (default: {DEFAULT_HARDWARE}).", metavar="NAME"
    )  # fmt: skip
    nodes: int | None = option(
        None,
        "Nodes (default: as few as --ranks times --tensor-parallel times --context-parallel need).",
        at_least=1,
        at_most=MAX_GPUS,
    )
    tensor_parallel: int | None = option(
        None,
        "Tensor-parallel GPUs of each pipeline rank (default: 1). Data parallel is what the other GPUs give.",
        at_least=1,
        at_most=MAX_GPUS,
    )
    context_parallel: int | None = option(
        None,
        "GPUs of each pipeline rank that share the tokens of every chunk, times --tensor-parallel (default: 1).",
        at_least=1,
        at_most=MAX_GPUS,
    )
    cp_comm_type: Literal["p2p", "a2a"] | None = option(
        None, "What they exchange: p2p (keys and values round a ring) or a2a (rows for heads) (default: p2p)."
    )
    expert_parallel: int | None = option(
        None,
        "Of the GPUs of each pipeline rank, those that share out the experts of every layer (default: 1).",
        at_least=1,
        at_most=MAX_GPUS,
    )
    expert_tensor_parallel: int | None = option(
        None,
        "GPUs that each expert's weights are split over (default: as many as --tensor-parallel).",
        at_least=1,
        at_most=MAX_GPUS,
    )
    moe_load: str | None = option(
        None,
        "How unevenly experts are used: zipf:S, the k-th most used one by k^-S, or a file with the tokens of each, of "
        "`helixpipe profile` or what training prints with --moe-per-layer-logging (default: alike).",
        metavar="FILE|zipf:S",
    )
    sequence_parallel: bool = option(
        True, "Leave sequence parallelism out beside tensor parallelism.", flags=("--disable-sequence-parallel",)
    )
    overlap_tp_comm: Literal["off", "halves", "pairs", "auto"] = option(
        OFF,
        "Hide collectives of tensor-parallel and context-parallel ranks beyond what every op hides, and the exchange "
        "of tokens with experts: halves runs ops over two halves of their tokens, one of which computes while the "
        "other's ranks communicate; pairs runs forwards beside backwards of other units; auto does what is fastest.",
    )
    cuda_graphs: Literal["off", "auto"] = option(
        OFF,
        "auto: count the memory of pieces that training may run as CUDA graphs, all of them captured; times are as "
        "ever, without the host's.",
    )
    attention_kernel: Literal["unfused", "fa1", "fa2", "fa3", "cudnn"] = option(
        FA2,
        "Kernel of core attention: unfused, products and softmax one after another as in Megatron-LM without flash "
        "attention; FlashAttention of version 1, 2 or 3; cudnn's. It says what share of the peak is reached, and what "
        "is kept.",
    )
    chunk_size: int | None = option(
        None,
        "Tokens of a slice of the MLP, whose inner activations are recomputed in the backward (default: 0, whole).",
        at_least=0,
        at_most=MOST_TOKENS,
    )
    loss_chunk_size: int | None = option(
        None,
        "Tokens of a slice of head and loss, whose logits are made in the backward (default: 0, all at once).",
        at_least=0,
        at_most=MOST_TOKENS,
    )
    distributed_optimizer: bool = option(
        True,
        "Keep the whole optimizer state on every data-parallel rank.",
        flags=("--disable-distributed-optimizer",),
    )
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = option(
        None,
        "What data-parallel GPUs share out: nothing, optimizer state (the default), that and gradients, or that and "
        "weights, which are gathered around each op that needs them.",
    )
    optimizer_cpu_offload: bool = option(
        False, "Keep Adam's state, float32 weights among it, in host memory, and update there."
    )
    optimizer_offload_fraction: float | None = option(
        None,
        "Share of Adam's state, from 0 to 1, that --optimizer-cpu-offload moves (default: 1).",
        at_least=0,
        at_most=1,
    )
    matmul_efficiency: float | None = _share("peak FLOP/s in matrix products")
    attention_efficiency: float | None = _share("peak FLOP/s in attention")
    memory_efficiency: float | None = _share("memory bandwidth reached")
    network_efficiency: float | None = _share("NVLink's and the network's bandwidth reached")
    host_efficiency: float | None = _share("PCIe's bandwidth between device and host reached")
    efficiency_from: str | None = option(
        None,
        "Take the shares of matrix products, attention and memory that are not given from this file of `helixpipe "
        "profile`, measured on --hardware in bfloat16, of whatever model.",
        metavar="FILE.json",
    )

    @property
    def named(self) -> bool:
        """Whether the options name a model, or give the sizes of one."""
        return self.model is not None or self.hidden_size is not None


@dataclass(frozen=True)
class ModelOnCluster:
    """A model on a cluster: the size it gives the schedule, and its costs. memory_limit: bytes of
    tensors that a GPU may hold; None: as many as fit.
    efficiency_from: the profile that says which shares of the peaks are reached; None: they are assumed. documents: of
    a step, where they are of all lengths."""

    costs: ModelCosts
    ranks: int
    microbatches: int
    layers: int
    nodes: int
    memory_limit: float | None = None
    efficiency_from: str | None = None
    documents: DocumentLengths | None = None

    @property
    def limit(self) -> float:
        """Bytes of tensors that each GPU may hold."""
        return tensor_limit(self.costs.hardware.memory, self.memory_limit)

    @property
    def gpus(self) -> int:
        return self.nodes * self.costs.hardware.gpus_per_node

    @property
    def sequences(self) -> int:
        """The number of sequences of one step."""
        if self.documents is not None:
            return len(self.documents.lengths)
        return self.microbatches * self.costs.layout.micro_batch_size * self.costs.data_parallel

    @property
    def tokens(self) -> int:
        """The tokens of one step, without padding."""
        return self.documents.tokens if self.documents is not None else self.sequences * self.costs.seq_length


def make_plan(
    options: ModelOptions,
    ranks: int | None,
    microbatches: int | None,
    layers: int | None,
    one_rank: bool = False,
    memory_limit: float | None = None,
) -> ModelOnCluster | None:
    """Return the model on its cluster; None without --model.

    ranks, microbatches, layers: given by other flags or a file. one_rank: the schedule runs on one rank. memory_limit:
    GiB of tensors that a GPU may hold; None: as many as fit. Raises UserError for what does not fit together.
    """
    if not options.named:
        for field in dataclasses.fields(options):
            if getattr(options, field.name) != field.default:
                flag = field.metadata["flags"][0] if field.metadata["flags"] else "--" + field.name.replace("_", "-")
                raise UserError(
                    f"{flag} needs --model, or the sizes of one (--hidden-size …): one of {', '.join(MODELS)}."
                )
        return None
    check_ranges(options)
    model = described(options.model, options, layers=layers, seq_length=options.seq_length)
    shares = {
        "matmul": options.matmul_efficiency,
        "attention": options.attention_efficiency,
        "memory": options.memory_efficiency,
        "network": options.network_efficiency,
        "host": options.host_efficiency,
    }
    hardware = find_hardware(options.hardware or DEFAULT_HARDWARE, **shares)
    if options.efficiency_from is not None:
        given = [name for name, share in shares.items() if share is not None]
        hardware = hardware_as_measured(options.efficiency_from, hardware, given)
    hardware = as_flags_say(hardware, options)
    tp, cp = options.tensor_parallel or 1, options.context_parallel or 1
    if ranks is None and one_rank:
        ranks = 1
    nodes = options.nodes or max(1, math.ceil((ranks or 1) * tp * cp / hardware.gpus_per_node))
    gpus = nodes * hardware.gpus_per_node
    if gpus > MAX_GPUS:
        raise UserError(f"--nodes {nodes} of {hardware.gpus_per_node} GPUs are too many; at most {MAX_GPUS} GPUs.")
    if ranks is None:
        ranks = max(1, gpus // (tp * cp))
    if ranks < 1 or gpus % (ranks * tp * cp):
        context = f" times --context-parallel {cp}" if cp > 1 else ""
        raise UserError(
            f"--ranks {ranks} times --tensor-parallel {tp}{context} must divide the {gpus} GPUs of "
            f"--nodes {nodes} x {hardware.gpus_per_node}."
        )
    data_parallel = gpus // (ranks * tp * cp)
    micro, loads = options.micro_batch_size or 1, expert_loads(model, options)
    _check_experts(model, options, data_parallel * cp * tp)
    costs = ModelCosts(
        model,
        hardware,
        replace(_layout(options), expert_load=loads.busiest(model.experts, model.topk, options.expert_parallel or 1)),
        model.seq_length,
        data_parallel,
        options.distributed_optimizer and options.data_parallel_sharding_strategy != "no_shard",
        adam_on_host=_adam_on_host(options),
        shards_weights=options.data_parallel_sharding_strategy in IN_PARTS,
        gathered_once=options.data_parallel_sharding_strategy == OPTIM_GRADS,
    )
    count = _microbatches(options.global_batch_size, microbatches, micro, data_parallel, ranks)
    limit = None if memory_limit is None else memory_limit * GIB
    return ModelOnCluster(costs, ranks, count, model.layers, nodes, limit, options.efficiency_from)


def expert_loads(model: ModelShape, options: ModelOptions) -> ExpertLoads:
    """Return how a model's experts are used. Raises UserError for a file of another model, or a model without any."""
    if options.moe_load is None:
        return ExpertLoads()
    loads = parse_loads(options.moe_load)
    loads.check(model, options.moe_load)
    return loads


def _check_experts(model: ModelShape, options: ModelOptions, gpus: int) -> None:
    """Check that a pipeline rank's GPUs can share out the model's experts."""
    tp, ep = options.tensor_parallel or 1, options.expert_parallel or 1
    parts = check_expert_parts(model, options)
    if ep > 1 and parts == tp and (model.experts % ep or gpus // tp % ep):
        raise UserError(
            f"--expert-parallel {ep} must divide the {model.experts} experts of a layer and the {gpus // tp} "
            "data-parallel and context-parallel GPUs of each pipeline rank."
        )
    if parts != tp and (ep == 1 or model.experts % ep or gpus % (ep * parts)):
        raise UserError(
            f"--expert-parallel {ep} with --expert-tensor-parallel {parts} must be above 1 and divide the "
            f"{model.experts} experts of a layer, and both together the {gpus} GPUs of each pipeline rank."
        )


def check_expert_parts(model: ModelShape, options: ModelOptions) -> int:
    """Return over how many GPUs each expert is split. Raises UserError if it cannot be."""
    parts = options.expert_tensor_parallel
    if (options.expert_parallel or 1) > 1 and not model.experts:
        raise UserError(f"--expert-parallel {options.expert_parallel} is of experts, and {model.name} has none.")
    if parts is not None and (not model.experts or model.expert_ffn % parts):
        raise UserError(
            f"--expert-tensor-parallel {parts} must divide the width {model.expert_ffn} of {model.name}'s experts."
        )
    return parts or options.tensor_parallel or 1


def _layout(options: ModelOptions) -> Layout:
    """Return how the model is cut. Raises UserError for a way to hide collectives that cannot be had."""
    tp = options.tensor_parallel or 1
    return Layout(
        tp,
        options.sequence_parallel and tp > 1,
        options.micro_batch_size or 1,
        mlp_chunk=options.chunk_size or 0,
        loss_chunk=options.loss_chunk_size or 0,
        context_parallel=options.context_parallel or 1,
        cp_comm_type=options.cp_comm_type or P2P,
        overlap_tp_comm=options.overlap_tp_comm,
        cuda_graphs=options.cuda_graphs,
        attention_kernel=options.attention_kernel,
        expert_parallel=options.expert_parallel or 1,
        expert_tensor=options.expert_tensor_parallel or 0,
    )


def _adam_on_host(options: ModelOptions) -> float:
    """Share of Adam's state that is on the host."""
    fraction = options.optimizer_offload_fraction
    if not options.optimizer_cpu_offload:
        if fraction is not None:
            raise UserError(f"--optimizer-offload-fraction {fraction:g} needs --optimizer-cpu-offload.")
        return 0.0
    if not options.distributed_optimizer:
        raise UserError("--optimizer-cpu-offload cannot be combined with --disable-distributed-optimizer; give one.")
    if options.data_parallel_sharding_strategy in IN_PARTS:
        raise UserError(
            "--optimizer-cpu-offload cannot be combined with --data-parallel-sharding-strategy "
            f"{options.data_parallel_sharding_strategy}; use optim."
        )
    return 1.0 if fraction is None else fraction


def _microbatches(
    global_batch_size: int | None, microbatches: int | None, micro: int, data_parallel: int, ranks: int
) -> int:
    if global_batch_size is None:
        return 2 * ranks if microbatches is None else microbatches
    unit = micro * data_parallel
    if global_batch_size % unit:
        below = global_batch_size - global_batch_size % unit
        valid = f"values are {below} and {below + unit}" if below else f"value is {unit}"
        raise UserError(
            f"--global-batch-size {global_batch_size} must be a multiple of micro-batch size {micro} times data "
            f"parallel {data_parallel}; the nearest valid {valid}."
        )
    count = global_batch_size // unit
    if microbatches not in (None, count):
        raise UserError(
            f"--microbatches {microbatches} does not fit --global-batch-size {global_batch_size}, which gives each "
            f"pipeline {count}."
        )
    return count
