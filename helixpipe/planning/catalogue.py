"""Defines the input of every schedule and its entry in the catalogue. Pure Python: no flags, no prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import check_ranges, nearest_name
from helixpipe.costs.by_hand import unit_costs
from helixpipe.planning.division import ways_to_divide
from helixpipe.planning.memory.early import recomputed
from helixpipe.planning.memory.offload import OffloadOptions, check_offloads, offloaded
from helixpipe.planning.memory.offload_choice import MemoryLimits, choose
from helixpipe.planning.memory.recompute import RecomputeOptions, check_recomputes
from helixpipe.planning.memory.recompute_choice import ChoiceTables
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.planning.overlap.pairs import with_pairs
from helixpipe.planning.vocabulary.choice import VocabularyOptions, check_heads, over_pipeline
from helixpipe.program.chunked import in_chunks
from helixpipe.program.costs import Costs
from helixpipe.program.files import is_file, load_program, naming, says_all
from helixpipe.program.program import Program, of_layers, with_head
from helixpipe.program.stages import LayerKinds, Stage, even_stages, layer_kinds, layers_of, uneven_stages
from helixpipe.program.workload import Workload, uniform

DEFAULT_VIRTUAL = 2
"""Stages a rank of schedules that interleave, where nothing says how many."""


@dataclass(frozen=True)
class Shape:
    """The size of the problem a schedule is asked to order.

    ranks: pipeline size p. microbatches: m a step. layers: L of the model. chunks: k slices of a microbatch's sequence.
    virtual_stages: v stages a rank, for schedules that interleave. chunk_lengths: tokens of each chunk, None = equal.
    ragged: the chunks of each microbatch, where they are not all cut alike; chunks is then left out or the most of any.
    costs: what ops take, for schedules found from costs; None = unknown. recompute: what every stage recomputes.
    stage_layers: how many layers each stage has, where they are not all alike; None = equally many.
    memory_limit: what a rank may use, in the costs' unit of memory; None = unknown. offload: what waits in the host's
    memory, of which a rank has host_limit. sharded, gathered_once: as of `Program`. vocabulary: where the head is.
    head: its kind, if not that of the costs. cut: of a shape of whole microbatches (`whole`), how they are cut after
    all. tables: what other shapes have found out.
    """

    ranks: int
    microbatches: int
    layers: int
    chunks: int = 1
    virtual_stages: int | None = None
    chunk_lengths: tuple[int, ...] | None = None
    costs: Costs | None = None
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    memory_limit: float | None = None
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    host_limit: float = inf
    ragged: Workload | None = None
    sharded: int = 1
    gathered_once: bool = False
    stage_layers: tuple[int, ...] | None = None
    vocabulary: VocabularyOptions = field(default_factory=VocabularyOptions)
    head: str = "head"
    cut: Workload | None = None
    tables: ChoiceTables = field(default_factory=ChoiceTables, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("pipeline ranks", self.ranks),
            ("microbatches", self.microbatches),
            ("layers", self.layers),
            ("chunks", self.chunks),
            ("virtual stages", self.virtual_stages if self.virtual_stages is not None else 1),
        ):
            if value < 1:
                raise ScheduleError(f"the number of {name} must be at least 1, not {value}.")
        lengths = self.chunk_lengths
        if lengths is not None and (len(lengths) != self.chunks or min(lengths) < 1):
            raise ScheduleError(f"chunk lengths {lengths} do not fit the number of chunks, {self.chunks}.")
        self._check_ragged()
        self.recompute.check()
        self.offload.check()

    def _check_ragged(self) -> None:
        if self.ragged is None:
            return
        if len(self.ragged) != self.microbatches or not all(self.ragged.microbatches):
            raise ScheduleError(
                f"a workload of {len(self.ragged)} microbatches, of a chunk or more each, does not fit a step of "
                f"{self.microbatches}."
            )
        if self.chunks not in (1, self.ragged.most_chunks) or self.chunk_lengths is not None:
            raise ScheduleError(
                f"a workload says itself how its microbatches are cut, into {self.ragged.most_chunks} chunks at most; "
                "leave the number of chunks and their lengths out."
            )

    @property
    def workload(self) -> Workload:
        """The microbatches: all cut alike, or each as `ragged` says."""
        return self.ragged or uniform(self.microbatches, self.chunks, self.chunk_lengths)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKinds, ...]:
        """The kinds of the pieces of each layer, which the costs know where they are those of a model."""
        return layer_kinds(self.layers) if self.costs is None else self.costs.layer_kinds(self.layers)

    @property
    def head_kind(self) -> str:
        """The kind of the head, as given or as the costs know where they are those of a model."""
        return self.head if self.head != "head" or self.costs is None else self.costs.head_kind

    @property
    def most_chunks(self) -> int:
        """The largest number of chunks in any microbatch."""
        return self.ragged.most_chunks if self.ragged else self.chunks

    @property
    def whole(self) -> Shape:
        """The shape for schedules that order whole microbatches, whose programs `in_chunks` cuts."""
        if self.most_chunks == 1:
            return self
        ragged = None if self.ragged is None else self.ragged.whole
        return replace(self, chunks=1, chunk_lengths=None, ragged=ragged, cut=self.workload)

    def in_chunks(self, program: Program) -> Program:
        """Return a program of whole microbatches and a plain head with these cut as the shape says, unless they are
        already, and with the head that the costs know."""
        program = with_head(program, self.head_kind)
        return program if self.cut is None or program.workload == self.cut else in_chunks(program, self.cut)

    def even_stages(self, count: int) -> tuple[Stage, ...]:
        """Return `count` stages of equally many layers, or of those that `stage_layers` gives, with what they
        recompute; see `program.even_stages`.
        """
        if self.stage_layers is None:
            try:
                return self.recompute.stages(even_stages(self.layer_kinds, count))
            except ScheduleError as error:
                others = ways_to_divide(self.layers, self.ranks, count)
                raise ScheduleError(f"{str(error)[:-1]}{others}.") from None
        if len(self.stage_layers) != count or sum(self.stage_layers) != self.layers:
            raise ScheduleError(
                f"a division of the layers into stages of {', '.join(map(str, self.stage_layers))} does not fit "
                f"{self.layers} layers in {count} stages, as the schedule has them."
            )
        return self.recompute.stages(uneven_stages(self.stage_layers, self.layer_kinds))


@dataclass(frozen=True)
class NoOptions:
    """The schedule has no options of its own."""


def never(options: Any) -> bool:
    """Return False: `adapts` of a schedule that recomputes nothing by itself, whatever its options."""
    return False


def unchanged(options: Any) -> Any:
    """Return the options unchanged: `quick` of a schedule whose program is not searched for."""
    return options


@dataclass(frozen=True)
class Schedule:
    """One line of the catalogue.

    build: a pure function of the shape and the schedule's own options. options: a dataclass; its fields become flags.
    one_rank: runs on a single pipeline rank only. virtual_stages: whether it takes those of the shape. stages: that a
    rank has where it takes no other number. zigzag: whether the stages go down the ranks and up again, and not from the
    last rank back to the first. own_stages: whether it divides the layers itself. splits: whether backwards may
    run as their two halves, I and W. chunks: whether
    it is made for sequences cut into chunks. units: whether its order is one of units, whole microbatches or chunks, as
    that of all `chunks` is; else every op of its microbatches is run chunk by chunk (`in_chunks`). ragged: whether
    microbatches may differ in length and in their number of chunks. offloads: whether it offloads
    activations unless flags say otherwise. effort: about how much longer its program takes to make, lower and simulate
    than one whose order is only stated. spread: whether ranks share out a layer's
    microbatches, and so have about the same share of embedding and head.
    variants: options that a search should try. default: whether it is run if flags name no schedule; of those it is the
    one that takes what the flags ask for. adapts: whether a schedule of these options recomputes what the memory asks
    for, unless flags say what to recompute. quick: the options with which its program is not searched for. aliases:
    other names of its flags, of papers' own code, each with the words that it stands for; without a value there, it
    takes a whole number. paper, bubble, memory: columns of `helixpipe list`; formulas in p, m, k, v, F, B (times a
    rank) and microbatch-stages.
    """

    name: str
    build: Callable[[Shape, Any], Program]
    paper: str
    bubble: str
    memory: str
    options: type[Any] = field(default=NoOptions)
    one_rank: bool = False
    virtual_stages: bool = False
    stages: int = 1
    zigzag: bool = False
    own_stages: bool = False
    splits: bool = False
    chunks: bool = False
    units: bool = False
    offloads: bool = False
    ragged: bool = True
    effort: int = 1
    spread: bool = False
    variants: tuple[Any, ...] = ()
    default: bool = False
    adapts: Callable[[Any], bool] = never
    quick: Callable[[Any], Any] = unchanged
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether flags that name no schedule and cut no sequence run it, on several ranks: 1F1B and its interleaved
        form, as in Megatron-LM."""
        return self.default and not self.one_rank and not self.chunks

    def stages_of(self, virtual_stages: int | None) -> int:
        """Return the stages of a rank. virtual_stages: those of the shape."""
        return (virtual_stages or DEFAULT_VIRTUAL) if self.virtual_stages else self.stages

    def places(self, ranks: int, virtual_stages: int | None) -> tuple[int, ...]:
        """Return the rank that runs each stage, where every stage is on one rank."""
        rounds = range(self.stages_of(virtual_stages))
        down, up = range(ranks), range(ranks - 1, -1, -1)
        return tuple(rank for turn in rounds for rank in (up if self.zigzag and turn % 2 else down))


