"""The command line: pinned flags, derived values, and one sentence for everything that is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser
from megatron.pretrain.arguments import (
    build_parser,
    parse_args,
)
from megatron.pretrain.config import LaunchConfig, compat
from megatron.pretrain.validation import check_device
from tests.training.helpers import BASE, config

GOLDEN = Path(__file__).with_name("flags.txt")

CONVENTIONS = """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention num-query-groups
seq-length max-position-embeddings position-embedding-type rotary-base rotary-percent normalization norm-epsilon
swiglu disable-bias-linear untie-embeddings-and-output-weights init-method-std attention-dropout hidden-dropout
attention-softmax-in-fp32 attention-backend transformer-impl use-mcore-models use-flash-attn
make-vocab-size-divisible-by tensor-model-parallel-size pipeline-model-parallel-size
num-layers-per-virtual-pipeline-stage context-parallel-size cp-comm-type sequence-parallel use-distributed-optimizer
overlap-grad-reduce overlap-param-gather distributed-backend distributed-timeout-minutes micro-batch-size
global-batch-size rampup-batch-size train-iters train-samples lr min-lr lr-decay-style lr-decay-iters lr-decay-samples
lr-warmup-fraction lr-warmup-iters lr-warmup-samples weight-decay clip-grad adam-beta1 adam-beta2 adam-eps bf16 fp16
seed recompute-granularity recompute-method recompute-num-layers recompute-activations deterministic-mode
calculate-per-token-loss exit-interval exit-duration-in-mins no-gradient-accumulation-fusion no-masked-softmax-fusion
data-path split train-data-path valid-data-path test-data-path mock-data data-cache-path tokenizer-type
tokenizer-model vocab-file merge-file vocab-size num-workers no-create-attention-mask-in-dataloader eod-mask-loss save
load save-interval ckpt-format use-checkpoint-args no-load-optim no-load-rng no-save-optim finetune
dist-ckpt-strictness log-interval eval-interval eval-iters tensorboard-dir wandb-project wandb-exp-name
timing-log-level log-throughput log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard
log-memory-to-tensorboard profile profile-step-start profile-step-end profile-ranks pipe-sp-splits pipe-sp-strategy
num-fold transfer-weight checkpoint-without-attn chunk-size pipeline-schedule
"""


def flag_lines(parser: FlagParser) -> list[str]:
    """`--flag[, --other] = default`, sorted, of every flag but --help and --help-all."""
    return sorted(
        f"{', '.join(action.option_strings)} = {action.default!r}"
        for action in parser._actions
        if action.dest not in ("help", "help_all")
    )


def test_the_flags_are_those_on_record() -> None:
    """A new flag, a lost one or a changed default shows here; after an intended change write flags.txt anew."""
    assert flag_lines(build_parser()) == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_help_begins_with_what_megatron_does_not_have() -> None:
    titles = [group.title for group in build_parser()._action_groups if group._group_actions]
    assert titles[1] == "pipeline schedule" and "model" in titles[7:] and len(set(titles)) == len(titles)
    text = build_parser().format_help()
    assert text.index("--pipeline-schedule NAME") < text.index("--infinipipe-split") < text.index("--hidden-size")


def test_every_flag_has_help() -> None:
    assert all(action.help for action in build_parser()._actions)


def test_every_flag_of_the_conventions_is_known() -> None:
    known = {*build_parser().option_strings(), *compat.IGNORED, *compat.REFUSED}
    assert [name for name in CONVENTIONS.split() if f"--{name}" not in known] == []


# ------------------------------------------------------------------------------------------------------ derived values


def test_sizes_that_follow_from_others() -> None:
    plain = config()
    assert (plain.model.ffn_hidden_size, plain.model.kv_channels) == (256, 16)
    assert plain.training.global_batch_size == 2
    assert config("--hidden-size 4096 --num-attention-heads 32 --swiglu").model.ffn_hidden_size == 10880
    assert config("--global-batch-size 16", world=4).parallel.data_parallel_size == 4
    assert config("--distributed-timeout-minutes 5").parallel.stall_timeout_seconds == 150
    assert config("--stall-timeout-seconds 0").parallel.stall_timeout_seconds == 0
    assert config("--position-embedding-type rope").model.max_position_embeddings == 32
    assert config("--use-rotary-position-embeddings").model.position_embedding_type == "rope"


def test_rope_needs_no_number_of_positions() -> None:
    words = BASE.replace("--max-position-embeddings 32 ", "") + " --train-iters 1 --position-embedding-type rope"
    assert parse_args(words.split(), environ={}).model.max_position_embeddings == 32


def test_the_schedule_follows_from_the_sizes(tmp_path: Path) -> None:
    assert config().parallel.pipeline_schedule == "none"
    assert config("--pipeline-model-parallel-size 2", world=2).parallel.pipeline_schedule == "1f1b"
    two_ranks = "--pipeline-model-parallel-size 2 --global-batch-size 8"
    interleaved = config(f"{two_ranks} --num-layers-per-virtual-pipeline-stage 1", world=2)
    assert interleaved.parallel.pipeline_schedule == "interleaved-1f1b"
    assert interleaved.parallel.virtual_pipeline_model_parallel_size == 2
    named = config(f"{two_ranks} --num-virtual-stages-per-pipeline-rank 2", world=2)
    assert named.parallel.virtual_pipeline_model_parallel_size == 2
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    own = config(f"--pipeline-model-parallel-size 2 --pipeline-schedule {file}", world=2)
    assert (own.parallel.pipeline_schedule, own.schedule_options) == (str(file), None)


def test_precision_decides_about_gradients() -> None:
    assert config("--bf16").training.accumulate_allreduce_grads_in_fp32
    assert not config("--bf16 --grad-reduce-in-bf16").training.accumulate_allreduce_grads_in_fp32
    assert not config("--fp16").training.check_for_nan_in_loss_and_grad
    assert config("--fp16 --loss-scale 1024").training.check_for_nan_in_loss_and_grad


def test_sequence_parallelism_is_off_with_one_tensor_rank() -> None:
    alone = config("--sequence-parallel")
    assert not alone.parallel.sequence_parallel and len(alone.warnings) == 1
    assert config("--sequence-parallel --tensor-model-parallel-size 2", world=2).parallel.sequence_parallel


def test_data_lists_may_be_kept_in_files(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 A\n0.7 B\n")
    base = BASE.replace("--mock-data ", "")
    listed = parse_args(f"{base} --train-iters 1 --data-args-path {tmp_path}/words".split(), environ={})
    assert listed.data.data_args_path == f"{tmp_path}/words"
    with pytest.raises(UserError, match=r"--data-args-path .*missing"):
        parse_args(f"{base} --train-iters 1 --data-args-path {tmp_path}/missing".split(), environ={})


def test_split_is_dropped_with_mock_data() -> None:
    assert config("--split 99,1,0").data.split is None


# ---------------------------------------------------------------------------------------------- one sentence for errors

WRONG = [
    ("--num-layers 0", 1, "--num-layers 0 must be at least 1."),
    ("--chunk-size -1", 1, "--chunk-size -1 must be at least 0."),
    ("--loss-chunk-size -1", 1, "--loss-chunk-size -1 must be at least 0."),
    (
        "--stall-timeout-seconds 700",
        1,
        "--stall-timeout-seconds 700 must be less than --distributed-timeout-minutes, which are 600 seconds.",
    ),
    ("--hidden-dropout 1", 1, "--hidden-dropout 1 must be at least 0 and less than 1."),
    ("--seq-length 64", 1, "--max-position-embeddings 32 must be at least --seq-length 64."),
    (
        "--num-attention-heads 5",
        1,
        "--hidden-size 64 must be a multiple of --num-attention-heads 5, such as 60 and 65, unless --kv-channels is "
        "given.",
    ),
    (
        "--tensor-model-parallel-size 3",
        3,
        "--num-attention-heads 4 must be a multiple of --tensor-model-parallel-size 3; the nearest valid values are "
        "3 and 6.",
    ),
    ("--num-query-groups 2", 1, "--num-query-groups 2 needs --group-query-attention."),
    (
        "--group-query-attention --num-query-groups 3",
        1,
        "--num-query-groups 3 must divide --num-attention-heads 4 and be a multiple of --tensor-model-parallel-size 1; "
        "valid values are 1, 2 or 4.",
    ),
    ("--swiglu --squared-relu", 1, "--swiglu and --squared-relu name two activations; give one."),
    (
        "--pipeline-model-parallel-size 2",
        3,
        "the world size 3 must be a multiple of --pipeline-model-parallel-size 2 x --tensor-model-parallel-size 1 = 2; "
        "the nearest valid sizes are 2 and 4.",
    ),
    (
        "--pipeline-model-parallel-size 2",
        1,
        "the world size 1 must be a multiple of --pipeline-model-parallel-size 2 x --tensor-model-parallel-size 1 = 2; "
        "the nearest valid sizes are 2.",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule none",
        2,
        "--pipeline-schedule none is for one pipeline rank, not --pipeline-model-parallel-size 2.",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        "--num-layers-per-virtual-pipeline-stage 3 must divide the layers of a pipeline rank (--num-layers 4 over 2 "
        "ranks).",
    ),
    ("--num-virtual-stages-per-pipeline-rank 2", 1, "2 virtual stages need --pipeline-model-parallel-size above 1."),
    (
        "--global-batch-size 7",
        1,
        "--global-batch-size 7 must be a multiple of --micro-batch-size 2 x data-parallel size 1 = 2; the nearest "
        "valid values are 6 and 8.",
    ),
    (
        "--rampup-batch-size 3 2 100 --global-batch-size 8",
        1,
        "--rampup-batch-size 3 2 100: the start plus a whole number of increments must give --global-batch-size 8.",
    ),
    ("--train-samples 100", 1, "give exactly one of --train-iters and --train-samples."),
    ("--lr-decay-samples 5", 1, "--lr-decay-samples does not go with --train-iters; use --lr-decay-iters."),
    ("--min-lr 1", 1, "--min-lr 1 must not be more than --lr 0.001."),
    ("--lr -1", 1, "--lr -1 must be at least 0."),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
        1,
        "--lr-warmup-fraction and --lr-warmup-iters both say the warm-up; give one.",
    ),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 must be less than the 10 iters over which the rate decays."),
    ("--lr-decay-style WSD", 1, "--lr-decay-style WSD needs --lr-wsd-decay-iters, from 1 to 10."),
    (
        "--weight-decay-incr-style linear",
        1,
        "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay.",
    ),
    ("--fp16 --bf16", 1, "--fp16 and --bf16 name two precisions; give one."),
    ("--loss-scale 8", 1, "--loss-scale 8 needs --fp16."),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
        1,
        "--optimizer-offload-fraction 1.5 must be at least 0 and at most 1.",
    ),
    ("--optimizer-cpu-offload --optimizer sgd", 1, "--optimizer-cpu-offload needs --optimizer adam."),
    ("--optimizer-cpu-offload", 1, "--optimizer-cpu-offload needs --bf16 or --fp16."),
    ("--optimizer-cpu-offload --bf16", 1, "--optimizer-cpu-offload needs --use-distributed-optimizer."),
    (
        "--optimizer-cpu-offload --bf16 --use-distributed-optimizer --enable-optimizer-post-validation",
        1,
        "--enable-optimizer-post-validation, which keeps state to go back to, cannot be combined with "
        "--optimizer-cpu-offload; give one.",
    ),
    (
        "--use-precision-aware-optimizer",
        1,
        "--use-precision-aware-optimizer needs --optimizer-cpu-offload: on the device the optimizer's state is kept in "
        "float32.",
    ),
    ("--use-checkpoint-args", 1, "--use-checkpoint-args needs --load."),
    (
        "--save x --save-interval 4 --save-retain-interval 6",
        1,
        "--save-retain-interval 6 must be a multiple of --save-interval 4.",
    ),
    (
        "--profile --profile-step-start 12",
        1,
        "--profile-step-start 12 must be less than --profile-step-end 12.",
    ),
    ("--seq-lenght 64", 1, "unknown flag --seq-lenght; did you mean --seq-length?"),
    (
        "--recompute-granularity selective --recompute-method block",
        1,
        "--recompute-method block needs --recompute-granularity full.",
    ),
    (
        "--expert-model-parallel-size=2",
        2,
        "--expert-model-parallel-size 2 shares out experts: give --num-experts, or 1.",
    ),
    (
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        2,
        "--expert-tensor-parallel-size 1 beside --tensor-model-parallel-size 2 needs --expert-model-parallel-size "
        "above 1: megatron-core reduces experts' gradients apart from the others only with expert parallelism.",
    ),
    *(
        (
            "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --pipeline-model-parallel-size 2 "
            f"--pipeline-schedule {schedule}",
            2,
            "--moe-router-load-balancing-type global_aux_loss counts all microbatches of a layer on one rank; "
            f"--pipeline-schedule {schedule} runs them on several: give aux_loss, or another schedule.",
        )
        for schedule in ("chimera", "weipipe", "wzb2")
    ),
    (
        "--pipeline-schedule seq1f1b --pipe-sp-splits x",
        1,
        "--pipe-sp-splits x must be a whole number, at least 1, or auto.",
    ),
]


@pytest.mark.parametrize(("flags", "world", "message"), WRONG, ids=[flags for flags, _, _ in WRONG])
def test_wrong_flags_give_one_sentence(flags: str, world: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        config(flags, world=world)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("flags", "world", "name"),
    [
        ("--pipe-sp-splits 4", 1, "none"),
        ("--pipe-sp-splits 4 --pipeline-model-parallel-size 2", 2, "seq1f1b"),
        ("--chunk-lengths 16,16 --pipeline-model-parallel-size 2", 2, "seq1f1b"),
        ("--pipeline-model-parallel-size 2", 2, "1f1b"),
        ("--pipe-sp-splits 2 --pipeline-schedule zbv --pipeline-model-parallel-size 2", 2, "zbv"),
    ],
)
def test_chunks_choose_the_schedule_that_is_made_for_them(flags: str, world: int, name: str) -> None:
    assert config(flags, world=world).parallel.schedule == name


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^unknown pipeline schedule '1f1': did you mean 1f1b"):
        config("--pipeline-schedule 1f1")


def test_options_of_another_schedule_are_warned_about() -> None:
    assert config("--helix-folds 2 --weipipe-slots 4").warnings == (
        "--helix-folds is an option of helix, not of none.",
        "--weipipe-slots is an option of weipipe-naive, weipipe, wzb1, wzb2, not of none.",
    )


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_args(["--mock-data", "--num-layers", "2"], environ={})
    assert str(caught.value) == (
        "--hidden-size, --num-attention-heads, --seq-length, --micro-batch-size and --lr must be given."
    )


def test_a_machine_without_gpus_is_not_asked_for_them() -> None:
    check_device(config("--bf16"), gpus=0)
    check_device(config("--fp16"), gpus=0)
    check_device(config("--fp16 --distributed-backend nccl"), gpus=1)
    with pytest.raises(UserError, match="--distributed-backend nccl needs a GPU"):
        check_device(config("--distributed-backend nccl"), gpus=0)


def test_more_processes_than_gpus_share_them_over_gloo_only() -> None:
    second = dataclasses.replace(config(""), launch=LaunchConfig(rank=1, world_size=2, local_rank=1))
    check_device(second, gpus=2)
    with pytest.raises(UserError, match="LOCAL_RANK 1 has no GPU of its own on a machine with 1"):
        check_device(second, gpus=1)
    check_device(second.replace("parallel", distributed_backend="gloo"), gpus=1)


def test_the_environment_must_hold_numbers() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE='two' is not a whole number"):
        LaunchConfig.from_environment({"WORLD_SIZE": "two"})


def test_a_checkpoints_own_folder_names_its_iteration() -> None:
    for given in ("dir/iter_0000004", "dir/iter_0000004/", "dir/iter_0000004 --ckpt-step 4"):
        checkpoint = config(f"--load {given}").checkpoint
        assert (checkpoint.load, checkpoint.ckpt_step) == ("dir", 4)
    assert config("--load dir/iter_4").checkpoint.load == "dir/iter_4"
    with pytest.raises(UserError, match="name two iterations"):
        config("--load dir/iter_0000004 --ckpt-step 5")
