"""Batches, learning rate, FLOPs, megatron-core's configurations and the decision to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnBackend

from helixpipe.common.errors import UserError
from helixpipe.model import Microbatch
from helixpipe.model.backends import Machine
from helixpipe.model.documents import Documents
from helixpipe.model.real_tokens import RealTokens
from megatron.pretrain import pretrain
from megatron.pretrain.arguments import parse_args
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.config import Config, core
from megatron.pretrain.config.core import transformer_config
from megatron.pretrain.data.datasets import Datasets
from megatron.pretrain.data.tokenizer import build_tokenizer
from megatron.pretrain.feed.samples import SampleFeed
from megatron.pretrain.log.flops import flops_of_document, flops_per_sample
from megatron.pretrain.plan.programs import make_program
from megatron.pretrain.process.signals import SignalFlag, StopCheck, StopReason, all_ranks_max
from megatron.pretrain.step.lr_schedule import build_param_scheduler, schedule_lengths
from megatron.pretrain.step.microbatches import BatchSchedule, StepBatch, run_length
from tests.distributed import run_ranks
from tests.training.helpers import BASE, config
from tests.training.steps import Run, closed_early


def batches(chosen: Config) -> BatchSchedule:
    return BatchSchedule.from_config(chosen)


# -------------------------------------------------------------------------------------------------------------- batches


def test_constant_batches() -> None:
    chosen = config("--global-batch-size 16", world=2)
    schedule = batches(chosen)
    assert schedule.at(0) == schedule.at(10**9) == StepBatch(num_microbatches=4, samples=16)
    assert schedule.step_sizes() == [4] and schedule.final() == schedule.at(0)
    assert run_length(chosen, schedule) == (10, 160)
    by_samples = config("--global-batch-size 16", world=2, length="--train-samples 100")
    assert run_length(by_samples, batches(by_samples)) == (6, 96)


def test_rampup_counts_every_step() -> None:
    chosen = config("--global-batch-size 8 --rampup-batch-size 2 2 30")
    schedule = batches(chosen)
    sizes, samples = [], 0
    for _ in range(12):
        sizes.append(schedule.at(samples).samples)
        samples += sizes[-1]
    assert sizes == sorted(sizes) and sizes[0] == 2 and sizes[-1] == 8
    assert schedule.step_sizes() == [1, 2, 3, 4] and schedule.final().samples == 8
    for count in range(13):
        assert schedule.samples_after(count) == sum(sizes[:count])
        assert schedule.iterations_within(sum(sizes[:count])) == count
        assert schedule.iterations_within(sum(sizes[:count]) + 1) == count


PLAIN = config()


@settings(max_examples=50)
@given(increment=st.integers(1, 3), steps=st.integers(1, 4), ramp=st.integers(1, 60), samples=st.integers(0, 300))
def test_iterations_and_samples_are_inverse(increment: int, steps: int, ramp: int, samples: int) -> None:
    size = 2 + 2 * increment * steps
    schedule = batches(PLAIN.replace("training", global_batch_size=size, rampup_batch_size=(2, 2 * increment, ramp)))
    count = schedule.iterations_within(samples)
    assert schedule.samples_after(count) <= samples < schedule.samples_after(count + 1)


@settings(max_examples=50)
@given(
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    ramp=st.integers(0, 40),
    done=st.integers(0, 12),
    samples=st.integers(10, 90),
)
def test_the_rest_of_a_run_whose_batch_was_another(before: int, after: int, ramp: int, done: int, samples: int) -> None:
    """It trains for as many steps as fit into --train-samples, and --train-iters counts all steps."""
    first, second = (
        batches(PLAIN.replace("training", global_batch_size=2 + 2 * steps, rampup_batch_size=(2, 2, ramp)))
        for steps in (before, after)
    )
    consumed = first.samples_after(done)
    length = run_length(PLAIN.replace("training", train_iters=None, train_samples=samples), second, done, consumed)
    taken, steps = consumed, done
    while taken + second.at(taken).samples <= samples:
        taken += second.at(taken).samples
        steps += 1
    assert length == (steps, taken)
    if samples >= consumed:  # again with as many, and the same batch
        again = run_length(PLAIN.replace("training", train_iters=steps), second, done, consumed)
        assert again == length
    undisturbed = PLAIN.replace("training", train_iters=None, train_samples=samples)
    if consumed <= samples:
        assert run_length(undisturbed, first, done, consumed) == run_length(undisturbed, first)


def test_too_few_samples_for_one_step() -> None:
    chosen = config("--global-batch-size 16", length="--train-samples 15")
    with pytest.raises(UserError, match="--train-samples 15 is less than the first step's 16 samples"):
        run_length(chosen, batches(chosen))


def test_batches_may_shrink_to_fit() -> None:
    schedule = batches(config("--global-batch-size 7 --decrease-batch-size-if-needed"))
    assert schedule.at(0) == StepBatch(num_microbatches=3, samples=6)


def test_a_resumed_run_validates_on_the_samples_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps have fewer than --global-batch-size, too; all samples that a run reads are there."""
    chosen = config("--global-batch-size 5 --decrease-batch-size-if-needed --eval-interval 2 --eval-iters 3")
    schedule, asked = batches(chosen), []

    def split(options: Any, tokenizer: Any, samples: Any, earlier: Any, needed_here: bool) -> Any:
        asked.append((*earlier, samples))
        return Datasets(*(range(count) for count in samples))

    monkeypatch.setattr(pretrain, "build_datasets", split)
    monkeypatch.setattr(pretrain, "batch_iterator", lambda dataset, sampler, *_, **__: iter(sampler))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    one_rank, tokenizer = SimpleNamespace(dp_rank=0, dp_size=1, device=None), SimpleNamespace(vocab_size=100)
    pipeline = SimpleNamespace(reads_data=True, places_tokens=False, plans=MagicMock())

    def validation(done: int, evaluations: int, index: Any = ()) -> list[Any]:
        length = run_length(chosen, schedule)
        progress = TrainingProgress(done, schedule.samples_after(done), index_samples=index)
        feed = pretrain._sample_feed(chosen, one_rank, pipeline, tokenizer, schedule, length, progress)
        assert progress.index_samples == asked[-1]
        return [feed.evaluation("valid").microbatches for _ in range(3 * evaluations)]

    assert (
        validation(2, 1) == validation(0, 2)[3:] == [[[12, 13], [14, 15]], [[16, 17], [18, 19]], [[20, 21], [22, 23]]]
    )
    assert asked == [((40, 6 * 3 * 4, 3 * 4),)] * 2
    before = (20, 3 * 3 * 4, 3 * 4)
    validation(2, 1, (before,))
    assert asked[2] == (before, (40, 6 * 3 * 4, 3 * 4))  # what the earlier run asked for decides the order


