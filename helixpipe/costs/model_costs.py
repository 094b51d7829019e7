"""Costs of a model on named hardware: seconds of an op and of a message, from FLOPs and bytes.

An op takes the sum of its kernels' times; a kernel takes the longer of its arithmetic and its memory traffic, each at
the share of the peak that `Efficiency` assumes. Collectives over tensor-parallel and context-parallel ranks go over
NVLink, over the network too where a node has fewer GPUs. What runs beside other kernels of its op (`Kernel.behind`: a
ring beside the attention of its rounds, in the backward the collectives of a column-parallel layer beside its products)
costs what it takes longer than they do, and no less than what it slows them down (`Hardware.interference`); all else
has the op to itself. Launching kernels costs nothing but `op_overhead`. A message takes a latency and its bytes over
NVLink within a node, or over this GPU's share of the node's network; a copy to the host takes one and its bytes over
this GPU's share of the host link.

Ranks lie on nodes as Megatron places them: tensor-parallel ranks side by side, then context-parallel, then
data-parallel, then pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.common.errors import UserError
from helixpipe.costs.attention_kernels import UNFUSED
from helixpipe.costs.conflicts import refusal
from helixpipe.costs.context_parallel import nearest_sizes
from helixpipe.costs.counted_bytes import CountsBytes
from helixpipe.costs.halves import HalvedTimes, consecutive
from helixpipe.costs.hardware import HOST_MEMORY_SHARE, Hardware
from helixpipe.costs.kernel_times import KernelTimes
from helixpipe.costs.models import AUTO, HALVES, OFF, PAIRS, Chunk, Layout, ModelShape, shared_unit
from helixpipe.costs.pairs import PairTimes
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_counts import PieceCounts
from helixpipe.costs.piece_kinds import model_flops
from helixpipe.costs.sizes import GRADIENT_BYTES, Kernel
from helixpipe.costs.steps import SteppedPieces
from helixpipe.program.costs import Contents, Load, Work
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece
from helixpipe.program.transfer import TRANSFER_KINDS
from helixpipe.program.workload import Extent

MASTER_AND_MOMENTS = 12
"""Bytes of Adam's state a weight: float32 copy, first and second moment."""

MOMENTS = 8
"""The same where the weights themselves are in float32."""


class OptimizerBytes(NamedTuple):
    """Of Adam on one GPU and on its host, which beside its part of the state has the float32 gradients for it."""

    device: float
    host: float


