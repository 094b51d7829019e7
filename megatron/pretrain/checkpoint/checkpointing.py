"""Saving and loading checkpoints in Megatron-LM's layout, through megatron-core's dist_checkpointing.

A checkpoint is written to a temporary folder and renamed when every rank is done; the tracker file follows. Whatever
moment a run is killed at, the folders with a final name are complete. Loading checks a folder before it is used (sizes,
structure, checksums) and goes back to an older one, on all ranks together, when it is damaged.

Every rank writes its own shards itself. megatron-core's writer starts a helper process for every rank and forks another
for every file: slow for small models, fatal for entry scripts without a main guard, and what SIGKILL of a rank leaves
behind. torch.distributed.checkpoint's own writer produces the same files in the calling thread.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from helixpipe.common.errors import CheckpointError
from helixpipe.model.device import redirect
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint import known, resumed, tensors
from megatron.pretrain.checkpoint import optimizer as optimizers
from megatron.pretrain.checkpoint.from_huggingface import load_weights, other_positions
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.ranks import DamagedError, gather, on_first, say, together
from megatron.pretrain.checkpoint.reading import read_shards
from megatron.pretrain.checkpoint.save_folder import SaveFolder
from megatron.pretrain.checkpoint.sharded_optimizer import saved_optimizer, whole_weights
from megatron.pretrain.huggingface.folder import looks_like_one

_VERSION = 3.0  # of the state's keys; what Megatron-LM writes since its version 3
_OF_ONE_RANK = ("rank", "local_rank")  # arguments that differ between ranks are not saved


@dataclass
class Progress:
    """How far training has come."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0


