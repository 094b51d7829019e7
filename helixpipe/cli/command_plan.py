"""`helixpipe plan`: how to run a model on so many GPUs, and the commands that do.

helixpipe plan --model llama2-7b --hardware h100 --gpus 64 --seq-length 32768 --global-batch-size 128
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from contextlib import closing
from dataclasses import dataclass

from helixpipe.certify.certificate import Certificate
from helixpipe.cli.certification import CertifyOptions
from helixpipe.cli.hardware import MOST_BANDWIDTH
from helixpipe.cli.model import MAX_GPUS, ModelOptions, check_expert_parts, expert_loads, make_plan
from helixpipe.cli.plan_report import SearchReport, pareto_front
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.common.progress import ProgressLine
from helixpipe.common.ranges import MOST_GIB, MOST_LAYERS, MOST_MICROBATCHES
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import IN_PARTS, OPTIM_GRADS
from helixpipe.costs.verdict import gpu_for
from helixpipe.draw.pareto import check_picture, draw_pareto
from helixpipe.planning.catalogue import Catalogue
from helixpipe.planning.documents.filling import aligned
from helixpipe.planning.documents.lengths import DocumentLengths, LengthOptions, documents_of
from helixpipe.planning.search.documents import trials_of
from helixpipe.planning.search.explore import Search, budget
from helixpipe.planning.search.goodput import GoodputOptions
from helixpipe.planning.search.outcome import SearchResult, TriedCandidate
from helixpipe.planning.search.space import FixedChoices, Question
from helixpipe.planning.search.terms import AtSize, Terms, smaller
from helixpipe.planning.search.workers import Crew, Processes, SerialCrew, TrialRequest
from helixpipe.planning.vocabulary.choice import VocabularyOptions

LENGTH_UNIT = 512
"""Tokens that the longest document's length is rounded up to a multiple of: whatever ranks share it."""

SMALL_SEARCH = 12_000
"""Ops that are simulated for each smaller number of GPUs of `--explain`."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of the search of `plan`."""

    schedule: str | None = option(
        None, "Search these schedules alone, names from `helixpipe list` (default: all there are).", metavar="NAME,..."
    )
    gpus: int | None = option(None, "GPUs of all nodes together; or give --nodes.", at_least=1, at_most=MAX_GPUS)
    num_layers: int | None = option(
        None, "Layers (default: the model's).", flags=("--num-layers", "--layers"), at_least=1, at_most=MOST_LAYERS
    )
    pipeline_parallel: int | None = option(None, "Pipeline ranks (default: the best).", at_least=1, at_most=MAX_GPUS)
    memory_limit: float | None = option(
        None,
        "GiB of tensors that a GPU may hold (default, and at most: as many as fit into it).",
        metavar="GIB",
        more_than=0,
        at_most=MOST_GIB,
    )
    network: float | None = option(
        None,
        "Gb/s that a node sends, through one adapter unless --network-adapters says more (default: the hardware's).",
        metavar="GBPS",
        more_than=0,
        at_most=MOST_BANDWIDTH,
    )
    top: int = option(10, "So many plans are printed, the fastest first.", at_least=1, at_most=1000)
    commands: bool = option(
        False, "Print the torchrun command of each plan, not of the first alone.", flags=("--commands",)
    )
    explain: bool = option(
        False,
        "Say where time goes, why the second lost, and what takes over as GPUs become more.",
        flags=("--explain",),
    )
    pareto: str | None = option(
        None,
        "Also print the plans that no other beats in time and memory, and draw all into this file.",
        metavar="FILE.png",
    )
    time_limit: float | None = option(
        None,
        "Seconds that the search may take; it then gives the best so far (default: as many as its trials need).",
        metavar="SECONDS",
        more_than=0,
    )
    jobs: int | None = option(None, "Processes that simulate (default: one a core).", at_least=1, at_most=1024)


