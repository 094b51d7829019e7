"""Loading checkpoints in Megatron-LM's layout, through megatron-core's dist_checkpointing; saving is in `saving.py`.

A folder is checked before it is used (sizes, structure, checksums); when it is damaged an older one is taken, on all
ranks together.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)

from helixpipe.common.errors import CheckpointError
from helixpipe.model.device import redirect
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint import known, resumed, tensors
from megatron.pretrain.checkpoint import optimizer as optimizers
from megatron.pretrain.checkpoint.folder import COMMON
from megatron.pretrain.checkpoint.from_huggingface import load_weights, other_positions
from megatron.pretrain.checkpoint.options import missing
from megatron.pretrain.checkpoint.plain_values import COUNTS, INDEX_SAMPLES, check_groups, part
from megatron.pretrain.checkpoint.ranks import DamagedError, gather, on_first, say, together
from megatron.pretrain.checkpoint.saving import Saver
from megatron.pretrain.checkpoint.sharded_optimizer import saved_optimizer, whole_weights
from megatron.pretrain.checkpoint.state import TrainingProgress, model_state, rng_state, sharding
from megatron.pretrain.huggingface.folder import looks_like_one


class Checkpointer(Saver):
    """Saves and loads; loading, too, is collective and raises CheckpointError alike on all ranks."""

    def load(
        self, model: Any, optimizer: Any | None, scheduler: Any | None, arguments: Mapping[str, Any] | None = None
    ) -> tuple[TrainingProgress, dict[str, Any]] | None:
        """Restore the newest usable checkpoint of --load, in place: (progress, its `args`).

        arguments: the flags of this run, as `save` is given them, to see what differs; None: nothing may.

        None, with model and optimizer untouched, without --load or when the directory holds no checkpoint. Says on rank
        0, in one line each, which folders are damaged. Raises CheckpointError when all are, when the checkpoint is of
        another model, or when its optimizer cannot be read.
        """
        if self._options.load is None:
            return None
        loaded = self._load(model, optimizer, scheduler, arguments)
        tensors.unwrap(model).routing.share_biases(self._groups.pp)
        return loaded

    def _load(
        self, model: Any, optimizer: Any | None, scheduler: Any | None, arguments: Mapping[str, Any] | None
    ) -> tuple[TrainingProgress, dict[str, Any]] | None:
        assert self._options.load is not None
        directory = Path(self._options.load)
        if on_first(lambda: looks_like_one(directory), f"--load {directory}"):
            return TrainingProgress(), self._load_huggingface(directory, model, optimizer, arguments)
        candidates = on_first(lambda: folders.candidates(directory, self._options.ckpt_step), f"--load {directory}")
        for note in candidates.notes:
            say(f"WARNING: {note}")
        if not candidates.names:
            if self._options.exit_on_missing_checkpoint:
                raise CheckpointError(missing(str(directory), ", and --exit-on-missing-checkpoint is given"))
            if not self._options.continues:
                why = (
                    "; leave it out to start from scratch, or give --save the same folder, as a run has that is "
                    "launched again and again"
                )
                raise CheckpointError(missing(str(directory), why))
            return None
        reasons = []
        for name in candidates.names:
            try:
                with tensors.quiet(), redirect(), whole_weights(self._sharded):
                    result = self._load_folder(directory / name, model, optimizer, scheduler, arguments)
            except DamagedError as damage:
                reasons.append(f"{name}: {damage}")
                say(f"WARNING: checkpoint {directory / name} is not usable: {damage}")
                continue
            tp, pp = self._groups.tp, self._groups.pp
            say(
                f"  successfully loaded checkpoint from {directory} [ t {tp.rank() + 1}/{tp.size()}, "
                f"p {pp.rank() + 1}/{pp.size()} ] at iteration {result[0].iteration}"
            )
            return result
        raise CheckpointError(f"no checkpoint in --load {directory} is usable ({'; '.join(reasons)}).")

    def _load_huggingface(
        self, folder: Path, model: Any, optimizer: Any | None, flags: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Load the weights alone; return the model's arguments. Positions that differ must extend its context."""

        def load() -> dict[str, Any]:
            own = tensors.unwrap(model)
            arguments = load_weights(own, folder)
            tensors.check_model(arguments, own, folder)
            if self._sharded is not None:
                self._sharded.keep()
            if optimizer is not None:
                optimizer.reload_model_params()
            return arguments

        with tensors.quiet(), redirect(), whole_weights(self._sharded):
            arguments = together(load, str(folder))
        say(f"  successfully loaded the weights of the Hugging Face folder {folder}")
        _tell_other_positions(arguments, flags, folder)
        return arguments

    def _load_folder(
        self,
        folder: Path,
        model: Any,
        optimizer: Any | None,
        scheduler: Any | None,
        arguments: Mapping[str, Any] | None,
    ) -> tuple[TrainingProgress, dict[str, Any]]:
        """Load one folder; raises DamagedError, on all ranks, to have the next tried."""
        rank, size = dist.get_rank(), dist.get_world_size()
        trusted = self._options.trust_checkpoint
        read_index = functools.partial(known.read_index, trusted=trusted)
        reasons = gather(together(lambda: folders.problem(folder, read_index, rank, size)))
        wrong = next((reason for reason in reasons if reason), None)
        if wrong:
            raise DamagedError(wrong)
        if not folders.has_manifest(folder):
            say(
                f"WARNING: {folder} has no {folders.MANIFEST} (another program wrote it?): nothing says whether its "
                "files are what was written."
            )
        common = together(lambda: known.load_common(folder, trusted))
        weights_only = self._options.finetune or folder.name == folders.RELEASE
        wanted = None if self._options.no_load_optim or weights_only else optimizer
        own, old = None if wanted is None else saved_optimizer(wanted, self._sharded, sharding(self._groups)), ""

        if not weights_only and arguments is not None:
            saved = vars(common.get("args", Namespace()))
            resumed.check_identities(saved, arguments, self._options.resume_with_other, folder)
            if wanted is not None:
                resumed.check_optimizer(saved, arguments, folder)

        def request() -> dict[str, Any]:
            nonlocal old
            saved = tensors.saved_shapes(read_index(folder))
            tensors.check_model(vars(common.get("args", Namespace())), tensors.unwrap(model), folder)
            state = {"model": model_state(model, self._groups, saved)}
            tensors.forget_extra_state(state["model"], saved)
            if own is not None:
                old = optimizers.saved_class(common, saved, str(folder))
                state["optimizer"] = own.state(model_state(model, self._groups, saved), is_loading=True)
                optimizers.request_saved_names(own.copies(state["optimizer"]), saved)
            if not (self._options.no_load_rng or weights_only):
                rng = rng_state(self._groups)
                if rng.unique_key in saved:  # else the layout of ranks is another: nothing fits, and nothing needs it
                    state["rng_state"] = rng
            if self._options.dist_ckpt_strictness.startswith(("assume_ok", "raise")):
                tensors.check_tensors(state, saved, folder)
            return state

        state = self._read(together(request, str(folder)), folder)

        def apply() -> None:
            self._apply_model(model, state["model"], folder)
            if arguments is not None and arguments.get("check_for_nan_in_loss_and_grad"):
                resumed.check_finite(tensors.unwrap(model).named_parameters(), folder)
            if self._sharded is not None:
                self._sharded.keep()
            if own is not None and wanted is not None:
                with part("an optimizer", "--no-load-optim", folder):
                    before = [dict(group) for group in wanted.param_groups]
                    own.load(optimizers.convert(state["optimizer"], common, old, own.saved_as))
                    check_groups(before, wanted.param_groups)
            elif optimizer is not None:
                optimizer.reload_model_params()
            trains = not (weights_only or (arguments or {}).get("skip_train"))
            if scheduler is not None and trains:
                with part("a learning-rate schedule", "--finetune", folder):
                    resumed.load_scheduler(scheduler, common, folder, arguments)
            if "rng_state" in state:
                with part("a random state", "--no-load-rng", folder):
                    tensors.set_rng_state(state["rng_state"][0])

        together(apply, str(folder))
        if (line := resumed.not_loaded(self._options, folder, optimizer is not None, "rng_state" in state)) is not None:
            say(line)
        _tell_other_positions(vars(common.get("args", Namespace())), arguments, folder)
        return self._progress(common, weights_only)

    def _read(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        trusted = self._options.trust_checkpoint
        strategy = known.strategy(trusted)
        if self._options.ckpt_fully_parallel_load and self._groups.dp_cp.size() > 1:
            strategy = FullyParallelLoadStrategyWrapper(strategy, self._groups.dp_cp)
        strictness = self._options.dist_ckpt_strictness
        return together(lambda: read_shards(state, folder, strategy, strictness=strictness, trusted=trusted))

    def _apply_model(self, model: Any, state: dict[str, Any], folder: Path) -> None:
        missing, _ = tensors.unwrap(model).load_state_dict(state, strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing and self._options.dist_ckpt_strictness.startswith(("assume_ok", "raise")):
            raise CheckpointError(f"{folder} holds no {missing[0]}, which the model of these flags has.")

    def _progress(self, common: dict[str, Any], weights_only: bool) -> tuple[TrainingProgress, dict[str, Any]]:
        arguments = vars(common.get("args", Namespace()))
        if weights_only:
            return TrainingProgress(), arguments
        counts = {name: int(arguments.get(name) or 0) for name in COUNTS}
        flops = float(common.get("num_floating_point_operations_so_far") or 0.0)
        iteration = int(common.get("iteration", 0))
        index: Any = tuple(map(tuple, arguments.get(INDEX_SAMPLES, ())))
        return TrainingProgress(iteration, **counts, num_floating_point_operations_so_far=flops, index_samples=index), (
            arguments
        )


def _tell_other_positions(saved: Mapping[str, Any], flags: Mapping[str, Any] | None, folder: Path) -> None:
    """Say where positions are others, which is as meant where a model's context is extended."""
    if flags is not None and (others := other_positions(saved, flags)):
        say(f" > positions are not those of {folder}: {', '.join(others)}")


def read_shards(
    state: dict[str, Any], folder: Path, strategy: Any, *, strictness: str, trusted: bool = False
) -> dict[str, Any]:
    """Return `state` with its sharded tensors and objects read from the checkpoint, and the checkpoint's plain values.

    strategy: reads the sharded part of a folder. strictness: one of megatron-core's `StrictHandling`, which says how
    names that only the checkpoint or only `state` has are treated. Ranks may read overlapping parts: the writer checks
    that, and a check here would be a collective in which the other ranks wait for one that failed before it.
    """
    force_all_tensors_to_non_fp8(state)
    sharded, unsaved, factories = load_preprocess(state)
    result = merge(known.load_common(folder, trusted), unsaved)
    sharded, _ = extract_sharded_base(sharded)
    strict = parse_strict_flag(strictness)
    in_checkpoint = of_rank = of_all_ranks = None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        every = strategy.load_sharded_metadata(folder)
        in_checkpoint = {name: entry for name, entry in every.items() if entry.key != COMMON}
    if StrictHandling.requires_global_app_metadata(strict):
        of_rank, of_all_ranks = determine_global_metadata(sharded)
    sharded, _, _ = validate_integrity_and_strict_load(sharded, strict, False, of_rank, of_all_ranks, in_checkpoint)
    merge(result, strategy.load(sharded, folder))
    return dict(apply_factory_merges(result, factories))