def _of_layers(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    return tuple(piece for piece in pieces if piece.layer >= 0)


@dataclass(frozen=True)
class ModelCosts(CountsBytes):
    """`Costs` in seconds of one pipeline of a model on hardware; also its bytes.

    seq_length: tokens of a microbatch's sequences, which the program's chunks share. data_parallel: pipelines side
    by side. distributed_optimizer: Adam's state is divided over them. fp32_kv_gradients: gradients of keys and values
    are summed over chunks in float32. adam_on_host: share of Adam's state that is in host memory. shards_weights:
    weights and gradients are divided over the pipelines, too, and so is Adam's state. gathered_once: the weights in
    parts are gathered once a step (`Program.gathered_once`). float32_weights: the parts are in float32, as torch's FSDP
    has them, and cast to be gathered; Adam needs no copy of them. op_overhead: seconds that every op takes beside its
    kernels, whatever its size; one that recomputes takes them once. fused_adam: whether Adam updates weights in place,
    as Transformer Engine's and apex's do; None: where the layout's kernels are fused.
    """

    model: ModelShape
    hardware: Hardware
    layout: Layout
    seq_length: int
    data_parallel: int = 1
    distributed_optimizer: bool = True
    fp32_kv_gradients: bool = False
    adam_on_host: float = 0.0
    shards_weights: bool = False
    gathered_once: bool = False
    float32_weights: bool = False
    op_overhead: float = 0.0
    fused_adam: bool | None = None

    def __post_init__(self) -> None:
        tp, cp, layout = self.layout.tensor_parallel, self.layout.context_parallel, self.layout
        for what, size in (("heads", self.model.heads), ("query groups", self.model.groups)):
            if size % tp:
                raise UserError(f"--tensor-parallel {tp} must divide the {size} {what} of {self.model.name}.")
        if refused := refusal(self.model, layout, self.shards_weights):
            raise UserError(refused)
        heads = self.model.heads // tp
        if layout.swaps and heads % cp:
            raise UserError(
                f"--context-parallel {cp} with --cp-comm-type a2a must divide the {heads} heads that {self.model.name} "
                f"has on a tensor-parallel rank; nearest valid sizes are {nearest_sizes(heads, cp)}, or use p2p."
            )
        if layout.attention_kernel != UNFUSED:
            self.hardware.attention(self.model.channels, layout.attention_kernel)
        elif cp > 1:
            raise UserError(f"--attention-kernel {UNFUSED} cannot be had with --context-parallel {cp}.")
        unit = shared_unit(tp if layout.sequence_parallel else 1, cp, layout.parts)
        if self.seq_length % unit:
            by = f"--tensor-parallel {tp}" if cp == 1 else f"{unit} with --context-parallel {cp}"
            raise UserError(f"--seq-length {self.seq_length} must be a multiple of {by}.")

    @cached_property
    def bytes(self) -> PieceBytes:
        return PieceBytes(self.model, self.layout)

    def _sequence(self) -> tuple[int, bool]:
        return self.seq_length, self.fp32_kv_gradients

    def with_overlap_chosen(self, chunks: int = 1) -> ModelCosts:
        """Return these costs with an `auto` of the layout's `overlap_tp_comm` settled between `off` and `halves`: by
        which layers take less time, forward and backward, with sequences in so many chunks. The same for all ops of a
        run, whatever their chunks' lengths.
        """
        if self.layout.overlap_tp_comm != AUTO:
            return self
        if self.model.kv_rank or self.model.further:  # which do not run in halves
            return replace(self, layout=replace(self.layout, overlap_tp_comm=OFF))
        length = self.seq_length / chunks
        extents = (Extent(length, (self.seq_length - length) / 2, chunks > 1),)
        layers = tuple(piece for piece in self.model.pieces if piece.layer >= 0)

        def seconds(costs: ModelCosts) -> float:
            return sum(costs.op_time(Work(kind, layers, extents, float(self.seq_length))) for kind in "FB")

        ways = [replace(self, layout=replace(self.layout, overlap_tp_comm=way)) for way in (OFF, HALVES)]
        return min(ways, key=seconds)

    @property
    def in_pairs(self) -> ModelCosts:
        """These costs where forwards run beside backwards; what that gains depends on the schedule."""
        return replace(self, layout=replace(self.layout, overlap_tp_comm=PAIRS))

    def ways_to_hide(self, chunks: int = 1) -> tuple[ModelCosts, ...]:
        """These costs with each way to hide collectives that `auto` chooses from by the time of a whole step."""
        chosen = replace(self, layout=replace(self.layout, overlap_tp_comm=AUTO)).with_overlap_chosen(chunks)
        return chosen, self.in_pairs

    # ------------------------------------------------------------------------------------------- what `Costs` asks for

    def op_time(self, work: Work) -> float:
        kind, pieces, *others = work
        key = kind, self._counts.of(pieces), *others
        time = self._op_times.get(key)
        if time is None:
            time = self._op_times[key] = self._op_time(work)
        return time

    @cached_property
    def _counts(self) -> PieceCounts:
        return PieceCounts()

    @cached_property
    def _op_times(self) -> dict[tuple[object, ...], float]:
        return BoundedDict()  # schedules that search ask again and again

    def _op_time(self, work: Work) -> float:
        if work.beside is not None and self.layout.pairs:
            return self._time_beside(work, work.beside)
        chunk, pieces, halved = self.chunk(work.extents, work.whole), work.pieces, 0.0
        if self.layout.halves:
            pieces = tuple(piece for piece in pieces if piece.layer < 0)
            runs = consecutive([piece for piece in work.pieces if piece.layer >= 0], frozenset(work.starts))
            halved = sum(self._halved_times(chunk).time(run, work.kind) for run in runs)
        counts = self._counts.of(pieces).kinds
        kernels = sum([n * self.piece_time(kind, work.kind, chunk, work.alone, shares) for kind, shares, n in counts])
        return kernels + halved + (0.0 if work.kind == "R" else self.op_overhead)

    def _time_beside(self, own: Work, other: Work) -> float:
        """The share of an op in the time of its pair, as its time alone has in that of both."""
        own, other = own._replace(beside=None), other._replace(beside=None)
        forward, backward = (own, other) if own.kind == "F" else (other, own)
        whole = self.op_time(own) + self.op_time(other)
        gained = self._layers_alone(forward) + self._layers_alone(backward) - self._pair_time(forward, backward)
        return self.op_time(own) * (1 - gained / whole)

    def _layers_alone(self, work: Work) -> float:
        return self.op_time(work._replace(pieces=_of_layers(work.pieces))) - self.op_overhead

    def _pair_time(self, forward: Work, backward: Work) -> float:
        chunks = self.chunk(forward.extents, forward.whole), self.chunk(backward.extents, backward.whole)
        if chunks not in self._known_pairs:
            of_forward, of_backward = map(self._stepped_pieces, chunks)
            self._known_pairs[chunks] = PairTimes(of_forward, of_backward, self.hardware.interference)
        first, second = (tuple(piece.kind for piece in _of_layers(work.pieces)) for work in (forward, backward))
        return self._known_pairs[chunks].time(first, second, backward.kind)

    def _stepped_pieces(self, chunk: Chunk) -> SteppedPieces:
        if chunk not in self._known_steps:
            self._known_steps[chunk] = SteppedPieces(self.model, self.layout, chunk, self._kernel_time)
        return self._known_steps[chunk]

    @cached_property
    def _known_pairs(self) -> dict[tuple[Chunk, Chunk], PairTimes]:
        return BoundedDict(FEW)

    @cached_property
    def _known_steps(self) -> dict[Chunk, SteppedPieces]:
        return BoundedDict(FEW)

    def transfer_time(self, load: Load) -> float:
        """Of a collective as a ring over its GPUs, data-parallel and context-parallel ones or those of the pipeline,
        alone on their links; of a copy the same both ways."""
        row, latency, nbytes = TRANSFER_KINDS[load.kind], self.hardware.latency, self.size(load.contents)
        resource = row.resource
        if resource == "link":
            source, target = load.ranks
            link = self._bandwidth_between(source, target)
            return latency + nbytes / self.hardware.message_bandwidth(link, load.ends)
        if resource == "collective":
            passed = nbytes * (1 if row.entire else (load.members - 1) / load.members)
            if row.group and self.layout.expert_parallel > 1:
                passed -= nbytes * self._experts_share(load.contents) * (1 / self.expert_holders - 1 / load.members)
            bandwidth = self._data_parallel_bandwidth if row.group else self._pipeline_bandwidth(load.members)
            return latency * (load.members - 1) + passed / bandwidth
        return latency + nbytes / self.hardware.host_bandwidth(both=True)

    def _experts_share(self, contents: Contents) -> float:
        """Of the weights of these contents, those of experts that other ranks do not have."""
        pieces = [piece for segment in contents.segments for piece in segment.pieces]
        return self.bytes.expert_parameters(pieces) / max(self.bytes.parameters(pieces), 1)

    def handling_time(self, load: Load, sends: bool) -> float:
        """Networks and copy engines need no time of a GPU's compute; a collective beside ops slows them down by a share
        of its own time, as those inside ops do."""
        share = self.hardware.interference if TRANSFER_KINDS[load.kind].resource == "collective" else 0.0
        return share * self.transfer_time(load) if share else 0.0

    @property
    def sharded(self) -> int:
        """GPUs that have parts of each weight."""
        return self.weight_holders if self.shards_weights else 1

    @property
    def weight_bytes(self) -> int:
        """Of one weight as its rank keeps it."""
        return 4 if self.float32_weights else self.layout.element_bytes

    @property
    def host_memory(self) -> float:
        """Bytes of its node's host memory that are one GPU's."""
        return self.hardware.host_memory / self.hardware.gpus_per_node

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        """Bytes of weights, gradients and optimizer state of a rank that holds these pieces, on its device."""
        weights = self.kept_parameters(pieces)
        return weights * (self.weight_bytes + GRADIENT_BYTES) + self.optimizer_bytes(pieces).device

    def kept_parameters(self, pieces: Sequence[Piece]) -> float:
        """Weights that one GPU of a rank that holds these pieces keeps: all of them, or its parts."""
        return self._share(pieces) if self.shards_weights else self.bytes.parameters(pieces)

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return self.optimizer_bytes(pieces).host

    def optimizer_bytes(self, pieces: Sequence[Piece]) -> OptimizerBytes:
        """Of a rank that holds these pieces."""
        weights = self._updated(pieces)
        moved, state = weights * self.adam_on_host, MOMENTS if self.float32_weights else MASTER_AND_MOMENTS
        return OptimizerBytes((weights - moved) * state, moved * (state + GRADIENT_BYTES))

    def update_memory(self, pieces: Sequence[Piece]) -> float:
        """Torch's Adam makes float32 roots of all second moments of a group of weights, of which experts are one."""
        fused = self.layout.fused_kernels if self.fused_adam is None else self.fused_adam
        return 0.0 if fused else 4 * max(self._updated_of(pieces)) * (1 - self.adam_on_host)

    def _updated(self, pieces: Sequence[Piece]) -> float:
        """How many of a rank's weights this one of its data-parallel and context-parallel copies updates."""
        return sum(self._updated_of(pieces))

    def _updated_of(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """The same of experts and of all else."""
        if self.distributed_optimizer or self.shards_weights:
            return self._shares(pieces)
        experts = self.bytes.expert_parameters(pieces)
        return experts, self.bytes.parameters(pieces) - experts

    def _share(self, pieces: Sequence[Piece]) -> float:
        return sum(self._shares(pieces))

    def _shares(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """An equal part of a rank's weights: of experts over the ranks that have the same ones, and of all else."""
        experts = self.bytes.expert_parameters(pieces)
        return experts / self.expert_holders, (self.bytes.parameters(pieces) - experts) / self.weight_holders

    # ------------------------------------------------------------------------------------------------------------ time

    def piece_time(self, piece: str, op: str, chunk: Chunk, alone: bool = False, shares: int = 1) -> float:
        """Seconds of one piece for an op kind on one chunk, not in halves. alone: whether no backward follows an F.
        shares: `Piece.shares`."""
        return self._kernel_times.of(piece, op, chunk, alone, shares)

    @cached_property
    def _kernel_times(self) -> KernelTimes:
        return KernelTimes(self.model, self.layout, self._kernel_time)

    def _halved_times(self, chunk: Chunk) -> HalvedTimes:
        """Of layers over halves of a chunk."""
        if chunk not in self._known_halves:
            interference = self.hardware.interference
            times = HalvedTimes(self.model, self.layout, chunk, self._kernel_time, interference)
            self._known_halves[chunk] = times
        return self._known_halves[chunk]

    @cached_property
    def _known_halves(self) -> dict[Chunk, HalvedTimes]:
        return BoundedDict(FEW)

    def after_time(self, program: Program) -> tuple[float, float]:
        """Seconds after the last backward: the sum of gradients over copies of replicated stages, data-parallel
        reduction of gradients and return of weights, over NVLink or the network; the optimizer's pass over weights,
        gradients and state. Of the rank with the most weights.

        What is updated on the host comes after the rest, and not at the time of its copies: float32 gradients there, a
        pass over its memory, weights back. Its arithmetic costs nothing, as with cores enough for the memory."""
        held = [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]
        weights = max(map(self.bytes.parameters, held))
        dp, hardware, holders = self.weight_holders, self.hardware, self.expert_holders
        moved = 0.0
        if max(dp, holders) > 1 and not self.shards_weights:
            # reduce-scatter of gradients and all-gather of weights, or an all-reduce of gradients: rings
            back = self.layout.element_bytes if self.distributed_optimizer else GRADIENT_BYTES
            experts = max(map(self.bytes.expert_parameters, held))
            moved = (weights - experts) * (GRADIENT_BYTES + back) * (dp - 1) / dp
            moved += experts * (GRADIENT_BYTES + back) * (holders - 1) / holders
        reduction = moved / self._data_parallel_bandwidth + self._copies_time(program) / self.sharded
        touched = 2 * MASTER_AND_MOMENTS + GRADIENT_BYTES + self.layout.element_bytes
        on_device = touched / (hardware.memory_bandwidth * hardware.efficiency.memory)
        on_host = touched * hardware.gpus_per_node / (hardware.host_memory_bandwidth * HOST_MEMORY_SHARE)
        on_host += (GRADIENT_BYTES + self.layout.element_bytes) / hardware.host_bandwidth(both=False)
        seconds = (1 - self.adam_on_host) * on_device + self.adam_on_host * on_host
        return reduction, max(map(self._updated, held)) * seconds

    @property
    def _data_parallel_bandwidth(self) -> float:
        """Bytes a second of a ring over the data-parallel and context-parallel GPUs."""
        hardware, bandwidth = self.hardware, self.hardware.nvlink
        if self.layout.tensor_parallel * self.weight_holders > hardware.gpus_per_node:
            # A ring crosses from node to node once, over all adapters, beside the rings of the other GPUs of the node
            # that do not belong to it: one for each tensor-parallel rank that the node has.
            rings = min(self.layout.tensor_parallel, hardware.gpus_per_node)
            bandwidth = min(bandwidth, hardware.network / rings)
            if self.layout.tensor_parallel * self.weight_holders > self._pod_gpus:
                # So it leaves a pod: the rings of one node, over what the spine takes from all nodes of the pod.
                bandwidth = min(bandwidth, hardware.network * hardware.pod_nodes / hardware.oversubscription / rings)
        return bandwidth * hardware.efficiency.network

    def _copies_time(self, program: Program) -> float:
        """All-reduces, as rings, of the gradients of replicated stages over the pipeline ranks that hold them."""
        moved = 0.0
        for index, stage in enumerate(program.stages):
            if stage.placement != "replicated":
                continue
            holders = len(program.holders(index))
            moved += 2 * self.bytes.parameters(stage.pieces) * GRADIENT_BYTES * (holders - 1) / holders
        return moved / self._pipeline_bandwidth(program.num_ranks)

    def _pipeline_bandwidth(self, ranks: int) -> float:
        """Bytes a second of a ring over the ranks of a pipeline."""
        return self._bandwidth_between(0, ranks - 1)

    def link_class(self, source: int, target: int) -> float:
        return self._bandwidth_between(source, target)

    def _bandwidth_between(self, source: int, target: int) -> float:
        """Bytes a second from each GPU of a pipeline rank to one of another."""
        same_node = self._node(source) == self._node(target)
        pods = (rank * self._stage_gpus // self._pod_gpus for rank in (source, target))
        return self.hardware.peer_bandwidth(self._senders, same_node, next(pods) == next(pods))

    @property
    def _pod_gpus(self) -> int:
        return self.hardware.pod_nodes * self.hardware.gpus_per_node

    def step_flops(self, program: Program) -> float:
        """Of the mathematics, forward and backward (forward alone for evaluation), of all pipelines and their ranks."""
        workload, total = program.workload, 0.0
        whole = workload.mean_tokens
        kinds = Counter((piece.kind, piece.shares) for stage in program.stages for piece in stage.pieces)
        for extents, count in Counter(extents for chunks in workload.extents for extents in chunks).items():
            chunk = self.chunk(extents, whole)
            once = sum(
                many * model_flops(self.model, self.layout, kind, chunk, shares)
                for (kind, shares), many in kinds.items()
            )
            total += count * once
        pipelines = self.data_parallel * self.layout.model_gpus
        return total * pipelines / (3 if program.forward_only else 1)

    @property
    def _senders(self) -> int:
        """GPUs of a node that send at the same time: those at the same place of the pipeline."""
        return min(self.hardware.gpus_per_node, self._stage_gpus)

    def _node(self, rank: int) -> int:
        return rank * self._stage_gpus // self.hardware.gpus_per_node

    @property
    def _stage_gpus(self) -> int:
        """GPUs at one place of the pipeline."""
        return self.layout.model_gpus * self.data_parallel

    @property
    def weight_holders(self) -> int:
        """Ranks that hold the same weights."""
        return self.data_parallel * self.layout.context_parallel

    @property
    def expert_holders(self) -> int:
        """Ranks that hold the same experts, or the same parts of them."""
        layout = self.layout
        if layout.expert_parallel == 1:
            return self.weight_holders
        return max(
            self.weight_holders * layout.tensor_parallel // (layout.expert_parallel * layout.expert_tensor_parallel), 1
        )

    def _all_to_all_time(self, sent: float, ranks: int, near: int) -> float:
        """Of so many bytes from each of the ranks to all others alike: those within its node, so many with itself, over
        NVLink, the others over this GPU's share of the network."""
        far = sent * (ranks - near) / (ranks - 1)
        return max(
            (sent - far) / self.hardware.peer_bandwidth(1, same_node=True),
            far / self.hardware.peer_bandwidth(self.hardware.gpus_per_node, False, self._in_a_pod),
        )

    def _on_a_node(self, ranks: int, gpus: int | None = None) -> int:
        """Of so many ranks side by side, each of so many GPUs (if not given, all tensor-parallel ones), those on one
        node."""
        return min(ranks, max(self.hardware.gpus_per_node // (gpus or self.layout.tensor_parallel), 1))

    def _context_ring_bandwidth(self) -> float:
        """Bytes a second that each rank passes on: of the slowest, which is one that sends to another node."""
        neighbours = self._on_a_node(self.layout.context_parallel)
        same_node = neighbours == self.layout.context_parallel
        crossing = min(self.layout.tensor_parallel, self.hardware.gpus_per_node)
        if not same_node and neighbours == 1:
            crossing = self.hardware.gpus_per_node
        return self.hardware.peer_bandwidth(crossing, same_node, self._in_a_pod)

    @property
    def _in_a_pod(self) -> bool:
        """Whether the GPUs that run one stage of one microbatch are in one pod."""
        return self.layout.model_gpus <= self._pod_gpus

    def _kernel_time(self, kernel: Kernel) -> float:
        hardware, efficiency = self.hardware, self.hardware.efficiency
        if kernel.kind in ("network", "all-to-all", "experts", "ring"):
            alone = hardware.latency + self._sending_time(kernel)
            if not kernel.behind:
                return alone
            return max(alone - sum(map(self._kernel_time, kernel.behind)), hardware.interference * alone)
        memory = kernel.bytes / (hardware.memory_bandwidth * efficiency.memory)
        if kernel.kind == "memory":
            return memory
        if kernel.kind == "attention":
            return max(memory, kernel.flops / (hardware.flops * self._attention_share))
        ramp = 1 + hardware.ramp_tokens / kernel.rows if kernel.rows else 1.0
        return max(memory, kernel.flops * ramp / (hardware.flops * efficiency.matmul))

    def _sending_time(self, kernel: Kernel) -> float:
        """Of the bytes of a collective over tensor-parallel or context-parallel ranks."""
        if kernel.kind == "network":
            return kernel.bytes / self.hardware.ring_bandwidth(self.layout.tensor_parallel)
        if kernel.kind == "ring":
            return kernel.bytes / self._context_ring_bandwidth()
        if kernel.kind == "experts":
            ranks = self.layout.expert_parallel
            return self._all_to_all_time(
                kernel.bytes, ranks, self._on_a_node(ranks, self.layout.expert_tensor_parallel)
            )
        ranks = self.layout.context_parallel
        return self._all_to_all_time(kernel.bytes, ranks, self._on_a_node(ranks))

    @cached_property
    def _attention_share(self) -> float:
        """Of the peak, with this model's heads; queries, keys and values of unlike width are padded."""
        model, share = self.model, self.hardware.attention(self.model.channels, self.layout.attention_kernel)
        if not model.kv_rank:
            return share
        return share * (model.channels + model.value_channels) / (2 * max(model.channels, model.value_channels))