def run(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(PlanOptions, namespace)
    question = _question(options, namespace)
    if options.pareto is not None:
        check_picture("--pareto", options.pareto)  # before the search
    certifying = dataclass_from_namespace(CertifyOptions, namespace)
    certifying.try_file()
    with closing(_crew(question, options)) as crew:
        with ProgressLine("searching plans", unit=" %") as progress:
            search = Search(
                question,
                crew,
                options.top,
                say=lambda done, best: progress.at(*_so_far(done, best)),
                seconds=options.time_limit,
            )
            outcome = search.run()
        if not outcome.best:
            raise UserError(nothing_fits(question, outcome))
        terms = _terms(crew, outcome)
    scan = _scan(question, options) if options.explain and not outcome.interrupted else []
    failures = dataclass_from_namespace(GoodputOptions, namespace)
    plans = SearchReport(question, outcome, terms, scan, failures, _certificate(question, outcome, certifying))
    front = pareto_front(outcome) if options.pareto else []
    if options.pareto:
        draw_pareto([(each.trial.step, each.trial.peak / GIB) for each in plans.drawn],
                    [(each.trial.step, each.trial.peak / GIB, each.candidate.setting.schedule) for each in front],
                    question.limit / GIB, options.pareto)  # fmt: skip
    if namespace.json:
        print(json.dumps(plans.to_json(front)))
        return
    print(plans.text(options.explain, front, options.commands))


def _so_far(done: float, best: TriedCandidate | None) -> tuple[int, int, str]:
    """Return the progress of a search: percent, out of how many, and the best step."""
    step = f"best {best.trial.step:.4g} s, {best.candidate.setting.schedule}" if best is not None else ""
    return round(100 * done), 100, step


def _crew(question: Question, options: PlanOptions) -> Crew:
    count = options.jobs or os.cpu_count() or 1
    return Processes(question, count) if count > 1 else SerialCrew(question)


def _terms(crew: Crew, outcome: SearchResult) -> list[Terms]:
    """Return the terms of each of the best; none if the user has interrupted."""
    try:
        return (
            []
            if outcome.interrupted
            else crew.run([TrialRequest(each.candidate, kind="terms") for each in outcome.best])
        )
    except KeyboardInterrupt:
        return []


def _scan(question: Question, options: PlanOptions) -> list[AtSize]:
    """Return the best of a short search for each smaller number of GPUs; none if the user has interrupted."""
    sizes = []
    try:
        for each in smaller(question):
            with closing(_crew(each, options)) as crew:
                outcome = Search(each, crew, 1, ops=min(SMALL_SEARCH, budget(each.gpus))).run()
                if outcome.interrupted:
                    return []
                candidate = outcome.best[0].candidate if outcome.best else None
                terms = crew.run([TrialRequest(candidate, kind="terms")])[0] if candidate else None
                sizes.append(AtSize(each.gpus, candidate, terms))
    except KeyboardInterrupt:
        return []
    return sizes


def _certificate(question: Question, outcome: SearchResult, options: CertifyOptions) -> Certificate | None:
    """Return the certificate of the first plan, if one is asked for; none if the user has interrupted."""
    if options.certify is None or outcome.interrupted:
        return None
    simulation = trials_of(question).simulation(outcome.best[0].candidate)
    return options.certificate(simulation, question.limit)


def _question(options: PlanOptions, namespace: argparse.Namespace) -> Question:
    """Return the question that the flags ask. Raises UserError for flags that are missing or invalid."""
    model = dataclass_from_namespace(ModelOptions, namespace)
    model, documents = _with_documents(model, dataclass_from_namespace(LengthOptions, namespace))
    if not model.named:
        raise UserError("plan needs --model, or the sizes of one (--hidden-size …).")
    if (options.gpus is None) == (model.nodes is None):
        raise UserError(
            "plan needs --gpus or --nodes, and not both." if options.gpus else "plan needs --gpus or --nodes."
        )
    catalogue: Catalogue = namespace.catalogue
    names = [name.strip() for name in options.schedule.split(",")] if options.schedule else list(catalogue)
    schedules = [catalogue.find(name) for name in names]
    if options.schedule and (foreign := catalogue.foreign_options(namespace.given, schedules)):
        raise ScheduleError(foreign[0])
    if options.network is not None:
        if model.network_bandwidth is not None:
            raise UserError("--network and --network-bandwidth say the same; give one.")
        adapters = model.network_adapters or 1
        model = dataclasses.replace(model, network_bandwidth=options.network, network_adapters=adapters)
    searched = "global_batch_size", "nodes", "tensor_parallel", "context_parallel", "expert_parallel"
    unknown = dict.fromkeys((*searched, "expert_tensor_parallel"))
    plain = dataclasses.replace(model, **unknown)  # type: ignore[arg-type]
    one = make_plan(plain, 1, 1, options.num_layers, memory_limit=options.memory_limit)
    assert one is not None
    check_expert_parts(one.costs.model, model)
    hardware = one.costs.hardware
    gpus = options.gpus or (model.nodes or 1) * hardware.gpus_per_node
    hardware = dataclasses.replace(hardware, gpus_per_node=min(hardware.gpus_per_node, gpus))
    if gpus % hardware.gpus_per_node:
        raise UserError(f"--gpus {gpus} must be a multiple of the {hardware.gpus_per_node} GPUs of a node.")
    if model.global_batch_size is None:
        raise UserError("plan needs --global-batch-size, the sequences of a step; or --lengths, of its documents.")
    sequences = model.global_batch_size
    if sequences > MOST_MICROBATCHES * gpus * (model.micro_batch_size or 1):
        raise UserError(
            f"--global-batch-size {sequences} means more than {MOST_MICROBATCHES} microbatches a step on --gpus {gpus}."
        )
    sizes = ("--tensor-parallel", model.tensor_parallel), ("--context-parallel", model.context_parallel)
    for flag, size in (*sizes, ("--pipeline-parallel", options.pipeline_parallel)):
        if size is not None and gpus % size:
            raise UserError(f"{flag} {size} must divide the {gpus} GPUs.")
    strategy = model.data_parallel_sharding_strategy
    in_parts = None if strategy is None and model.distributed_optimizer else strategy in IN_PARTS
    own = {field.name for each in schedules for field in dataclasses.fields(each.options)} & set(namespace.given)
    given = FixedChoices(
        model.tensor_parallel,
        model.context_parallel,
        options.pipeline_parallel,
        model.cp_comm_type,
        in_parts,
        None if strategy is None else strategy == OPTIM_GRADS,
        experts=model.expert_parallel,
        expert_tensor=model.expert_tensor_parallel,
        mlp=model.chunk_size,
        loss=model.loss_chunk_size,
        options={
            each.name: dataclass_from_namespace(each.options, namespace)
            for each in schedules
            if own & {field.name for field in dataclasses.fields(each.options)}
        },
    )
    return Question(
        catalogue,
        tuple(each.name for each in schedules),
        one.costs.model,
        hardware,
        gpus,
        sequences,
        dataclasses.replace(one.costs.layout, sequence_parallel=model.sequence_parallel),
        one.limit,
        model.distributed_optimizer and strategy != "no_shard",
        one.costs.adam_on_host,
        given,
        documents=() if documents is None else documents.lengths,
        vocabulary=dataclass_from_namespace(VocabularyOptions, namespace),
        loads=expert_loads(one.costs.model, model),
    )


def _with_documents(model: ModelOptions, lengths: LengthOptions) -> tuple[ModelOptions, DocumentLengths | None]:
    """Return the options with sequences that hold the longest document, and the documents; None without --lengths.

    As in training, --seq-length is the longest that a document may be, and --global-batch-size the documents of a step;
    --max-length and --documents say the same. Raises UserError if both are given, and for what documents do not have.
    """
    if lengths.lengths is None:
        return model, documents_of(lengths)
    for own, same in (("max_length", "seq_length"), ("documents", "global_batch_size")):
        given = getattr(model, same)
        if given is not None and getattr(lengths, own) is not None:
            flags = [f"--{name.replace('_', '-')}" for name in (same, own)]
            raise UserError(f"{flags[0]} and {flags[1]} say the same with --lengths; give one.")
        lengths = dataclasses.replace(lengths, **{own: given if given is not None else getattr(lengths, own)})
    if model.micro_batch_size not in (None, 1):
        raise UserError(f"--micro-batch-size {model.micro_batch_size} cannot be given beside --lengths.")
    documents = documents_of(lengths)
    assert documents is not None
    length = aligned(model.seq_length or max(documents.lengths), LENGTH_UNIT)
    model = dataclasses.replace(model, cuda_graphs="off")  # in which rows of documents do not run
    return dataclasses.replace(model, seq_length=length, global_batch_size=len(documents.lengths)), documents


def nothing_fits(question: Question, outcome: SearchResult) -> str:
    """Return one sentence on why a search has found nothing, what is missing, and what would suffice."""
    if outcome.interrupted:
        return "nothing was found yet."
    counts, least = outcome.counts, outcome.least
    if not counts.candidates or (least is None and not counts.by_memory):
        return (
            f"--gpus {question.gpus} cannot be divided into sizes that a schedule takes for "
            f"{question.model.layers} layers, {question.model.groups} query groups, --seq-length "
            f"{question.model.seq_length} and --global-batch-size {question.sequences}."
        )
    usable = f"each may hold {question.limit / GIB:.1f} GiB of tensors"
    if least is None:
        missing = (outcome.least_bound - question.limit) / GIB
        return (
            f"{question.model.name} does not fit into {question.gpus} GPUs: weights, gradients, optimizer and one "
            f"microbatch alone need at least {outcome.least_bound / GIB:.1f} GiB of each, {missing:.1f} more than "
            f"there is; {usable}. More GPUs, or --optimizer-cpu-offload, would do."
        )
    if least.trial.peak <= question.limit:
        return (
            f"the host's memory is too little: {least.trial.host / GIB:.3g} GiB a GPU would do; raise --host-memory, "
            "or move less there."
        )
    missing = (least.trial.peak - question.limit) / GIB
    return (
        f"--gpus {question.gpus} are too few for --seq-length {question.model.seq_length}: the least that was found is "
        f"{least.trial.peak / GIB:.1f} GiB a GPU, {missing:.1f} more than fit; {usable}. More GPUs, a shorter "
        f"sequence, --optimizer-cpu-offload or GPUs of {gpu_for(least.trial.peak) / GIB:.0f} GiB would do."
    )
