"""Runs on the ranks of test_twenty_steps.py: optimizer steps beside those of plain megatron-core."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from helixpipe.common.errors import UserError
from helixpipe.model import Microbatch, PipelineModel, layers_of
from helixpipe.program.stages import model_pieces
from megatron.pretrain.arguments import parse_args
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.config import Config, core
from megatron.pretrain.extension import RunParts, TrainerExtension
from megatron.pretrain.feed.samples import SampleFeed
from megatron.pretrain.log.log import StepResult, build_timers
from megatron.pretrain.plan.pipeline import Pipeline
from megatron.pretrain.plan.programs import make_planner
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.process.signals import SignalFlag, StopCheck
from megatron.pretrain.step.lr_schedule import build_param_scheduler
from megatron.pretrain.step.microbatches import BatchSchedule, run_length
from megatron.pretrain.step.model import TrainingModel, build_model
from megatron.pretrain.step.update import UpdateResult
from megatron.pretrain.train import Trainer
from tests.model.common import set_parallel
from tests.runtime.host_reads import NoCopies, NoReads

Value = TypeVar("Value")

STEPS, SEQUENCE, VOCABULARY = 20, 16, 128

GPT = "--position-embedding-type learned_absolute"
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
)
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --lr 1e-2 "
    "--lr-decay-style constant --weight-decay 0.1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --make-vocab-size-divisible-by 64 --init-method-std 0.1 --eval-iters 0"
)

COUNTED = "--log-num-zeros-in-grad --log-params-norm"


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-z-loss-coeff 0.1 "
    "--moe-token-dispatcher-type alltoall"
)
"""Their z-loss is a mean over tokens, whatever microbatches these are in."""

MIXED = "--window-size 4,0 --window-attn-skip-freq 2 --no-rope-freq ([0]+[1]+[0]*2)"
"""Of four layers the first and the third attend to a window of 5 tokens, and the second has no RoPE."""


@dataclass(frozen=True)
class Run:
    """One training run on four ranks. flags: besides `COMMON` and the style's. batch: samples a step. steps: how many
    are run. clip: the norm to which gradients are clipped. ep: ranks that share out the experts."""

    style: str
    flags: str
    tp: int = 1
    pp: int = 1
    batch: int = 8
    cp: int = 1
    steps: int = STEPS
    clip: float = 0.7
    ep: int = 1

    def __str__(self) -> str:
        context = f" cp{self.cp}" * (self.cp > 1) + f" ep{self.ep}" * (self.ep > 1)
        steps = f" {self.steps} steps" * (self.steps != STEPS)
        return f"{self.style} tp{self.tp} pp{self.pp}{context} batch{self.batch} {self.flags}{steps}"

    def config(self, rank: int, world_size: int) -> Config:
        style = {"gpt": GPT, "llama": LLAMA, "mixed": f"{LLAMA} {MIXED}", "experts": f"{LLAMA} {EXPERTS}"}[self.style]
        sizes = f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
        sizes += f" --context-parallel-size {self.cp} --global-batch-size {self.batch} --train-iters {self.steps}"
        sizes += f" --clip-grad {self.clip}" + f" --expert-model-parallel-size {self.ep}" * (self.ep > 1)
        environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        return parse_args(f"{COMMON} {style} {sizes} {self.flags}".split(), environ=environment)


def batch(index: int) -> Microbatch:
    """The microbatch at a place of the global stream of samples."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCABULARY // 4, (1, SEQUENCE + 1), generator=generator)  # easy to learn something of
    mask = (torch.rand(1, SEQUENCE, generator=generator) > 0.2).float()
    return Microbatch(tokens[:, :-1], tokens[:, 1:], mask)


def of_runs(runs: Sequence[Run], each: Callable[[Run], Value]) -> list[Value]:
    """Return what `each` finds of every run, in their order; process groups are made once for each size."""
    results: dict[int, Value] = {}
    for sizes in sorted({(run.tp, run.pp, run.cp, run.ep) for run in runs}):
        set_parallel(*sizes)
        own = (index for index, run in enumerate(runs) if (run.tp, run.pp, run.cp, run.ep) == sizes)
        results.update((index, each(runs[index])) for index in own)
    return [results[index] for index in range(len(runs))]


