"""Checks a checkpoint against the run that resumes from it; by default only its length of training may differ."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint.chained import saved_groups
from megatron.pretrain.checkpoint.folder import RELEASE
from megatron.pretrain.checkpoint.optimizer import matched, rates, set_rates
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.ranks import say
from megatron.pretrain.data.options import order_facts

_LENGTHS = ("lr_decay_steps", "wd_incr_steps")
_SAID_BY = (
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_style",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "global_batch_size",
)
IDENTITIES = {
    "tokenizer": ("tokenizer_identity", ("tokenizer_type", "tokenizer_model", "vocab_file", "vocab_size")),
    "data": ("data_identity", ("data_path", "train_data_path", "split", "mock_data")),
}
"""Facts that must not change when a run resumes, unless allowed -> the argument that identifies
each, the flags for it.
"""


def check_identities(
    saved: Mapping[str, Any], flags: Mapping[str, Any], others_wanted: tuple[str, ...], folder: Path | str
) -> None:
    """Check that a run goes on with the data and the tokenizer of its checkpoint.

    Args:
        saved: arguments of the checkpoint.
        flags: arguments of this run.
        others_wanted: keys of `IDENTITIES` that may differ.
        folder: the checkpoint, for messages.

    Raises:
        CheckpointError: Where the data, its order, or the tokenizer differ.
    """
    for what, (identity, names) in IDENTITIES.items():
        before, now = saved.get(identity), flags.get(identity)
        if before is None or now is None or before == now or what in others_wanted:
            continue
        differ = [name for name in names if saved.get(name) != flags.get(name)]
        was = ", ".join(f"{_flag(name)} {saved.get(name)}" for name in differ) or "files of the same names"
        raise CheckpointError(
            f"{folder} was trained with other {what} ({was}); resume with that, or allow this with "
            f"--resume-with-other {what}."
        )
    known = saved.get("seq_length") is not None and flags.get("seq_length") is not None
    if known and "data" not in others_wanted and not flags.get("skip_train"):
        facts, own = order_facts(saved), order_facts(flags)
        others = [name for name in {**facts, **own} if facts.get(name) != own.get(name)]
        if others:
            was, now = (", ".join(f"{_flag(name)} {args.get(name)}" for name in others) for args in (saved, flags))
            raise CheckpointError(
                f"{folder} was trained with {was}, and this run has {now}, which changes the samples or their order: "
                "some may be trained twice and some never; resume with the former, or allow this with "
                "--resume-with-other data."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_optimizer(saved: Mapping[str, Any], flags: Mapping[str, Any], folder: Path | str) -> None:
    """Raise CheckpointError where the checkpoint has the state of another optimizer."""
    before, now = saved.get("optimizer"), flags.get("optimizer")
    if isinstance(before, str) and before != now and now is not None:
        raise CheckpointError(
            f"{folder} was trained with --optimizer {before}, not {now}; give that, or --no-load-optim to begin its "
            "state anew."
        )


def check_finite(weights: Iterable[tuple[str, Any]], folder: Path | str) -> None:
    """Raise CheckpointError where a weight that was loaded is not a number: training cannot mend that."""
    for name, weight in weights:
        if not bool(weight.detach().isfinite().all()):
            raise CheckpointError(
                f"{folder} holds NaN or infinity in {name}: that run had diverged before it was saved; load an older "
                "checkpoint with --ckpt-step, or go on all the same with --no-check-for-nan-in-loss-and-grad."
            )


def load_scheduler(
    scheduler: Any, common: Mapping[str, Any], folder: Path, flags: Mapping[str, Any] | None = None
) -> None:
    """Give the learning-rate schedule its place in training, whether or not the optimizer's state is loaded.

    Where the checkpoint's schedule and that of the flags differ in their length alone, and that follows from the length
    of training, this run's holds, and the first rank says so. A checkpoint without a schedule, as Megatron-LM's
    --no-save-optim leaves it, has its place in that of the flags.

    Args:
        scheduler: this run's.
        common: plain values of the checkpoint.
        folder: the checkpoint, for messages.
        flags: arguments of this run; None allows no other length.

    Raises:
        CheckpointError: For any other difference that the flags do not settle.
    """
    scheduler.num_steps = 0  # loading adds to it
    if "opt_param_scheduler" not in common:
        scheduler.step(steps := _scheduled(common, flags or {}))
        say(
            f" > {folder} holds no learning-rate schedule: it goes on as these flags have it after {steps} samples, at "
            f"{scheduler.get_lr(scheduler.optimizer.param_groups[0]):.6E}"
        )
        return
    state = dict(common["opt_param_scheduler"])
    settled = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    old = {name: state.get(name) for name in _LENGTHS}
    names = (*_LENGTHS, "lr_warmup_steps") if flags and flags.get("lr_warmup_fraction") is not None else _LENGTHS
    longer = not settled and flags is not None and _follows(flags, vars(common.get("args", object())))
    if longer:
        state.update({name: getattr(scheduler, name) for name in names if name in state})
    flags_rate = scheduler.max_lr
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:
        detail = str(error).removeprefix("OptimizerParamScheduler: ").replace("checkpointvalue", "checkpoint value")
        raise CheckpointError(
            f"{folder} was trained with another learning-rate schedule ({detail}); choose the flags' with "
            "--override-opt-param-scheduler or the checkpoint's with --use-checkpoint-opt-param-scheduler."
        ) from None
    if scheduler.use_checkpoint_opt_param_scheduler:
        groups = scheduler.optimizer.param_groups
        try:
            for group, saved in zip(groups, matched(groups, saved_groups(common["optimizer"])), strict=True):
                set_rates(group, rates(saved))
        except (CheckpointError, KeyError, IndexError, TypeError):
            # No optimizer, or one that is not loaded because it cannot be read: its rates are those of the schedule.
            for group in groups:
                if group.get("max_lr") == flags_rate:  # others have a rate of their own
                    group.update(max_lr=scheduler.max_lr, min_lr=scheduler.min_lr)
    scheduler.step(0)  # by the rates that have come since it took its place
    if longer and old["lr_decay_steps"] not in (None, scheduler.lr_decay_steps):
        group = scheduler.optimizer.param_groups[0]
        now, scheduler.lr_decay_steps = scheduler.lr_decay_steps, old["lr_decay_steps"]
        before, scheduler.lr_decay_steps = scheduler.get_lr(group), now
        say(
            f" > training is {'longer' if now > old['lr_decay_steps'] else 'shorter'} than the checkpoint's: the "
            f"learning rate decays over {now} samples instead of {old['lr_decay_steps']}, and goes from {before:.6E} "
            f"to {scheduler.get_lr(group):.6E} here (--use-checkpoint-opt-param-scheduler keeps the checkpoint's)"
        )


def _scheduled(common: Mapping[str, Any], flags: Mapping[str, Any]) -> int:
    """Return the samples by which a schedule has moved: those of steps that changed the weights."""
    saved = vars(common.get("args", Namespace()))
    if flags.get("max_tokens") is not None:  # whose steps all count alike
        return int(common.get("iteration", 0)) * int(flags["global_batch_size"])
    consumed, skipped = (int(saved.get(name) or 0) for name in ("consumed_train_samples", "skipped_train_samples"))
    return consumed - skipped


def not_loaded(options: CheckpointOptions, folder: Path, with_optimizer: bool, random_state: bool) -> str | None:
    """Return the line that names what a run does not take from a checkpoint; None if it takes everything.

    Args:
        options: flags of the checkpoint.
        folder: the checkpoint.
        with_optimizer: whether the run has an optimizer.
        random_state: whether the checkpoint's was loaded.
    """
    state, rng = "the optimizer's state", "the random state"
    if options.finetune or folder.name == RELEASE:
        why = "--finetune" if options.finetune else f"{RELEASE} holds weights to start from"
        return f" > not loaded from {folder}: {state}, the learning-rate schedule, {rng} and the iteration ({why})"
    parts = [f"{state} (--no-load-optim)"] if with_optimizer and options.no_load_optim else []
    if not random_state:
        parts.append(f"{rng} ({'--no-load-rng' if options.no_load_rng else 'it holds none for these ranks'})")
    return f" > not loaded from {folder}: {', '.join(parts)}" if parts else None


def _follows(flags: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether the length of the schedule followed from the length of training, both now and when it was saved."""
    return all(flags.get(name) == saved.get(name) for name in _SAID_BY) and not any(
        flags.get(name) for name in ("lr_decay_iters", "lr_decay_samples")
    )
