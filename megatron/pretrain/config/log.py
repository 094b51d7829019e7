"""Flags for evaluation, logs, metrics and profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option
from megatron.pretrain.config.parallel import PIPELINE


@dataclass(frozen=True)
class LoggingConfig:
    """Flags of what is measured and where it is written."""

    log_interval: int = option(
        100, "Iterations between log lines; the first and the last iteration of a run always have one.", at_least=1
    )
    eval_interval: int | None = option(1000, "Iterations between evaluations on the validation data.", at_least=0)
    eval_iters: int = option(100, "Iterations of one evaluation; 0 turns evaluation off.", at_least=0)
    moe_per_layer_logging: bool = option(
        False, "Log the tokens of each expert and the ratio of the most to the mean, layer by layer."
    )
    log_throughput: bool = option(False, "Log the throughput in TFLOP/s for each GPU.")
    log_arguments: bool = option(
        False, "Print all values, as Megatron-LM does; without, they are in arguments.txt in --save and in TensorBoard."
    )
    log_params_norm: bool = option(False, "Log the norm of the weights.")
    log_num_zeros_in_grad: bool = option(False, "Log the number of zeros in the gradient.")
    timing_log_level: Literal[0, 1, 2] = option(
        0, "0: time iterations only; 1: also what happens once an iteration; 2: also what happens many times."
    )
    timing_log_option: Literal["max", "minmax", "all"] = option("minmax", "Which ranks' times are logged.")
    barrier_with_L1_time: bool = option(
        True, "No barrier before timings of level 1.", flags=["--no-barrier-with-level-1-timing"]
    )
    logging_level: int | None = option(None, "Level of Python's logging, such as 20 for information.")
    tensorboard_dir: str | None = option(None, "Folder for TensorBoard logs.", metavar="DIR")
    tensorboard_log_interval: int = option(1, "Iterations between TensorBoard values.", at_least=1)
    tensorboard_queue_size: int = option(1000, "Values TensorBoard's writer holds back before it writes.", at_least=1)
    log_timers_to_tensorboard: bool = option(False, "Write timings to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = option(
        True, "Do not write the loss scale to TensorBoard.", flags=["--no-log-loss-scale-to-tensorboard"]
    )
    log_validation_ppl_to_tensorboard: bool = option(False, "Write the validation perplexity to TensorBoard.")
    log_memory_to_tensorboard: bool = option(False, "Write memory use to TensorBoard.")
    log_world_size_to_tensorboard: bool = option(False, "Write the number of ranks to TensorBoard.")
    wandb_project: str = option("", "Weights & Biases project; the wandb package must be installed.")
    wandb_entity: str = option("", "Weights & Biases team or user.")
    wandb_exp_name: str = option("", "Name of the Weights & Biases run.")
    wandb_save_dir: str = option("", "Folder for Weights & Biases' own files.", metavar="DIR")
    record_timeline: str | None = option(
        None,
        "Write a measured timeline of the last iteration (every op of every pipeline rank) as JSON.",
        metavar="FILE",
        heading=PIPELINE,
    )
    timeline_png: str | None = option(
        None,
        "Draw the simulated timeline above the measured one of the last iteration.",
        metavar="FILE",
        heading=PIPELINE,
    )
    profile: bool = option(False, "Profile the iterations after --profile-step-start up to --profile-step-end.")
    profile_step_start: int = option(10, "Iteration after which profiling starts.", at_least=0)
    profile_step_end: int = option(12, "Iteration after which profiling stops.", at_least=0)
    profile_ranks: tuple[int, ...] = option((0,), "Ranks to profile.", at_least=0)
    use_pytorch_profiler: bool = option(
        False, "Profile with torch.profiler, into --tensorboard-dir, instead of marking the range for nsys."
    )
