"""Builds a `Trainer` from a command line, in the order in which the parts depend on each other."""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.common.output import complain, say
from helixpipe.model import Microbatch
from helixpipe.model.device import prepare
from helixpipe.planning.plan import Plans
from helixpipe.watch.position import Patience, Position
from megatron.pretrain.config import Config
from megatron.pretrain.data.datasets import build_datasets, index_counts
from megatron.pretrain.data.identity import identities
from megatron.pretrain.data.loading import Isolation, batch_iterator
from megatron.pretrain.data.options import DataOptions
from megatron.pretrain.data.samplers import MicrobatchSampler, consumed_valid_samples, samples_needed
from megatron.pretrain.log.summary import print_arguments, record_arguments, spread, summary
from megatron.pretrain.process.outputs import try_outputs
from megatron.pretrain.validation import check_device


def import_all() -> None:
    """Import what training needs, and nothing that depends on its flags: most of a start, for who starts later."""
    prepare()
    for name in ("arguments", "process.parallel", "train"):
        importlib.import_module(f"megatron.pretrain.{name}")


def pretrain(config: Config, plans: Plans[int], started: float, leaving: Callable[[], bool] = lambda: False) -> None:
    """Run what the configuration asks for.

    plans: those made of it already. started: `time.monotonic()` when the program began. leaving: whether this rank is
    to leave its group, which it does by an exception.

    Raises UserError (alike on all ranks) for what flags, data or checkpoints get wrong.
    """
    prepare()
    from megatron.pretrain.process.parallel import initialize
    from megatron.pretrain.process.watching import watched

    check_device(config, gpus=torch.cuda.device_count())
    print_arguments(config)
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses matrix products on a GPU
        torch.use_deterministic_algorithms(True)
    parallel = initialize(config, leaving)
    with watched(config, parallel) as position:
        from megatron.pretrain.checkpoint.checkpointing import Checkpointer
        from megatron.pretrain.checkpoint.options import CheckpointOptions
        from megatron.pretrain.checkpoint.ranks import together

        together(lambda: try_outputs(config), "output")
        checkpointer = Checkpointer(CheckpointOptions.from_config(config))
        with nullcontext() if config.training.skip_train else checkpointer.folder.locked(), ExitStack() as ends:
            with ExitStack() as following:
                _run(config, plans, parallel, checkpointer, position, started, leaving, ends, following)
            dist.barrier()
    dist.destroy_process_group()


def _run(
    config: Config,
    plans: Plans[int],
    parallel: Any,
    checkpointer: Any,
    position: Position,
    started: float,
    leaving: Callable[[], bool],
    ends: ExitStack,
    following: ExitStack,
) -> None:
    """Train. ends, following: Close what is left open, after all ranks have ended and before that."""
    # These import megatron-core, which `prepare` has to see first.
    from megatron.pretrain.checkpoint.state import TrainingProgress
    from megatron.pretrain.data.tokenizer import tokenizer_of
    from megatron.pretrain.extension import RunParts, load_extensions
    from megatron.pretrain.log.log import build_timers
    from megatron.pretrain.log.metrics import MetricsWriter
    from megatron.pretrain.plan.pipeline import Pipeline
    from megatron.pretrain.process.signals import SignalFlag, StopCheck, all_ranks_max
    from megatron.pretrain.step.microbatches import BatchSchedule, run_length
    from megatron.pretrain.train import Trainer

    gc.freeze()  # no collection, nor the end of the process, need search what was imported
    gc.enable()
    schedule = BatchSchedule.from_config(config)
    run_length(config, schedule)  # refuses one without steps before anything is made
    evaluation_size = schedule.final().num_microbatches
    tokenizer = tokenizer_of(config.data)
    position.enter("connecting the pipeline", Patience.LONG)
    extensions = load_extensions(config)
    further = [each.programs for each in extensions]
    pipeline = ends.enter_context(closing(Pipeline(config, plans, parallel, schedule.step_sizes(), position, further)))
    position.enter("set-up", Patience.ENDLESS)
    build = partial(_build, config, parallel, pipeline, checkpointer, schedule)
    state, scheduler = build()
    _say_what_is_run(config, parallel, pipeline, state, evaluation_size)
    arguments = _arguments(config, tokenizer)
    parts = RunParts(parallel, pipeline, state, scheduler, arguments, leaving)
    remembered = None
    for each in extensions:
        following.push(partial(_close, each))
        remembered = each.set_up(parts) or remembered
    del parts
    loaded = None if remembered else checkpointer.load(state.model, state.optimizer, scheduler, arguments)
    progress = remembered or (loaded[0] if loaded is not None else TrainingProgress())
    _recall_order(config, progress, loaded, parallel)
    length = run_length(config, schedule, progress.iteration, progress.consumed_train_samples)
    make_feed = _document_feed if config.data.variable_seq_lengths else _sample_feed
    feed = make_feed(config, parallel, pipeline, tokenizer, schedule, length, progress)
    if progress.iteration < length.iterations:  # a run that has ended before writes nothing
        record_arguments(config)
    # Until here signals kill: there is nothing to save, and a rank that waits for a dead one would not notice a flag.
    with SignalFlag(active=config.training.exit_signal_handler) as flag:
        trainer = Trainer(
            config=config,
            parallel=parallel,
            pipeline=pipeline,
            state=state,
            scheduler=scheduler,
            length=length,
            feed=feed,
            checkpointer=checkpointer,
            arguments=arguments,
            progress=progress,
            log=_log(
                config, parallel, length, writer := MetricsWriter.from_config(config), timers := build_timers(config)
            ),
            timers=timers,
            stop=StopCheck(config, flag, agree=all_ranks_max(parallel.device), started=started),
            position=position,
            extensions=extensions,
            build=build,
        )
        del state, scheduler  # the trainer replaces its own where layers move, and there is no room for both
        if not (remembered or loaded) and config.checkpoint.load and parallel.is_first:
            say(f" > no checkpoint in {config.checkpoint.load} yet: starting from scratch")
        with closing(feed), closing(writer), ExitStack() as end:
            end.callback(position.enter, "the end", Patience.LONG)
            trainer.run()


