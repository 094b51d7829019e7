"""Steps of a profiled model, as predict.py and offload.py run them: forward and backward, without an optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.costs.profile_costs import Profile
from helixpipe.lowering.project import LoweredProgram
from helixpipe.model import Microbatch
from helixpipe.model.device import device
from helixpipe.profile.subject import Task, build_model
from helixpipe.program.program import Program
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.recording import Record
from helixpipe.runtime.transport import Transport


def every_rank(value: Any) -> list[Any]:
    """The value of each rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


class ProfiledSteps:
    """A rank's part of the model, and what runs it. options: more for the executor."""

    def __init__(self, profile: Profile, program: Program, transport: Transport, micro: int, rank: int, **options: Any):
        ranks = dist.get_world_size()
        task = Task(profile.model, profile.seq_length, micro, profile.dtype, processes=ranks, threads=1, repeats=1)
        model, self._ddp = build_model(task, profile.model.layers, program.pieces_of_rank(rank))
        self.executor = Executor(rank, model, transport, group=dist.group.WORLD, **options)
        self.step = make_step(profile, micro, program.num_microbatches)

    def run(
        self,
        lowered: LoweredProgram,
        clocks: Sequence[Callable[[], float]] = (time.perf_counter,),
        record: bool = False,
    ) -> tuple[list[float], Record | None]:
        """A step: what each clock says from a common start until this rank's device is done, and the times of its ops
        if asked for."""
        self._ddp.zero_grad_buffer()
        dist.barrier()
        starts = [clock() for clock in clocks]
        _, times = self.executor.run(lowered, self.step, record=record)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [clock() - start for clock, start in zip(clocks, starts, strict=True)], times


def make_step(profile: Profile, micro: int, microbatches: int) -> Step:
    """Random tokens, the same on every rank."""
    shape = (microbatches, micro, profile.seq_length)
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randint(0, profile.model.vocab, shape, generator=generator) for _ in range(2))
    tokens, labels = (each.to(device()) for each in drawn)
    mask = torch.ones(shape[1:], device=device())
    scale = torch.tensor(1.0 / (micro * profile.seq_length * microbatches), device=device())
    return Step(
        iteration=0,
        microbatch_number=lambda index: index,
        batch=lambda index: Microbatch(tokens[index], labels[index], mask),
        root_gradient=lambda index: scale,
        micro_batch_size=micro,
        seq_length=profile.seq_length,
    )