class Checkpointer:
    """Saves and loads; every method is collective over all ranks and raises CheckpointError alike on all of them.

    groups: needs `tp`, `pp` and `dp_cp`; None takes megatron-core's parallel state.
    """

    def __init__(self, options: CheckpointOptions, groups: ProcessGroupCollection | None = None):
        self._options = options
        self._sharded: Any = None
        if groups is None:
            groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "dp_cp"])
        self._groups = groups
        self.folder = SaveFolder(options)

    def keep(self, sharded: Any) -> None:
        """Of a model whose weights data-parallel ranks have parts of, its `ShardedWeights`; else None."""
        self._sharded = sharded

    # ------------------------------------------------------------------------------------------------------------ save

    def save(
        self, progress: Progress, model: Any, optimizer: Any | None, scheduler: Any | None, arguments: dict[str, Any]
    ) -> None:
        """Write DIR/iter_N and then the tracker file. arguments: the flags, kept as `args`.

        model: a PipelineModel or what wraps it. Does nothing without --save.
        """
        if self._options.save is None:
            return
        directory, where, iteration = self.folder.path, self.folder.where, progress.iteration
        say(f"saving checkpoint at iteration {iteration:7d} to {directory} in {self._options.ckpt_format} format")
        with self.folder.begun(iteration) as temporary:
            with tensors.quiet(), redirect(), whole_weights(self._sharded):
                state = together(lambda: self._state_to_save(progress, model, optimizer, scheduler, arguments), where)
                files = self._write(state, temporary, where)
            self.folder.publish(temporary, files, iteration)
        tp, pp = self._groups.tp, self._groups.pp
        say(
            f"  successfully saved checkpoint from iteration {iteration:7d} to {directory} "
            f"[ t {tp.rank() + 1}/{tp.size()}, p {pp.rank() + 1}/{pp.size()} ]"
        )

    def _state_to_save(
        self, progress: Progress, model: Any, optimizer: Any | None, scheduler: Any | None, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        counts = {k: v for k, v in dataclasses.asdict(progress).items() if k != "num_floating_point_operations_so_far"}
        plain = {name: tensors.storable(value) for name, value in arguments.items() if name not in _OF_ONE_RANK}
        state: dict[str, Any] = {
            "args": Namespace(**{**plain, **counts}),
            "checkpoint_version": _VERSION,
            "iteration": progress.iteration,
            "num_floating_point_operations_so_far": progress.num_floating_point_operations_so_far,
            "content_metadata": dict(optimizers.SHARDING),
            "model": self._model_state(model),
        }
        if not self._options.no_save_optim:
            if optimizer is not None:
                state["optimizer"] = saved_optimizer(optimizer, self._sharded, self._metadata()).state(state["model"])
            if scheduler is not None:
                state["opt_param_scheduler"] = scheduler.state_dict()
        if not self._options.no_save_rng:
            state["rng_state"] = self._rng_state()
        return state

    def _write(self, state: dict[str, Any], folder: Path, where: str) -> dict[str, list[int]]:
        """Write all files but the manifest, and return what the manifest is to say of them."""
        sharded, common = together(lambda: save_preprocess(state), where)

        def write_common() -> None:
            torch.save(common, folder / "common.pt")
            folders.sync_file(folder / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            folders.sync_file(folder / "metadata.json")

        on_first(write_common, where)
        strategy: Any = tensors.InProcessSave()
        if self._options.ckpt_fully_parallel_save and self._groups.dp_cp.size() > 1:
            strategy = FullyParallelSaveStrategyWrapper(strategy, self._groups.dp_cp)
        together(lambda: strategy.save(sharded, folder), where)
        own = [path.name for path in folder.glob(f"__{dist.get_rank()}_*.distcp")]
        if dist.get_rank() == 0:
            own += ["common.pt", "metadata.json", ".metadata"]
        described = gather(together(lambda: folders.describe_files(folder, own), where))
        return {name: entry for files in described for name, entry in files.items()}

    # ------------------------------------------------------------------------------------------------------------ load

    def load(
        self, model: Any, optimizer: Any | None, scheduler: Any | None, arguments: Mapping[str, Any] | None = None
    ) -> tuple[Progress, dict[str, Any]] | None:
        """Restore the newest usable checkpoint of --load, in place: (progress, its `args`).

        arguments: the flags of this run, as `save` is given them, to see what differs; None: nothing may.

        None, with model and optimizer untouched, without --load or when the directory holds no checkpoint. Says on rank
        0, in one line each, which folders are damaged. Raises CheckpointError when all are, when the checkpoint is of
        another model, or when its optimizer cannot be read.
        """
        if self._options.load is None:
            return None
        directory = Path(self._options.load)
        if on_first(lambda: looks_like_one(directory), f"--load {directory}"):
            return Progress(), self._load_huggingface(directory, model, optimizer, arguments)
        candidates = on_first(lambda: folders.candidates(directory, self._options.ckpt_step), f"--load {directory}")
        for note in candidates.notes:
            say(f"WARNING: {note}")
        if not candidates.names:
            if self._options.exit_on_missing_checkpoint:
                raise CheckpointError(
                    f"--load {directory} holds no checkpoint, and --exit-on-missing-checkpoint is given."
                )
            if not self._options.continues:
                raise CheckpointError(
                    f"--load {directory} holds no checkpoint; leave it out to start from scratch, or give --save the "
                    "same folder, as a run has that is launched again and again."
                )
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
        """Weights alone; returns the model's arguments. Positions that differ extend its context, or are a mistake."""

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
        if flags is not None and (others := other_positions(arguments, flags)):
            say(f" > positions are not those of {folder}: {', '.join(others)}")
        return arguments

    def _load_folder(
        self,
        folder: Path,
        model: Any,
        optimizer: Any | None,
        scheduler: Any | None,
        arguments: Mapping[str, Any] | None,
    ) -> tuple[Progress, dict[str, Any]]:
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
        own, old = None if wanted is None else saved_optimizer(wanted, self._sharded, self._metadata()), ""

        if not weights_only and arguments is not None:
            saved = vars(common.get("args", Namespace()))
            resumed.check_identities(saved, arguments, self._options.resume_with_other, folder)
            if wanted is not None:
                resumed.check_optimizer(saved, arguments, folder)

        def request() -> dict[str, Any]:
            nonlocal old
            saved = tensors.saved_shapes(read_index(folder))
            tensors.check_model(vars(common.get("args", Namespace())), tensors.unwrap(model), folder)
            state = {"model": self._model_state(model)}
            tensors.forget_extra_state(state["model"], saved)
            if own is not None:
                old = optimizers.saved_class(common, saved, str(folder))
                state["optimizer"] = own.state(self._model_state(model), is_loading=True)
                optimizers.request_saved_names(own.copies(state["optimizer"]), saved)
            if not (self._options.no_load_rng or weights_only):
                rng = self._rng_state()
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
            if own is not None:
                own.load(optimizers.convert(state["optimizer"], common, old, own.saved_as))
                if scheduler is not None:
                    resumed.load_scheduler(scheduler, common, folder, arguments)
            elif optimizer is not None:
                optimizer.reload_model_params()
            if "rng_state" in state:
                tensors.set_rng_state(state["rng_state"][0])

        together(apply, str(folder))
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

    def _progress(self, common: dict[str, Any], weights_only: bool) -> tuple[Progress, dict[str, Any]]:
        arguments = vars(common.get("args", Namespace()))
        if weights_only:
            return Progress(), arguments
        names = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
        counts = {name: int(arguments.get(name) or 0) for name in names}
        flops = float(common.get("num_floating_point_operations_so_far") or 0.0)
        iteration = int(common.get("iteration", 0))
        return Progress(iteration, **counts, num_floating_point_operations_so_far=flops), arguments

    # ----------------------------------------------------------------------------------------------------------- state

    def _metadata(self) -> dict[str, Any]:
        return {**optimizers.SHARDING, "dp_cp_group": self._groups.dp_cp}

    def _model_state(self, model: Any) -> dict[str, Any]:
        state: dict[str, Any] = tensors.unwrap(model).sharded_state_dict(metadata=self._metadata())
        return state

    def _rng_state(self) -> ShardedObject:
        """The generators of this rank, one entry for each tensor- and pipeline-parallel rank, as in Megatron-LM."""
        tp, pp = self._groups.tp, self._groups.pp
        state = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": get_cuda_rng_tracker().get_states(),
        }
        grid, place = (pp.size(), tp.size()), (pp.rank(), tp.rank())
        return ShardedObject("rng_state", [state], grid, place, replica_id=self._groups.dp_cp.rank())
