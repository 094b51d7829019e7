"""Saving checkpoints in Megatron-LM's layout, through megatron-core's dist_checkpointing.

A checkpoint is written to a temporary folder and renamed when every rank is done; the tracker file follows. Whatever
moment a run is killed at, the folders with a final name are complete.

Every rank writes its own shards itself. megatron-core's writer starts a helper process for every rank and forks another
for every file: slow for small models, fatal for entry scripts without a main guard, and what SIGKILL of a rank leaves
behind. torch.distributed.checkpoint's own writer produces the same files in the calling thread.

With --async-save that thread is another one, which has copies of all tensors: what a rank does after the copy is
without collectives, and the same as without the flag. Ranks meet in the job's store then, since process groups are
training's.
"""

from __future__ import annotations

import dataclasses
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.process_groups_config import ProcessGroupCollection

from helixpipe.model.device import redirect
from megatron.pretrain.checkpoint import tensors
from megatron.pretrain.checkpoint.optimizer import SHARDING
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.ranks import Collectives, Exchange, ThroughStore, completed, say, together
from megatron.pretrain.checkpoint.save_folder import SaveFolder
from megatron.pretrain.checkpoint.sharded_optimizer import saved_optimizer, whole_weights
from megatron.pretrain.checkpoint.state import TrainingProgress, model_state, rng_state, sharding
from megatron.pretrain.checkpoint.writing import CheckpointFiles, PlannedSave, Written

_VERSION = 3.0  # of the state's keys; what Megatron-LM writes since its version 3
_OF_ONE_RANK = ("rank", "local_rank")  # arguments that differ between ranks are not saved


class Saver:
    """Saves; what is not said to be otherwise is collective over all ranks and raises CheckpointError alike on all.

    groups: needs `tp`, `pp` and `dp_cp`; None takes megatron-core's parallel state.
    """

    def __init__(self, options: CheckpointOptions, groups: ProcessGroupCollection | None = None):
        self._options = options
        self._sharded: Any = None
        if groups is None:
            groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "dp_cp"])
        self._groups = groups
        self.folder = SaveFolder(options)
        self._background: Background | None = None
        self._store: Any = None
        self._begun = 0
        self.writing: int | None = None
        """The iteration whose checkpoint is being written beside training, and has not been settled."""

    def keep(self, sharded: Any) -> None:
        """Set the `ShardedWeights` of a model whose weights are sharded over data-parallel ranks, or None."""
        self._sharded = sharded

    def save(
        self,
        progress: TrainingProgress,
        model: Any,
        optimizer: Any | None,
        scheduler: Any | None,
        arguments: dict[str, Any],
    ) -> None:
        """Write DIR/iter_N and then the tracker file. arguments: the flags, kept as `args`.

        model: a PipelineModel or what wraps it. Does nothing without --save. With --async-save it waits for the
        checkpoint before (`settle`), and returns when it has a copy of the state, which a thread writes.
        """
        if self._options.save is None:
            return
        self.settle()
        directory, where, iteration = self.folder.path, self.folder.where, progress.iteration
        say(f"saving checkpoint at iteration {iteration:7d} to {directory} in {self._options.ckpt_format} format")
        with self.folder.says_what_is_kept(Collectives()):
            temporary = self.folder.begin(iteration)
            with self.folder.removed_on_failure(temporary):
                self.folder.check_seen(temporary)
                with tensors.quiet(), redirect(), whole_weights(self._sharded):
                    state = together(
                        lambda: self._state_to_save(progress, model, optimizer, scheduler, arguments), where
                    )
                    files = self._planned(state, temporary, where)
                    if self._options.async_save:
                        together(files.copy, where)
                    else:
                        self._complete(files, temporary, iteration, Collectives())
        if self._options.async_save:
            self._write_beside(files, temporary, iteration)
            say(f"  scheduled an async checkpoint save at iteration {iteration:7d} to {directory}")

    def settle(self, wait: bool = True) -> None:
        """Handle the outcome of the checkpoint that is being written beside training, if one is.

        wait: until it is complete; else nothing is done while it is not. Not collective. Raises CheckpointError, on all
        ranks alike, when it could not be written.
        """
        if self._background is not None and (wait or self._background.has_ended):
            background, self._background, self.writing = self._background, None, None
            background.wait()

    def _write_beside(self, files: CheckpointFiles, temporary: Path, iteration: int) -> None:
        if self._store is None:
            store = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if hasattr(store, "clone") else store  # one that other threads do not wait on
        self._begun += 1
        exchange = ThroughStore(self._store, f"{temporary.name}/{self._begun}")

        def work() -> None:
            with self.folder.says_what_is_kept(exchange), self.folder.removed_on_failure(temporary):
                self._complete(files, temporary, iteration, exchange)

        self.writing, self._background = iteration, Background(work, "checkpoint")

    def _complete(self, files: CheckpointFiles, temporary: Path, iteration: int, exchange: Exchange) -> None:
        """Write all files and give the folder its name. No collectives but those of the exchange."""

        def publish(parts: list[Written]) -> None:
            self.folder.publish(temporary, files.write_index(parts), iteration)
            tp, pp = self._groups.tp, self._groups.pp
            say(
                f"  successfully saved checkpoint from iteration {iteration:7d} to {self.folder.path} "
                f"[ t {tp.rank() + 1}/{tp.size()}, p {pp.rank() + 1}/{pp.size()} ]"
            )

        completed(files.write, publish, exchange, self.folder.where)

    def _state_to_save(
        self,
        progress: TrainingProgress,
        model: Any,
        optimizer: Any | None,
        scheduler: Any | None,
        arguments: dict[str, Any],
    ) -> dict[str, Any]:
        counts = {
            name: tensors.storable(value)
            for name, value in dataclasses.asdict(progress).items()
            if name != "num_floating_point_operations_so_far"
        }
        plain = {name: tensors.storable(value) for name, value in arguments.items() if name not in _OF_ONE_RANK}
        weights = model_state(model, self._groups, local_names=self._options.local_names)
        state: dict[str, Any] = {
            "args": Namespace(**{**plain, **counts}),
            "checkpoint_version": _VERSION,
            "iteration": progress.iteration,
            "num_floating_point_operations_so_far": progress.num_floating_point_operations_so_far,
            "content_metadata": dict(SHARDING),
            "model": weights,
        }
        if optimizer is not None and not self._options.no_save_optim:
            state["optimizer"] = saved_optimizer(optimizer, self._sharded, sharding(self._groups)).state(weights)
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
        if not self._options.no_save_rng:
            state["rng_state"] = rng_state(self._groups)
        return state

    def _planned(self, state: dict[str, Any], folder: Path, where: str) -> CheckpointFiles:
        """Return all files with what each rank writes to them; none is written yet."""
        sharded, common = together(lambda: save_preprocess(state), where)
        planned = PlannedSave()
        strategy: Any = planned
        if self._options.ckpt_fully_parallel_save and self._groups.dp_cp.size() > 1:
            strategy = FullyParallelSaveStrategyWrapper(strategy, self._groups.dp_cp)
        together(lambda: strategy.save(sharded, folder), where)
        return together(lambda: planned.files(folder, common), where)


class Background:
    """One piece of work in a thread, started by the constructor.

    A thread and not a process: writing holds Python's lock only between tensors, and a thread shares the memory, ends
    with its process however that ends, and needs no torch of its own.
    """

    def __init__(self, work: Callable[[], None], name: str):
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the work has ended. Raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the thread that waits has it
            self._error = error