# -------------------------------------------------------------------------------------------------------- learning rate


class Optimizer:
    def __init__(self) -> None:
        self.param_groups = [{"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.0, "weight_decay": 0.0, "default_config": True}]


def rates(flags: str, length: str = "--train-iters 10") -> tuple[list[float], list[float]]:
    """Learning rate and weight decay before each of ten steps, and after the last."""
    chosen = config(flags, length=length)
    optimizer, schedule = Optimizer(), batches(chosen)
    scheduler = build_param_scheduler(optimizer, chosen, schedule)
    seen, samples = [], 0
    for _ in range(11):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        scheduler.step(increment=schedule.at(samples).samples)
        samples += schedule.at(samples).samples
    return [lr for lr, _ in seen], [wd for _, wd in seen]


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        ("--lr-warmup-iters 2", "--train-iters 10"),
        ("--lr-warmup-fraction 0.2", "--train-iters 10"),
        ("--lr-warmup-samples 8", "--train-samples 40"),
        ("--lr-warmup-fraction 0.2 --lr-decay-samples 40", "--train-samples 40"),
        ("--lr-warmup-iters 2 --lr-decay-iters 10", "--train-iters 500"),
    ],
)
def test_linear_warmup_and_decay(flags: str, length: str) -> None:
    lr, _ = rates(f"{flags} --global-batch-size 4 --lr 1.0 --min-lr 0.2 --lr-decay-style linear", length)
    expected = [0.0, 0.5, 1.0] + [1.0 - 0.1 * step for step in range(1, 9)]
    assert lr == pytest.approx(expected)


def test_other_shapes() -> None:
    base = "--global-batch-size 4 --lr 1.0 --min-lr 0.0"
    assert rates(f"{base} --lr-decay-style constant")[0] == [1.0] * 11
    cosine, _ = rates(f"{base} --lr-decay-style cosine")
    assert cosine[0] == 1.0 and cosine[5] == pytest.approx(0.5) and cosine[10] == pytest.approx(0.0)
    wsd, _ = rates(f"{base} --lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear")
    assert wsd == pytest.approx([1.0] * 7 + [0.75, 0.5, 0.25, 0.0])


