"""Defines the search space: parallel sizes, a schedule with its options, and what is done to save memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.costs.expert_loads import ExpertLoads
from helixpipe.costs.hardware import Hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import A2A, AUTO, P2P, Layout, ModelShape
from helixpipe.lowering.bound import stage_work
from helixpipe.planning.catalogue import Catalogue, Schedule
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_lengths import CHUNK_COUNTS, short_chunks
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Extent

MLP_SLICE = 16384
"""Tokens of a slice of the MLP, tried where a rank has twice as many at a time."""

MOST_VIRTUAL = 8
"""Stages a rank that are tried: what more of them save of the bubble they cost in messages."""


@dataclass(frozen=True, order=True)
class ParallelSizes:
    """How GPUs are divided. parts: whether weights and gradients are sharded over the data-parallel ranks.
    gathered_once: these gather weights once a step, not for each op. in_pairs: forwards run beside backwards. experts:
    of the GPUs of a pipeline rank, those that share out the experts of every layer. expert_tensor: those that each
    expert is split over; 0: as many as tensor."""

    tensor: int
    context: int
    ranks: int
    data: int
    cp_comm_type: str = P2P
    parts: bool = False
    gathered_once: bool = False
    in_pairs: bool = False
    experts: int = 1
    expert_tensor: int = 0


@dataclass(frozen=True)
class Saving:
    """The measures that save memory. recompute: a granularity. mlp, loss: tokens of a slice, 0 for none. offload: what
    `--offload-activations auto` finds. early: whether recomputation also runs in idle time. recomputed_layers: the
    number of layers of each stage that recompute; 0: all.
    """

    recompute: str | None = None
    mlp: int = 0
    loss: int = 0
    offload: bool = False
    early: bool = False
    recomputed_layers: int = 0

    @property
    def recompute_options(self) -> RecomputeOptions:
        granularity: Any = self.recompute
        options = RecomputeOptions(granularity, recompute_early=self.early)
        if not self.recomputed_layers:
            return options
        return replace(options, recompute_method="block", recompute_num_layers=self.recomputed_layers)

    @property
    def in_all_layers(self) -> Saving:
        """The same with all layers recomputed."""
        return replace(self, recomputed_layers=0)

    @property
    def offload_options(self) -> OffloadOptions:
        return OffloadOptions("auto" if self.offload else "off")


@dataclass(frozen=True)
class Setting:
    """A schedule of the catalogue with all that can be chosen for it. balanced: whether layers are divided so that all
    ranks have about as much to do, embedding and head included; else stages have equally many."""

    schedule: str
    options: Any
    chunks: int = 1
    virtual_stages: int | None = None
    saving: Saving = Saving()
    balanced: bool = False

    @property
    def evenly(self) -> Setting:
        return replace(self, balanced=False) if self.balanced else self


@dataclass(frozen=True)
class Candidate:
    """One way to run the question: sizes and a setting."""

    sizes: ParallelSizes
    setting: Setting

    @property
    def group(self) -> tuple[ParallelSizes, str]:
        """The group of the candidate, one schedule and one division of the GPUs: the best of each is shown."""
        same = replace(self.sizes, cp_comm_type=P2P, parts=False, gathered_once=False, in_pairs=False)
        return replace(same, experts=1, expert_tensor=0), self.setting.schedule


@dataclass(frozen=True)
class FixedChoices:
    """Choices that are fixed and not searched for; None: searched for."""

    tensor: int | None = None
    context: int | None = None
    ranks: int | None = None
    cp_comm_type: str | None = None
    parts: bool | None = None
    gathered_once: bool | None = None
    chunks: int | None = None
    virtual_stages: int | None = None
    mlp: int | None = None
    loss: int | None = None
    recompute: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    experts: int | None = None
    expert_tensor: int | None = None


@dataclass(frozen=True)
class Question:
    """A question to the search. sequences: of a step, over all pipelines. limit: bytes of a GPU that a plan may need,
    with the margin subtracted. layout: its sizes and slices are replaced by the search. schedules: those that are
    searched.

    offload: whether offloading of activations is tried if what fits recomputes. fp32_kv_gradients: as of `ModelCosts`.
    documents: tokens of each of a step's, if they are not all alike; sequences is then their number, and the model's
    seq_length at least the longest. vocabulary: where the head may be. loads: how unevenly experts are used.
    """

    catalogue: Catalogue
    schedules: tuple[str, ...]
    model: ModelShape
    hardware: Hardware
    gpus: int
    sequences: int
    layout: Layout
    limit: float
    distributed_optimizer: bool = True
    adam_on_host: float = 0.0
    given: FixedChoices = FixedChoices()
    offload: bool = True
    fp32_kv_gradients: bool = False
    documents: tuple[int, ...] = ()
    vocabulary: VocabularyOptions = field(default_factory=VocabularyOptions)
    loads: ExpertLoads = field(default_factory=ExpertLoads)

    def costs(self, sizes: ParallelSizes, saving: Saving = Saving()) -> ModelCosts:
        """Return the costs. Raises UserError if the model cannot be divided so."""
        layout = replace(
            self.layout,
            tensor_parallel=sizes.tensor,
            sequence_parallel=self.layout.sequence_parallel and sizes.tensor > 1,
            context_parallel=sizes.context,
            cp_comm_type=sizes.cp_comm_type,
            mlp_chunk=saving.mlp,
            loss_chunk=saving.loss,
            expert_parallel=sizes.experts,
            expert_tensor=sizes.expert_tensor,
            expert_load=self.loads.busiest(self.model.experts, self.model.topk, sizes.experts),
        )
        costs = ModelCosts(
            self.model,
            self.hardware,
            layout,
            self.model.seq_length,
            sizes.data,
            self.distributed_optimizer,
            self.fp32_kv_gradients,
            adam_on_host=self.adam_on_host,
            shards_weights=sizes.parts,
            gathered_once=sizes.gathered_once,
        ).with_overlap_chosen()
        return costs.in_pairs if sizes.in_pairs else costs

    def may_pair(self, sizes: ParallelSizes) -> bool:
        """Whether forwards beside backwards are tried: weights in parts come for each op."""
        auto = self.layout.overlap_tp_comm == AUTO and not self.documents
        return auto and sizes.tensor * sizes.context * sizes.experts > 1 and not sizes.parts

    def microbatches(self, sizes: ParallelSizes) -> int:
        return self.sequences // (sizes.data * self.layout.micro_batch_size)

    # ---------------------------------------------------------------------------------------------------------- sizes

    def sizes(self) -> Iterator[ParallelSizes]:
        """Yield every division of the GPUs that model and batch allow. Of the two ways to share a context the faster
        one is taken; sharded weights are a size of their own if there is anything to shard.
        """
        given = self.given
        for tensor in _divisors(self.gpus, given.tensor):
            for context in _divisors(self.gpus // tensor, given.context):
                for ranks in _divisors(self.gpus // (tensor * context), given.ranks):
                    data = self.gpus // (tensor * context * ranks)
                    if ranks > self.model.layers + 2 or not self._shares_batch(data):
                        continue
                    sizes = self._with_comm(ParallelSizes(tensor, context, ranks, data))
                    if sizes is None:
                        continue
                    for each in self._expert_sizes(sizes):
                        if given.parts in (None, False):
                            yield each
                        if given.parts or self.may_divide_weights(sizes):
                            yield replace(each, parts=True, gathered_once=bool(given.gathered_once))

    def otherwise_shared(self, sizes: ParallelSizes) -> Iterator[ParallelSizes]:
        """Yield the same division of the GPUs with weights and gradients shared out otherwise."""
        if self.may_divide_weights(sizes):
            ways = ((False, False), (True, False), (True, True))
            yield from (replace(sizes, parts=parts, gathered_once=once) for parts, once in ways)

    def may_divide_weights(self, sizes: ParallelSizes) -> bool:
        """Whether weights are tried both whole and sharded."""
        several = sizes.data * sizes.context > 1
        refused = self.adam_on_host or bool(self.documents) or self.model.further > 0
        return self.given.parts is None and several and not refused

    def _expert_sizes(self, sizes: ParallelSizes) -> Iterator[ParallelSizes]:
        """Yield the sizes with all that experts may be shared out over: as many tensor-parallel GPUs as other weights,
        or whole, over some of the GPUs of a pipeline rank."""
        given, model = self.given, self.model
        for parts in dict.fromkeys((sizes.tensor, given.expert_tensor or 1)):
            if given.expert_tensor not in (None, parts):
                continue
            gpus = sizes.data * sizes.context * sizes.tensor
            most = 1 if not model.experts or self.documents or gpus % parts else gcd(gpus // parts, model.experts)
            for each in _divisors(most, given.experts):
                if parts == sizes.tensor:
                    yield replace(sizes, experts=each)
                elif each > 1:  # as in training
                    yield replace(sizes, experts=each, expert_tensor=parts)

    def _shares_batch(self, data: int) -> bool:
        """Whether `data` pipelines can share the batch."""
        if self.documents:
            return data <= len(self.documents)
        return self.sequences % (data * self.layout.micro_batch_size) == 0

    def _with_comm(self, sizes: ParallelSizes) -> ParallelSizes | None:
        """Return the sizes with the faster communication; None if the model cannot be divided so."""
        by_time = []
        ways = (self.given.cp_comm_type,) if self.given.cp_comm_type else (P2P, A2A) if sizes.context > 1 else (P2P,)
        for way in ways:
            each = replace(sizes, cp_comm_type=way)
            try:
                costs = self.costs(each)
            except UserError:
                continue
            by_time.append((sum(_times(costs)), way, each))
        return min(by_time)[2] if by_time else None

    # ------------------------------------------------------------------------------------------------------- settings

    def first_settings(self, sizes: ParallelSizes, *names: str) -> Iterator[Setting]:
        """Yield one setting of every schedule, or each of the names, from which `neighbours` leads to all others."""
        for starts in self.starts(sizes, *names):
            yield min(starts, key=lambda each: (abs(each.chunks - 4), each.chunks, -(each.virtual_stages or 1)))

    def starts(self, sizes: ParallelSizes, *names: str) -> Iterator[list[Setting]]:
        """Yield for every schedule, or each of the names, settings of all its numbers of chunks and stages, with
        nothing saved but what is given."""
        saving = Saving(self.given.recompute, self.given.mlp or 0, self.given.loss or 0)
        for name in names or self.schedules:
            schedule = self.catalogue[name]
            if schedule.one_rank != (sizes.ranks == 1) or (self.documents and not self._packs(schedule)):
                continue
            options, counts = self.variants(schedule)[0], self.chunk_counts(schedule, sizes)
            settings = [
                Setting(name, options, chunks, virtual, saving, balanced)
                for virtual in self.virtual_stages(schedule, sizes)
                for balanced in self.divisions(schedule, sizes, virtual)[:1]
                for chunks in counts
            ]
            if settings:
                yield settings

    def divisions(self, schedule: Schedule, sizes: ParallelSizes, virtual: int | None) -> list[bool]:
        """Return whether layers are divided by what ranks have to do, evenly, or either."""
        stages = sizes.ranks * schedule.stages_of(virtual)
        if schedule.own_stages or self.documents or sizes.ranks == 1:
            return [False] * (schedule.own_stages or self.model.layers % stages == 0)
        return [True] * (stages <= self.model.layers + 2) + [False] * (self.model.layers % stages == 0)

    @staticmethod
    def _packs(schedule: Schedule) -> bool:
        """Whether a schedule is tried with documents of all lengths: if it cuts them, or has one rank and nothing to
        wait for.
        """
        return schedule.ragged and not schedule.virtual_stages and (schedule.chunks or schedule.one_rank)

    def every_setting(self, sizes: ParallelSizes) -> Iterator[Setting]:
        """Yield all settings, apart from offloading and early recomputation."""
        for starts in self.starts(sizes):
            schedule = self.catalogue[starts[0].schedule]
            for start in starts:
                for options in self.variants(schedule):
                    for balanced in self.divisions(schedule, sizes, start.virtual_stages):
                        for saving in self.savings(sizes, start.chunks):
                            yield replace(start, options=options, balanced=balanced, saving=saving)

    def neighbours(self, sizes: ParallelSizes, setting: Setting) -> Iterator[Setting]:
        """Yield settings one step from a setting: more or fewer chunks or stages, other options."""
        schedule = self.catalogue[setting.schedule]
        counts = self.chunk_counts(schedule, sizes)
        place = counts.index(setting.chunks)
        for chunks in counts[max(place - 1, 0) : place + 2]:
            if chunks != setting.chunks:
                yield replace(setting, chunks=chunks)
        stages = self.virtual_stages(schedule, sizes)
        place = stages.index(setting.virtual_stages)
        for virtual in stages[max(place - 1, 0) : place + 2]:
            for balanced in self.divisions(schedule, sizes, virtual):
                if (virtual, balanced) != (setting.virtual_stages, setting.balanced):
                    yield replace(setting, virtual_stages=virtual, balanced=balanced)
        for options in self.variants(schedule):
            if options != setting.options:
                yield replace(setting, options=options)

    def variants(self, schedule: Schedule) -> Sequence[Any]:
        if schedule.name in self.given.options:
            return (self.given.options[schedule.name],)
        return schedule.variants or (schedule.options(),)

    def virtual_stages(self, schedule: Schedule, sizes: ParallelSizes) -> list[int | None]:
        """Return the stages a rank that are tried; none if the schedule has no such layers."""
        given = self.given.virtual_stages
        if not schedule.virtual_stages:
            return [None] if given in (None, 1) else []
        most = min((self.model.layers + 2) // sizes.ranks, MOST_VIRTUAL)
        return [v for v in range(2, most + 1) if given in (None, v) and self.divisions(schedule, sizes, v)]

    def chunk_counts(self, schedule: Schedule, sizes: ParallelSizes) -> list[int]:
        """Return the numbers of chunks that are tried, ascending."""
        given = self.given.chunks
        if not schedule.chunks or self.documents:
            return [1] if given in (None, 1) else []
        if given is not None:
            return [given]
        micro = self.layout.micro_batch_size
        length = self.model.seq_length // sizes.context
        return [
            count
            for count in CHUNK_COUNTS
            if (count & (count - 1) == 0 or count > 64) and short_chunks(length, count, micro, self.hardware) is None
        ]

    def savings(self, sizes: ParallelSizes, chunks: int) -> list[Saving]:
        """Return savings from the least that is done for memory to the most."""
        given = self.given
        tokens = self.model.seq_length / (chunks * sizes.context)
        mlp = MLP_SLICE if tokens >= 2 * MLP_SLICE and not self.documents else 0
        mlp = 0 if self.model.experts else mlp
        loss = 0 if self.model.further else replace(self.layout, loss_chunk=0).with_loss_slices().loss_chunk
        slices = [mlp and MLP_SLICE] if given.mlp is None else [given.mlp]
        choices = []
        for recompute in (None, "without-attention", "full") if given.recompute is None else (given.recompute,):
            for mlp_slice in dict.fromkeys([0, *slices] if given.mlp is None else slices):
                if mlp_slice and recompute == "full" and given.mlp is None:
                    continue
                for loss_slice in (
                    dict.fromkeys((0, loss if tokens > loss else 0)) if given.loss is None else (given.loss,)
                ):
                    choices.append(Saving(recompute, mlp_slice, loss_slice))
        return list(dict.fromkeys(choices))


def _times(costs: ModelCosts) -> tuple[float, float]:
    """Forward and backward of a whole microbatch."""
    stages, whole = even_stages(costs.layer_kinds(costs.model.layers), 1), costs.seq_length
    forward, backward = (costs.op_time(stage_work(kind, stages, 0, (Extent(whole, 0),), whole)) for kind in "FB")
    return forward, backward


def _divisors(number: int, given: int | None = None) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0 and given in (None, size)]