def of_model(program: Program, costs: Costs | None) -> Program:
    """Return a file's program on the model of the costs; unchanged if they are of none, as times given by hand apply to
    any model. Raises ScheduleError for a program of another model.
    """
    if costs is None or costs.memory_unit != "bytes":
        return program
    with naming(program.source):
        return with_head(of_layers(program, costs.layer_kinds(program.num_layers)), costs.head_kind)


class Catalogue(Mapping[str, Schedule]):
    """Schedules by the value of `--pipeline-schedule`, in the order given, and what is asked of them by name or file.

    Whoever needs a catalogue (the command, the drop-in, training) is handed one; `schedules.CATALOGUE` is this
    project's.
    """

    def __init__(self, schedules: Iterable[Schedule]):
        self._schedules = {schedule.name: schedule for schedule in schedules}

    def __getitem__(self, name: str) -> Schedule:
        return self._schedules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._schedules)

    def __len__(self) -> int:
        return len(self._schedules)

    def find(self, name: str) -> Schedule:
        """Return the schedule of that name. Raises ScheduleError that names the nearest one."""
        if name in self:
            return self[name]
        near = nearest_name(name, self)
        hint = f"did you mean {near}? " if near else ""
        raise ScheduleError(
            f"unknown pipeline schedule {name!r}: {hint}known are {', '.join(self)}, or the path of a .json or .csv "
            "file."
        )

    def default(self, one_rank: bool = False, virtual_stages: bool = False, chunks: bool = False) -> str:
        """Return the name of the default schedule for what flags ask. Raises ScheduleError if the catalogue
        has none.
        """
        asked = one_rank, virtual_stages, chunks
        for schedule in self.values():
            if schedule.default and (schedule.one_rank, schedule.virtual_stages, schedule.chunks) == asked:
                return schedule.name
        raise ScheduleError(f"give the name of a pipeline schedule; known are {', '.join(self)}.")

    def own_options(self, name: str, given: Mapping[str, Any]) -> Any:
        """Return a schedule's own options. given: by the name of the field. Raises ScheduleError for an unknown
        schedule or option."""
        schedule = self.find(name)
        known = [field.name for field in fields(schedule.options)]
        for option in given:
            if option not in known:
                valid = f"known are {', '.join(known)}" if known else "it has none"
                raise ScheduleError(f"schedule {name} has no option {option}: {valid}.")
        return schedule.options(**given)

    def foreign_options(self, given: Mapping[str, str], chosen: Sequence[Schedule]) -> list[str]:
        """Return a sentence for each flag that none of the `chosen` schedules has. given: field -> flag as typed."""
        own = {field.name for schedule in chosen for field in fields(schedule.options)}
        names = ", ".join(schedule.name for schedule in chosen) or "a file"
        sentences = []
        for name, flag in given.items():
            others = [each.name for each in self.values() if name in {field.name for field in fields(each.options)}]
            if others and name not in own:
                sentences.append(f"{flag} is an option of {', '.join(others)}, not of {names}.")
        return sentences

    def check_chunks(self, flag: str | None, names: Sequence[str]) -> None:
        """Raise ScheduleError for a flag that finds a number of chunks where only files are asked for, which have one
        of their own. Flags may repeat it.

        flag: as typed (`ChunkOptions.cutting_flag`); None: none is given. names: of schedules and files.
        """
        if flag is not None and flag.endswith(" auto") and all(map(is_file, names)):
            raise ScheduleError(f"{flag} finds a number of chunks, but {', '.join(names)} has its own; leave it out.")

    def build(self, name: str, shape: Shape, options: Any = None) -> Program:
        """Return the program of a schedule of the catalogue, or of a file (a name that ends in `.json` or `.csv`), for
        a shape.

        Raises ScheduleError for an unknown name or a shape the schedule cannot have; for a file, ProgramError when it
        cannot be read and ScheduleError when it was made for another shape or, a JSON file, recomputes something else.
        The program is not validated here (`lowering.lower` does).
        """
        program = self._of_file(name, shape) if is_file(name) else self._of_schedule(name, shape, options)
        with naming(program.source):
            return self.completed(name, program, shape)

    def completed(self, name: str, program: Program, shape: Shape) -> Program:
        """Return a schedule's or file's program with all that its shape says beside the order: weights in parts,
        recomputation, offloading, ops in pairs."""
        if says_all(name):
            check_recomputes(name, program, shape.recompute)
            check_offloads(name, program, shape.offload)
            program = shared_out(program, shape.sharded, shape.gathered_once)
        else:
            program = shared_out(program, shape.sharded, shape.gathered_once)
            program = recomputed(program, shape.recompute, shape.costs, shape.memory_limit)
        program = self._offloaded(name, program, shape)
        return with_pairs(program, shape.costs, shape.memory_limit) if shape.costs is not None else program

    def _offloaded(self, name: str, program: Program, shape: Shape) -> Program:
        """Return a schedule's or file's program with the offloading that its shape says."""
        costs, options = shape.costs or unit_costs(), shape.offload
        if options.kv_blocks:
            program = replace(program, kv_blocks=True)
        if options.offload_activations is None and name in self and self[name].offloads:
            options = replace(options, offload_activations="auto")
        if not options.auto:
            return offloaded(program, options, costs)
        if shape.memory_limit is None:
            return program
        early = shape.recompute.recompute_early
        return choose(
            program, options, costs, MemoryLimits(shape.memory_limit, shape.host_limit), not is_file(name), early
        )

    def _of_file(self, name: str, shape: Shape) -> Program:
        program = load_program(name, shape.layers)
        if (program.num_ranks, program.num_microbatches) != (shape.ranks, shape.microbatches):
            raise ScheduleError(
                f"{name} is a program for {program.num_ranks} ranks and {program.num_microbatches} microbatches, "
                f"but the run has {shape.ranks} and {shape.microbatches}."
            )
        if program.num_layers != shape.layers:
            raise ScheduleError(f"{name} has {program.num_layers} layers, but the run has {shape.layers}.")
        program = of_model(program, shape.costs)
        check_heads(name, program, shape.vocabulary)
        if shape.virtual_stages is not None or shape.stage_layers is not None:
            raise ScheduleError(
                f"{name} says itself which stages a rank has; leave virtual stages and divisions of the layers out."
            )
        if shape.chunks not in (1, program.num_chunks):
            raise ScheduleError(f"{name} has {program.num_chunks} chunks a microbatch, but the run has {shape.chunks}.")
        workload = program.workload
        if workload.proportional and workload.lengths is not None:
            if shape.chunks == program.num_chunks:  # how long they are, such a file does not say
                return replace(program, workload=shape.workload)
        elif shape.chunk_lengths not in (None, program.chunk_lengths):
            asked = ", ".join(map(str, shape.chunk_lengths or ()))
            raise ScheduleError(
                f"{name} says itself how long its chunks are, and it is not {asked} tokens as the run has them; leave "
                "the flags about chunks out."
            )
        return program

    def _of_schedule(self, name: str, shape: Shape, options: Any) -> Program:
        schedule = self.find(name)
        if shape.virtual_stages not in (None, 1, schedule.stages) and not schedule.virtual_stages:
            raise ScheduleError(
                f"schedule {name} has {'one stage' if schedule.stages == 1 else f'{schedule.stages} stages'} a rank; "
                f"virtual stages ({shape.virtual_stages}) need another."
            )
        if shape.ragged is not None and not schedule.ragged:
            raise ScheduleError(
                f"schedule {name} is found for equal microbatches; microbatches that differ need another."
            )
        options = schedule.options() if options is None else options
        check_ranges(options, ScheduleError)
        program = self._over_pipeline(schedule, shape, options)
        counts = layers_of(program.stages)
        if shape.stage_layers is not None and any(counts[len(shape.stage_layers) :]):  # the head may be a stage more
            counts = ()
        if shape.stage_layers not in (None, counts[: len(shape.stage_layers or ())]):
            raise ScheduleError(f"schedule {name} divides the layers itself; leave the flags out that divide them.")
        return program

    def _over_pipeline(self, schedule: Schedule, shape: Shape, options: Any) -> Program:
        """Return the schedule's program with the head where the shape says."""

        own = shape if schedule.units or schedule.chunks else shape.whole
        if shape.head_kind != "head" and shape.vocabulary.pipeline_vocab_parallel in ("spread", "split"):
            raise ScheduleError(
                f"--pipeline-vocab-parallel {shape.vocabulary.pipeline_vocab_parallel} takes the head apart, which one "
                "that predicts further tokens (--mtp-num-layers) is not: give ends."
            )

        def built(costs: Costs | None) -> Program:
            return own.in_chunks(schedule.build(own if costs is None else replace(own, costs=costs), options))

        unsaid = shape.offload.offload_activations is None
        offloads = shape.offload.auto or (schedule.offloads and unsaid)  # makes room later
        limit = None if offloads else shape.memory_limit

        def finished(program: Program) -> Program:
            return recomputed(program, shape.recompute, shape.costs, shape.memory_limit)

        return over_pipeline(built, shape.vocabulary, shape.costs or unit_costs(), limit, finished)
