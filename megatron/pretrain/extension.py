"""The interface between the training loop and extensions, this project's own and users'."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from helixpipe.common.errors import UserError
from helixpipe.program.program import Program
from megatron.pretrain.config import Config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from helixpipe.common.errors import CheckpointError
    from helixpipe.lowering.project import LoweredProgram
    from helixpipe.model import Microbatch
    from helixpipe.runtime.recording import Record
    from helixpipe.runtime.step import StepObserver
    from helixpipe.watch.position import Patience
    from megatron.pretrain.checkpoint.state import TrainingProgress
    from megatron.pretrain.log.log import TrainingLog
    from megatron.pretrain.plan.pipeline import Pipeline
    from megatron.pretrain.process.parallel import Parallel
    from megatron.pretrain.step.microbatches import RunLength
    from megatron.pretrain.step.model import TrainingModel

BUILT_IN = (
    "megatron.pretrain.resilience.watching:Watching",
    "megatron.pretrain.resilience.corruption:CorruptionCheck",
    "megatron.pretrain.resilience.snapshots:HostSnapshots",
)
"""The project's own extensions, each loaded where its `wanted` says so. Nothing else names them."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that are there before a checkpoint is loaded.

    Attributes:
        parallel: This rank's place, and its groups.
        pipeline: Runs steps.
        state: The model and its optimizer.
        scheduler: Of the learning rate.
        arguments: What a checkpoint keeps: the flags, and digests of the data.
        leaving: Returns whether this rank is to leave its group, to go on in another one.
    """

    parallel: Parallel
    pipeline: Pipeline
    state: TrainingModel
    scheduler: Any
    arguments: Mapping[str, Any]
    leaving: Callable[[], bool] = lambda: False


class RunningTrainer(Protocol):
    """The part of the training loop that extensions may use."""

    config: Config
    parallel: Parallel
    pipeline: Pipeline
    state: TrainingModel
    scheduler: Any
    length: RunLength
    progress: TrainingProgress
    log: TrainingLog
    not_saved: CheckpointError | None
    """Why the last checkpoint that was due is not complete; None where it is, or may still become so."""

    def timed(self, name: str, patience: Patience = ...) -> AbstractContextManager[None]:
        """Return a context whose time is logged under a name. patience: How long the watchdog waits."""
        ...

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete, or known not to be."""
        ...

    def rebuild(self) -> None:
        """Free the model and what trains it, and build them of the pieces that the pipeline has now. Collective."""
        ...


class StepAhead(NamedTuple):
    """A step that is about to run. root_gradient: Returns the gradient of a microbatch's loss sum."""

    iteration: int
    lowered: LoweredProgram
    microbatches: Sequence[Microbatch]
    root_gradient: Callable[[Microbatch], Tensor]


class StepOutcome(NamedTuple):
    """What all ranks know of a step. sums: Over all ranks, of the extension's own `figures`. loss: Over all tokens that
    count; NaN where none does. grad_norm: Before clipping; None after an overflow."""

    iteration: int
    sums: Sequence[float]
    loss: float
    grad_norm: float | None


class TrainerExtension:
    """Follows a run. An extension overrides what it needs; the methods below do nothing.

    Every method runs on every rank, in the training loop, so it must be quick, and must do the same collectives on all
    ranks. A UserError that all ranks raise ends the run with its sentence.
    """

    numbers = 0
    """How many numbers `figures` returns."""

    def __init__(self, config: Config):
        self.config = config

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Return whether a run with these flags needs the extension, asked of the project's own alone."""
        return True

    def programs(self, program: Program) -> Iterable[Program]:
        """Return the further programs that this extension will run. program: A step's."""
        return ()

    def set_up(self, parts: RunParts) -> TrainingProgress | None:
        """Take the run's parts. Returns how far training is, where the extension has put a state into them: then no
        checkpoint is loaded."""
        return None

    def begin(self, trainer: RunningTrainer) -> None:
        """Take the trainer, before its first step."""

    def before_step(self, iteration: int) -> None:
        """Called before a step, when the one before may not have its outcome yet."""

    def needs_outcome(self, iteration: int) -> bool:
        """Return whether this iteration must have its outcome before the next step begins."""
        return False

    def ahead(self, step: StepAhead) -> None:
        """Called when the step's data are there, before its gradients are zeroed."""

    def weights_ready(self) -> None:
        """Called when the weights are those of the step, and before its first backward."""

    def observer(self, lowered: LoweredProgram) -> StepObserver | None:
        """Return what is told of the messages of a step."""
        return None

    def wants_times(self, iteration: int, lowered: LoweredProgram) -> bool:
        """Return whether the step should be timed, which has a GPU's host wait for it."""
        return False

    def times(self, iteration: int, record: Record) -> None:
        """Take the times of a step on this rank, after `outcome` unless that comes later."""

    def figures(self) -> Tensor | None:
        """Return `numbers` float64 numbers of this rank, to be summed over all; asked after the step's last op."""
        return None

    def outcome(self, outcome: StepOutcome) -> None:
        """Take a step's outcome, which may come within the next step."""

    def complete(self, iteration: int) -> None:
        """Called when an iteration has its outcome, its evaluation and its checkpoint; its line may not be printed
        yet."""

    def close(self, error: BaseException | None) -> None:
        """Called at the end of the run, also where `set_up` failed. error: What the run failed with. Without an error
        it is called on all ranks."""


def load_extensions(config: Config) -> list[TrainerExtension]:
    """Return the extensions of a run: the project's own that it needs, then those of --extension.

    Raises:
        UserError: A name of --extension is not that of a class in a module that can be imported.
    """
    own = [kind for kind in map(_load, BUILT_IN) if kind.wanted(config)]
    return [kind(config) for kind in (*own, *map(_of_user, config.training.extension or ()))]


def _load(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)


def _of_user(name: str) -> Any:
    try:
        kind = _load(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"--extension {name} cannot be loaded ({error}); give MODULE:CLASS, with MODULE on PYTHONPATH."
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, TrainerExtension)):
        raise UserError(f"--extension {name} is no class derived from megatron.pretrain.extension.TrainerExtension.")
    return kind