def _build(config: Config, parallel: Any, pipeline: Any, checkpointer: Any, schedule: Any) -> tuple[Any, Any]:
    """Make the model of the pieces that the pipeline has here, with what trains it, and its scheduler. Collective."""
    from megatron.pretrain.step.lr_schedule import build_param_scheduler
    from megatron.pretrain.step.model import build_model

    state = build_model(config, parallel, pipeline.pieces, pipeline.copies, pipeline.stages)
    pipeline.attach(state.model, state.weights)
    checkpointer.keep(state.sharded)
    return state, build_param_scheduler(state.optimizer, config, schedule)


def _log(config: Config, parallel: Any, length: Any, writer: Any, timers: Any) -> Any:
    from megatron.pretrain.log.log import TrainingLog

    speaks = parallel.dp_rank == parallel.cp_rank == 0
    return TrainingLog(config, total_iterations=length.iterations, writer=writer, timers=timers, report_memory=speaks)


def _say_what_is_run(config: Config, parallel: Any, pipeline: Any, state: Any, evaluation_size: int) -> None:
    from helixpipe.model.latent import positions
    from megatron.pretrain.log.log import parameters_line
    from megatron.pretrain.step.model import say_kernels

    own, total = state.weights.count()
    if config.logging.log_arguments and parallel.dp_rank == parallel.cp_rank == 0:
        say(parameters_line(parallel.tp_rank, parallel.pp_rank, own))
    ends = spread(own, parallel.device)
    if parallel.is_first:
        say(summary(config, pipeline, evaluation_size, total, ends))
        if (extension := positions(state.model.config, state.model.gpt).rope_scaling.description) is not None:
            say(f" > {extension}")
        say_kernels(state, config, pipeline.program(evaluation_size))


def _close(extension: Any, kind: Any, error: BaseException | None, trace: Any) -> None:
    extension.close(error)