def test_evaluation_alone_needs_no_learning_rate() -> None:
    words = BASE.replace("--lr 1e-3 ", "") + " --skip-train"
    chosen = parse_args(words.split(), environ={})
    assert run_length(chosen, batches(chosen)) == (0, 0)
    assert build_param_scheduler(Optimizer(), chosen, batches(chosen)).get_lr({}) == 0.0
    assert core.optimizer_config(chosen).lr == 0.0


def test_weight_decay_may_grow() -> None:
    """To the end of training, whenever the learning rate has reached its own."""
    for until in ("", "--lr-decay-iters 5"):
        _, decay = rates(f"--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 1.0 {until}")
        assert decay == pytest.approx([0.1 * step for step in range(11)])
    assert set(rates("--weight-decay 0.3")[1]) == {0.3}


def test_rampup_ends_the_decay_with_the_last_iteration() -> None:
    flags = "--global-batch-size 8 --rampup-batch-size 2 2 20 --lr 1.0 --min-lr 0.25 --lr-decay-style linear"
    lr, _ = rates(flags)
    assert lr[10] == pytest.approx(0.25) and lr[9] > 0.25
    chosen = config(flags)
    assert schedule_lengths(chosen, batches(chosen)).decay == batches(chosen).samples_after(10)


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def test_flops_of_a_gpt_by_hand() -> None:
    """h 64, ffn 256, s 32, V 128, L 4; a token forward: QKV 24576, scores and values 4096, output 8192, MLP 65536."""
    layer = 2 * 64 * 192 + 2 * (2 * 64 * 32) // 2 + 2 * 64 * 64 + 2 * 2 * 64 * 256
    assert layer == 24576 + 4096 + 8192 + 65536
    assert flops_per_sample(config().model, 128) == 3 * 32 * (4 * layer + 2 * 64 * 128)


def test_flops_of_a_llama_by_hand() -> None:
    """Two key/value heads of 16 channels, three matrices in the MLP of width 128."""
    model = config("--group-query-attention --num-query-groups 2 --swiglu").model
    layer = 2 * 64 * (64 + 2 * 32) + 2 * (2 * 64 * 32) // 2 + 2 * 64 * 64 + 3 * 2 * 64 * 128
    assert model.ffn_hidden_size == 128
    assert flops_per_sample(model, 256) == 3 * 32 * (4 * layer + 2 * 64 * 256)