def figures_of_runs(rank: int, world_size: int, runs: list[Run]) -> list[Figures]:
    """The figures of every run, on every rank."""
    return of_runs(runs, lambda run: figures_of(run.config(rank, world_size), run.steps))


@dataclass
class Figures:
    """Of a run: of each step the loss, the norm of all gradients and, where `COUNTED` asks for it, how many of their
    elements are zero; and the norm of all weights after the last step. Whatever the number of ranks that hold a weight,
    it counts once. skipped: of each step, whether gradients overflowed. confirmed: of every step whose norm was not
    waited for, whether its weights were right. Stands where the training log does."""

    parameters: int
    losses: list[float] = field(default_factory=list)
    gradients: list[float | None] = field(default_factory=list)
    zeros: list[float] = field(default_factory=list)
    weights: float = 0.0
    skipped: list[bool] = field(default_factory=list)
    confirmed: list[bool] = field(default_factory=list)

    def step(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
        self.losses.append(float(result.loss))
        self.gradients.append(result.grad_norm)
        self.zeros += [] if result.num_zeros is None else [float(result.num_zeros)]
        self.skipped.append(result.skipped)


class Expected(NamedTuple):
    """Of plain megatron-core: the number of weights, and of each step what `Figures` has; the norm of the weights after
    each."""

    parameters: int
    losses: list[float]
    gradients: list[float]
    zeros: list[float]
    weights: list[float]


def figures_of(config: Config, steps: int = STEPS) -> Figures:
    trainer = make_trainer(config)
    trainer.log = figures = Figures(trainer.state.weights.count()[1])  # type: ignore[assignment]
    finish = trainer._unconfirmed.finish

    def counted() -> UpdateResult:
        outcome = finish()
        figures.confirmed.append(outcome.confirmed)
        return outcome

    trainer._unconfirmed.finish = counted  # type: ignore[method-assign]
    for _ in range(steps):
        trainer._iteration(record=False)
    figures.weights = trainer.state.weights.norm()
    trainer.pipeline.close()
    return figures


def closed_early(rank: int, world_size: int, run: Run) -> list[str]:
    """Close a pipeline to which no model was attached, as where building one fails; return the threads of its transport
    that are left."""
    set_parallel(tp=run.tp, pp=run.pp)
    config = run.config(rank, world_size)
    before = set(threading.enumerate())
    pipeline = Pipeline(
        config, make_planner(config), Parallel.current(), BatchSchedule.from_config(config).step_sizes()
    )
    assert [each.name for each in threading.enumerate() if each not in before] == ["gloo-sends"]
    pipeline.close()
    return [each.name for each in threading.enumerate() if each not in before]


def words_of_failures(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    """Return what the user is told of each run, which fails within a few steps."""
    found = []
    for run in runs:
        set_parallel(tp=run.tp, pp=run.pp)
        with pytest.raises(UserError) as failure:
            figures_of(run.config(rank, world_size))
        found.append(str(failure.value))
    return found


def read_in_a_step(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    """For each run, what of a step's forward and backward, with all that the training loop does around the pipeline,
    would make the host wait for the device. What every step of a size needs is there after the first."""
    found = []
    for run in runs:
        set_parallel(tp=run.tp, pp=run.pp)
        trainer = make_trainer(run.config(rank, world_size))
        trainer.log = Figures(0)  # type: ignore[assignment]
        trainer._iteration(record=False)
        work = trainer.feed.train(trainer.progress)  # on the host that makes it
        with NoCopies(), NoReads():
            trainer._forward_backward(2, work, record=False, timed=False)
        trainer.pipeline.close()
        found.append(str(run))
    return found


def make_trainer(config: Config, *extensions: TrainerExtension) -> Trainer:
    """A trainer on `stream`, whose log is still to be given. extensions: follow the run."""
    parallel = Parallel.current()
    schedule = BatchSchedule.from_config(config)
    further = [each.programs for each in extensions]
    pipeline = Pipeline(config, make_planner(config), parallel, schedule.step_sizes(), further=further)

    def build() -> tuple[TrainingModel, Any]:
        made = build_model(config, parallel, pipeline.pieces, pipeline.copies, pipeline.stages)
        pipeline.attach(made.model, made.weights)
        return made, build_param_scheduler(made.optimizer, config, schedule)

    state, scheduler = build()
    for each in extensions:
        each.set_up(RunParts(parallel, pipeline, state, scheduler, {}))
    unused: Any = None
    with SignalFlag(active=False) as flag:
        stop = StopCheck(config, flag, agree=lambda reason: reason)
    return Trainer(
        config=config,
        parallel=parallel,
        pipeline=pipeline,
        state=state,
        scheduler=scheduler,
        length=run_length(config, schedule),
        feed=SampleFeed(schedule, pipeline.plans, stream(parallel) if pipeline.reads_data else None),
        checkpointer=unused,
        progress=TrainingProgress(),
        log=unused,
        timers=build_timers(config),
        stop=stop,
        extensions=extensions,
        build=build,
    )


def stream(parallel: Parallel) -> Iterator[Microbatch]:
    """Yield this data-parallel rank's microbatches: every dp_size-th of the global stream."""
    index = parallel.dp_rank
    while True:
        yield batch(index)
        index += parallel.dp_size


def reference(rank: int, world_size: int, runs: list[Run]) -> list[Expected]:
    """The same steps by megatron-core's GPTModel, DDP and optimizer alone, on one process."""
    set_parallel(tp=1, pp=1)
    return [expected_figures(run.config(rank, world_size), run.steps) for run in runs]


def plain_model(config: Config, transformer: TransformerConfig) -> GPTModel:
    """megatron-core's, with the weights that a run begins with."""
    options, norm = core.gpt_options(config), "RMSNorm" if config.model.swiglu else None
    spec: Any = get_gpt_layer_local_spec(normalization=norm)
    if transformer.num_moe_experts:
        spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization=norm)
    model = GPTModel(
        transformer,
        spec,
        options.vocab_size,
        options.max_sequence_length,
        share_embeddings_and_output_weights=options.share_embeddings_and_output_weights,
        position_embedding_type=options.position_embedding_type,
    ).to(transformer.params_dtype)
    ours = PipelineModel(transformer, options, model_pieces(layers_of(transformer)), seed=config.training.seed)
    model.load_state_dict({name: value for name, value in ours.state_dict().items() if value is not None})
    return model


def expected_figures(config: Config, steps: int) -> Expected:
    transformer = core.transformer_config(config)
    model = plain_model(config, transformer)
    ddp = DistributedDataParallel(transformer, core.ddp_config(config), model)
    optimizer = get_megatron_optimizer(core.optimizer_config(config), [ddp], use_gloo_process_groups=False)
    decay = config.training.weight_decay
    OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.training.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    positions = torch.arange(SEQUENCE)[None]
    attention_mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    found = Expected(sum(weight.numel() for weight in model.parameters()), [], [], [], [])
    index, size = 0, config.training.global_batch_size or 0
    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [batch(index + offset) for offset in range(size)]
        index += size
        sums = []
        for each in batches:
            token_losses = model(each.tokens, positions, attention_mask, labels=each.labels)
            total = torch.sum(token_losses.float() * each.loss_mask)
            divisor: Any = each.loss_mask.sum() * size
            if config.training.calculate_per_token_loss:
                divisor = sum(other.loss_mask.sum() for other in batches)
            (total / divisor).backward()
            sums.append(total.item())
        ddp.finish_grad_sync()
        _, norm, zeros = optimizer.step()
        found.losses.append(sum(sums) / float(sum(each.loss_mask.sum() for each in batches)))
        found.gradients.append(float(norm))
        found.zeros.append(float(zeros))
        found.weights.append(
            math.sqrt(sum(float(weight.detach().double().square().sum()) for weight in model.parameters()))
        )
    return found