def _arguments(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return what a checkpoint keeps as `args`: the flags, and digests of data and tokenizer. Collective."""
    from megatron.pretrain.checkpoint.ranks import on_first

    options = DataOptions.from_flags(config.data, seq_length=config.model.seq_length or 0, seed=config.training.seed)
    return {**config.flat(), **on_first(lambda: identities(options, tokenizer), "data")}


def _recall_order(config: Config, progress: Any, loaded: Any, parallel: Any) -> None:
    """Work out for how many samples the data was shuffled, where the checkpoint does not say so."""
    from megatron.pretrain.feed.samples import samples_asked_for

    if not loaded or progress.index_samples or not progress.iteration or config.data.variable_seq_lengths:
        return
    progress.index_samples = samples_asked_for(loaded[1])
    if parallel.is_first:
        told = f"for {progress.index_samples[0][0]}, which its flags ask for" if progress.index_samples else "anew"
        say(f" > the checkpoint does not say for how many samples its data was shuffled: it is shuffled {told}")


def _sample_feed(
    config: Config, parallel: Any, pipeline: Any, tokenizer: Any, schedule: Any, length: Any, progress: Any
) -> Any:
    """Return the feed of the microbatches of every split, from where `progress` says. Collective."""
    from megatron.pretrain.feed.samples import SampleFeed
    from megatron.pretrain.log.flops import flops_of_document

    training, logging = config.training, config.logging
    size, interval = schedule.final().samples, logging.eval_interval or 0  # of an evaluation's steps
    options = DataOptions.from_flags(config.data, seq_length=config.model.seq_length or 0, seed=training.seed)
    samples = samples_needed(length.samples, length.iterations, interval, logging.eval_iters, size)
    isolation = Isolation(attention=options.reset_attention_mask, positions=options.reset_position_ids)
    needed_here = pipeline.reads_data or (isolation.attention and pipeline.places_tokens)
    progress.index_samples = index_counts(progress.index_samples, samples, options.dataloader_type)
    *earlier, samples = progress.index_samples
    datasets = build_datasets(options, tokenizer, samples, earlier=earlier, needed_here=needed_here)
    present = torch.tensor([each is not None for each in datasets], dtype=torch.int32, device=parallel.device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)

    def iterate(dataset: Any, consumed: int, wrap: bool) -> Iterator[Microbatch] | None:
        if dataset is None:
            return None
        sampler = MicrobatchSampler(
            total_samples=len(dataset),
            consumed_samples=consumed,
            micro_batch_size=training.micro_batch_size or 1,
            dp_rank=parallel.dp_rank,
            dp_size=parallel.dp_size,
            dataloader_type="single" if wrap else options.dataloader_type,
            seed=training.seed,
            wrap=wrap,
        )
        return batch_iterator(
            dataset,
            sampler,
            Microbatch,
            num_workers=options.num_workers,
            device=parallel.device,
            isolation=isolation,
            whole=pipeline.reads_data,
            vocab_size=tokenizer.vocab_size,
        )

    used = consumed_valid_samples(progress.iteration, interval, logging.eval_iters, size)
    progress.consumed_valid_samples = used
    return SampleFeed(
        schedule,
        pipeline.plans,
        train_batches=iterate(datasets.train, progress.consumed_train_samples, wrap=False),
        valid_batches=iterate(datasets.valid, used, wrap=True),
        test_batches=iterate(datasets.test, 0, wrap=True),
        has_valid=bool(present[1]) and logging.eval_iters > 0,
        has_test=bool(present[2]) and logging.eval_iters > 0,
        device=parallel.device,
        seq_length=config.model.seq_length or 0,
        uneven=isolation.attention or options.sft,
        flops=flops_of_document(config.model, config.padded_vocabulary),
    )


def _document_feed(
    config: Config, parallel: Any, pipeline: Any, tokenizer: Any, schedule: Any, length: Any, progress: Any
) -> Any:
    """Return the feed of the documents of every split, from where `progress` says. Collective."""
    from megatron.pretrain.data.document_splits import build_orders, build_stream
    from megatron.pretrain.data.rows import RowReader
    from megatron.pretrain.feed.documents import DocumentFeed
    from megatron.pretrain.log.flops import flops_of_document
    from megatron.pretrain.plan.documents import DocumentPlanner
    from megatron.pretrain.plan.plan_stream import PlanStream

    training, logging = config.training, config.logging
    options = DataOptions.from_flags(config.data, seq_length=config.model.seq_length or 0, seed=training.seed)
    orders = build_orders(options, tokenizer)
    size = training.global_batch_size
    begin = {"first_step": progress.iteration, "consumed": progress.consumed_train_samples}
    streams = {
        split: build_stream(order, options, tokenizer, size, **(begin if split == "train" else {}))
        for split, order in orders._asdict().items()
        if order is not None
    }

    planner = DocumentPlanner(config)

    return DocumentFeed(
        streams,
        lambda stream: RowReader(
            stream, parallel.device, threads=max(1, options.num_workers), whole=pipeline.reads_data
        ),
        lambda arrived: PlanStream(planner, parallel, arrived, complain, together=planner.together),
        ahead=config.parallel.plan_ahead,
        steps=length.iterations,
        dp_rank=parallel.dp_rank,
        scheduled_samples=schedule.final().samples if options.max_tokens is not None else None,
        flops=flops_of_document(config.model, config.padded_vocabulary),
        eval_iters=logging.eval_iters,
        evaluations=progress.iteration // logging.eval_interval if logging.eval_interval else 0,
    )