def test_flops_of_a_window_are_those_inside_it() -> None:
    """In three of four layers: of 32 tokens the first 8 see all before them, half of 8 on average, the others 8."""
    model = config("--window-size 7,0 --window-attn-skip-freq 4").model
    pairs = 3 * (8 * 8 // 2 + 24 * 8) + 32 * 32 // 2
    layers = 4 * 32 * (24576 + 8192 + 65536) + pairs * 2 * 2 * 64
    assert flops_per_sample(model, 128) == 3 * (layers + 32 * 2 * 64 * 128)


def test_flops_agree_with_the_published_formula() -> None:
    """72 b s L h^2 (1 + s/6h + V/12Lh) without the causal half (Korthikanti et al.); with it s/12h."""
    model = config(
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --position-embedding-type rope "
        "--max-position-embeddings 2048"
    ).model
    h, s, layers, vocabulary = 12288, 2048, 96, 51200
    published = 72 * s * layers * h**2 * (1 + s / (12 * h) + vocabulary / (12 * layers * h))
    assert flops_per_sample(model, vocabulary) == pytest.approx(published)


MODEL = config().model


@given(
    cuts=st.lists(st.sets(st.integers(1, 31)), min_size=4, max_size=4),
    size=st.sampled_from((1, 2, 4)),
    padded=st.booleans(),
    apart=st.booleans(),
)
def test_flops_of_a_step_are_those_of_its_documents(cuts: list[set[int]], size: int, padded: bool, apart: bool) -> None:
    """Micro-batch size changes nothing: documents of one sample do not attend to each other, and padding is no work.

    Args:
        cuts: Tokens at which a further document begins, by sample.
        size: Samples of a microbatch.
        padded: Whether each sample is its first document, and the rest is padding.
        apart: Whether attention keeps the two apart.
    """
    samples = [[end - begin for begin, end in pairwise((0, *sorted(each), 32))] for each in cuts]
    flops, empty = flops_of_document(MODEL, 128), torch.empty(0)
    masks = torch.stack([torch.arange(32) < each[0] for each in samples])
    batches = [
        Microbatch(
            empty,
            empty,
            empty,
            documents=Documents(samples[at : at + size]) if apart or not padded else None,
            real=RealTokens(masks[at : at + size]) if padded else None,
        )
        for at in range(0, 4, size)
    ]
    plans: Any = SimpleNamespace(plan=lambda count: SimpleNamespace(lowered=None))
    schedule: Any = SimpleNamespace(at=lambda consumed: SimpleNamespace(num_microbatches=len(batches), samples=4))
    feed = SampleFeed(schedule, plans, iter(batches), seq_length=32, flops=flops, uneven=True)
    work = feed.train(TrainingProgress())
    assert (work.tokens, work.flops) == (0, 0.0) and work.counted_here is not None
    real = [each[0] for each in samples] if padded else list(chain(*samples))
    by_hand = sum(flops_per_sample(replace(MODEL, seq_length=each), 128) for each in real)
    assert work.counted_here.sum(dim=0).tolist() == pytest.approx([sum(real), by_hand], rel=1e-12)


def test_padding_of_conversations_is_no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step of the same conversations has as many tokens and FLOPs whatever they are padded to."""
    (tmp_path / "talks.jsonl").write_text("".join(f'{{"prompt": "{"a" * n}", "completion": "b"}}\n' for n in (1, 4, 9)))
    tokenizer = build_tokenizer(tokenizer_type="ByteLevelTokenizer")
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    one_rank = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"), is_first=False)
    pipeline = SimpleNamespace(reads_data=True, places_tokens=False, routes_tokens=False, plans=MagicMock())
    found = []
    for flags in ("--seq-length 16", "--seq-length 32", "--seq-length 32 --reset-attention-mask"):
        flags = f"--global-batch-size 6 {flags} --sft --data-path {tmp_path}/talks.jsonl --split 100,0,0"
        data = "--tokenizer-type ByteLevelTokenizer --eval-iters 0 --num-workers 0 --train-iters 1"
        chosen = parse_args(f"{BASE.partition('--mock-data')[0]} {data} {flags}".split(), environ={})
        schedule = batches(chosen)
        progress, length = TrainingProgress(), run_length(chosen, schedule)
        feed = pretrain._sample_feed(chosen, one_rank, pipeline, tokenizer, schedule, length, progress)
        work = feed.train(progress)
        assert (work.tokens, work.flops) == (0, 0.0) and work.counted_here is not None
        found.append(work.counted_here.sum(dim=0).tolist())
    assert found[0][0] == 2 * (2 + 5 + 10) and found[1:] == found[:1] * 2


# ----------------------------------------------------------------------------------------- megatron-core configurations


def test_megatron_core_configurations() -> None:
    chosen = config(
        "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2 --bf16 "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 500000 "
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --attention-backend flash "
        "--adam-beta2 0.95 --clip-grad 0.5 --hidden-dropout 0",
        world=2,
    )
    transformer = core.transformer_config(chosen)
    assert transformer.gated_linear_unit and transformer.activation_func is torch.nn.functional.silu
    assert (transformer.num_query_groups, transformer.kv_channels, transformer.ffn_hidden_size) == (2, 16, 128)
    assert not transformer.add_bias_linear and transformer.normalization == "RMSNorm"
    assert transformer.params_dtype is transformer.pipeline_dtype is torch.bfloat16
    assert transformer.sequence_parallel and transformer.attention_backend is AttnBackend.flash
    assert (transformer.hidden_dropout, transformer.attention_dropout) == (0.0, 0.1)
    optimizer = core.optimizer_config(chosen)
    assert (optimizer.adam_beta2, optimizer.clip_grad, optimizer.lr) == (0.95, 0.5, 1e-3)
    assert optimizer.bf16 and optimizer.use_distributed_optimizer
    ddp = core.ddp_config(chosen)
    assert ddp.grad_reduce_in_fp32 and ddp.use_distributed_optimizer and not ddp.overlap_grad_reduce
    gpt = core.gpt_options(chosen)
    assert (gpt.vocab_size, gpt.rotary_base, gpt.max_sequence_length) == (256, 500000, 32)
    assert gpt.position_embedding_type == "rope" and not gpt.share_embeddings_and_output_weights
    assert (gpt.chunk_size, core.gpt_options(config("--chunk-size 7")).chunk_size) == (0, 7)


def test_fusions_are_for_gpus_that_have_the_kernels() -> None:
    def fusions(flags: str, machine: Machine) -> tuple[bool, bool, bool, bool]:
        made = transformer_config(config(flags), machine)
        rope = made.apply_rope_fusion
        return made.bias_activation_fusion, made.bias_dropout_fusion, made.gradient_accumulation_fusion, rope

    libraries = {"fused_weight_gradient_mlp_cuda": "0.1", "transformer-engine": "2.9.0"}
    rope = "--position-embedding-type rope "
    none = "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-rope-fusion"
    assert fusions(rope, Machine()) == (False, False, False, False)
    assert fusions(rope, Machine("cuda", (9, 0))) == (True, True, False, False)
    assert fusions(rope, Machine("cuda", (9, 0), libraries)) == (True, True, True, True)
    assert fusions("", Machine("cuda", (9, 0), libraries)) == (True, True, True, False)
    assert fusions(rope + none, Machine("cuda", (9, 0), libraries)) == (False, False, False, False)
    implementation = transformer_config(config("--transformer-impl transformer_engine"), Machine()).transformer_impl
    assert implementation == "transformer_engine"


def test_the_vocabulary_comes_from_a_flag_or_the_tokenizer() -> None:
    assert core.gpt_options(config()).vocab_size == 128
    assert core.gpt_options(config("--tokenizer-type ByteLevelTokenizer --vocab-size 300")).vocab_size == 384
    assert core.gpt_options(config("--padded-vocab-size 104")).vocab_size == 104
    assert core.gpt_options(config("--make-vocab-size-divisible-by 8")).vocab_size == 104


# ------------------------------------------------------------------------------------------------------------- stopping


def test_a_signal_is_noted_once_and_the_handler_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalFlag() as flag:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    with SignalFlag(active=False):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def in_the_foreground() -> Iterator[None]:
    """As a program is that a shell has not told to ignore these signals."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_IGN),  # as the launcher of ranks has it
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_ctrl_c_a_closed_terminal_and_slurm_are_noted_too(number: signal.Signals) -> None:
    with SignalFlag() as flag:
        os.kill(os.getpid(), number)
        assert flag.received is number
        stop = StopCheck(config(), flag, agree=all_ranks_max("cpu"))
        assert stop.message(StopReason(stop.after(1) or 0), 1) == f"exiting program after receiving {number.name}."


@pytest.mark.usefixtures("in_the_foreground")
def test_a_second_ctrl_c_ends_the_program() -> None:
    with SignalFlag() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert flag.received is signal.SIGINT


def test_an_ignored_signal_stays_ignored() -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalFlag() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert flag.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_why_a_run_stops() -> None:
    now = [0.0]
    flag = SignalFlag()
    chosen = config("--exit-interval 4 --exit-duration-in-mins 2")
    stop = StopCheck(chosen, flag, agree=all_ranks_max("cpu"), clock=lambda: now[0])
    assert stop.after(1) is None
    assert stop.after(4) is StopReason.INTERVAL
    now[0] = 150.0
    assert stop.after(5) is StopReason.DURATION
    flag.received = signal.SIGTERM
    assert stop.after(8) is StopReason.SIGTERM
    assert stop.message(StopReason.SIGTERM, 8) == "exiting program after receiving SIGTERM."
    assert stop.message(StopReason.DURATION, 8) == "exiting program after 2.5 minutes"
    assert stop.message(StopReason.INTERVAL, 8) == "exiting program at iteration 8"


def test_ranks_agree_on_the_strongest_reason() -> None:
    """One rank got the signal: the others stop too, for the same reason."""
    heard: list[int] = []

    def agree(number: int) -> int:
        heard.append(number)
        return max(number, StopReason.SIGINT)

    stop = StopCheck(config(), SignalFlag(), agree=agree)
    assert stop.after(3) is StopReason.SIGINT
    assert heard == [0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--lr inf", "'inf' is not a finite number"),
        ("--clip-grad nan", "'nan' is not a finite number"),
        ("--ddp-average-in-collective --calculate-per-token-loss", "cannot be combined"),
    ],
)
def test_refused_at_once(flags: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(flags)


def test_one_virtual_stage_means_one() -> None:
    asked = "--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule interleaved-1f1b"
    one = config(f"{asked} --num-virtual-stages-per-pipeline-rank 1", world=2)
    assert one.parallel.virtual_pipeline_model_parallel_size == 1
    assert len(make_program(one, 4).stages) == 2


def test_a_program_without_backward_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forward.csv"
    path.write_text("0F0,0F1\n1F0,1F1\n")
    with pytest.raises(UserError, match="has no backward"):
        config(f"--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule {path}", world=2)


def test_a_pipeline_without_a_model_is_closed() -> None:
    assert run_ranks(closed_early, 2, Run("gpt", "--pipeline-schedule 1f1b", pp=2)) == [[], []]
