"""Flags of the training run: batch, length, learning rate, optimizer, precision, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_SAMPLES, MOST_STEPS


@dataclass(frozen=True)
class TrainingConfig:
    """Flags of training. Validation fills in `global_batch_size` and the range of weight decay."""

    # batch and length
    micro_batch_size: int | None = option(None, "Sequences a rank processes at a time.", at_least=1)
    global_batch_size: int | None = option(
        None,
        "Sequences in one optimizer step; by default micro-batch-size x data-parallel size.",
        at_least=1,
        at_most=MOST_SAMPLES,
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "Grow the batch: START INCREMENT SAMPLES, from START by INCREMENT over SAMPLES samples.",
        nargs=3,
        at_least=1,
    )
    step_batch_size_schedule: str | None = option(
        None,
        "Grow the batch in steps: '0:768 250B:1536' is 768 samples a step from 0 tokens on and 1536 from 250 billion "
        "on; in place of --global-batch-size.",
        metavar="TOKENS:SAMPLES ...",
    )
    decrease_batch_size_if_needed: bool = option(
        False, "Shrink the batch to a multiple of micro-batch-size x data-parallel size instead of refusing."
    )
    train_iters: int | None = option(
        None, "Iterations of the whole training; give this or --train-samples.", at_least=1, at_most=MOST_STEPS
    )
    train_samples: int | None = option(
        None, "Samples of the whole training; give this or --train-iters.", at_least=1, at_most=MOST_SAMPLES
    )
    skip_train: bool = option(False, "Only evaluate on the validation and test data, then exit.")
    extension: tuple[str, ...] | None = option(
        None,
        "Classes that follow the run: called before and after steps, with its loss and gradients (docs/extensions.md).",
        nargs="+",
        metavar="MODULE:CLASS",
    )
    # learning rate and weight decay
    lr: float | None = option(None, "Peak learning rate.", at_least=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", at_least=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "linear", "Shape of the learning-rate decay (WSD: warm-up, stable, decay)."
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", "Shape of the last phase of WSD."
    )
    lr_decay_iters: int | None = option(
        None, "Iterations until --min-lr is reached; by default train-iters.", at_least=1
    )
    lr_decay_samples: int | None = option(
        None, "Samples until --min-lr is reached; by default train-samples.", at_least=1
    )
    lr_wsd_decay_iters: int | None = option(None, "Iterations of the last phase of WSD.", at_least=1)
    lr_wsd_decay_samples: int | None = option(None, "Samples of the last phase of WSD.", at_least=1)
    lr_warmup_fraction: float | None = option(
        None, "Warm-up as a fraction of the decay's length.", at_least=0, less_than=1
    )
    lr_warmup_iters: int = option(0, "Iterations of linear warm-up.", at_least=0)
    lr_warmup_samples: int = option(0, "Samples of linear warm-up.", at_least=0)
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.", at_least=0)
    decoupled_lr: float | None = option(None, "Peak learning rate of the embedding and the output layer.", at_least=0)
    decoupled_min_lr: float | None = option(
        None, "Final learning rate of the embedding and the output layer.", at_least=0
    )
    override_opt_param_scheduler: bool = option(
        False,
        "Take the learning-rate schedule from these flags, not from the checkpoint.",
        flags=["--override-opt-param-scheduler", "--override-opt_param-scheduler"],
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "Take the learning-rate schedule from the checkpoint, not from these flags.",
        flags=["--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"],
    )
    weight_decay: float = option(0.01, "Weight decay.", at_least=0)
    start_weight_decay: float | None = option(
        None, "First value when the weight decay changes over training.", at_least=0
    )
    end_weight_decay: float | None = option(None, "Last value when the weight decay changes over training.", at_least=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "How the weight decay goes from its first to its last value."
    )
    apply_wd_to_qk_layernorm: bool = option(False, "Let weight decay act on the norms of queries and keys too.")
    # optimizer
    optimizer: Literal["adam", "sgd"] = option("adam", "Optimizer (adam is AdamW).")
    adam_beta1: float = option(0.9, "Adam: decay of the first moment.", at_least=0, less_than=1)
    adam_beta2: float = option(0.999, "Adam: decay of the second moment.", at_least=0, less_than=1)
    adam_eps: float = option(1e-8, "Adam: term added to the denominator.", at_least=0)
    sgd_momentum: float = option(0.9, "SGD: momentum.", at_least=0, less_than=1)
    clip_grad: float = option(1.0, "Clip the global gradient norm to this; 0 turns clipping off.", at_least=0)
    enable_optimizer_post_validation: bool = option(
        False,
        "Start the next step before the norm of the gradients is known, and go back where it had to be clipped: the "
        "same results, without the wait for all ranks between steps (zb2p, zbv, wzb2).",
    )
    optimizer_cpu_offload: bool = option(
        False,
        "Keep Adam's state, float32 weights among it, in host memory, and update there; needs "
        "--use-distributed-optimizer and --bf16 or --fp16.",
    )
    optimizer_offload_fraction: float = option(
        1.0,
        "--optimizer-cpu-offload: share of the weights, from 0 to 1, whose state is on the host.",
        at_least=0,
        at_most=1,
    )
    use_precision_aware_optimizer: bool = option(
        False, "What Megatron-LM wants beside --optimizer-cpu-offload, which implies it here; not offered without."
    )
    use_torch_optimizer_for_cpu_offload: bool = option(
        False, "--optimizer-cpu-offload: torch's Adam for what stays on the device too."
    )
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        False, "--optimizer-cpu-offload: update one weight while gradients of others come and others go back."
    )
    pin_cpu_grads: bool = option(
        True, "--optimizer-cpu-offload: gradients in pageable host memory.", flags=["--no-pin-cpu-grads"]
    )
    pin_cpu_params: bool = option(
        True, "--optimizer-cpu-offload: weights in pageable host memory.", flags=["--no-pin-cpu-params"]
    )
    # precision
    bf16: bool = option(False, "Compute in bfloat16, with float32 main weights.")
    fp16: bool = option(False, "Compute in float16 with loss scaling, with float32 main weights.")
    loss_scale: float | None = option(None, "fp16: fixed loss scale; by default the scale adapts.", more_than=0)
    initial_loss_scale: float = option(2.0**32, "fp16: first value of the adaptive loss scale.", more_than=0)
    min_loss_scale: float = option(1.0, "fp16: least value of the adaptive loss scale.", more_than=0)
    loss_scale_window: float = option(1000.0, "fp16: iterations without overflow before the scale grows.", at_least=1)
    hysteresis: int = option(2, "fp16: overflows before the scale shrinks.", at_least=1)
    accumulate_allreduce_grads_in_fp32: bool = option(
        False, "Accumulate and reduce gradients in float32; always so with --bf16 unless --grad-reduce-in-bf16."
    )
    grad_reduce_in_bf16: bool = option(False, "Accumulate and reduce gradients in bfloat16.")
    check_for_nan_in_loss_and_grad: bool = option(
        True, "Do not stop at a NaN in the loss or a gradient.", flags=["--no-check-for-nan-in-loss-and-grad"]
    )
    calculate_per_token_loss: bool | None = option(
        None,
        "Divide the loss by the unmasked tokens of the whole batch instead of each microbatch; by default only with "
        "--variable-seq-lengths, which does so always.",
    )
    # randomness
    seed: int = option(1234, "Seed of weights, data order and dropout.", at_least=0, at_most=2**32 - 1)
    deterministic_mode: bool = option(False, "Use deterministic kernels only.")
    # stopping
    exit_interval: int | None = option(None, "Save and exit after an iteration divisible by this.", at_least=1)
    exit_duration_in_mins: float | None = option(None, "Save and exit after this many minutes.", at_least=0)
    exit_signal_handler: bool = option(
        True,
        "Save and exit on SIGTERM, SIGUSR1, SIGINT and SIGHUP, as is always done; --no-exit-signal-handler lets them "
        "kill the process.",
    )
