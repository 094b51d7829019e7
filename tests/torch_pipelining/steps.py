"""Steps of torch's runtime on ranks: a schedule of the catalogue beside torch's own order of communication."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from helixpipe.torch_pipelining import relower, schedule, stages_of_rank

WIDTH, SAMPLES = 8, 2
OWN = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zb-interleaved": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}
"""torch's own schedules of these names."""


def module(stage: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(100 + stage)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def pipeline_stages(indices: list[int], num_stages: int) -> list[PipelineStage]:
    return [PipelineStage(module(index), index, num_stages, torch.device("cpu")) for index in indices]


def result(runtime: Any, stages: list[PipelineStage], microbatches: int) -> dict[str, torch.Tensor]:
    """Gradients by name and, with the last stage, the losses of one step."""
    generator = torch.Generator().manual_seed(5)
    data, target = (torch.randn(SAMPLES * microbatches, WIDTH, generator=generator) for _ in range(2))
    losses: list[torch.Tensor] = []
    first = (data,) if any(stage.is_first for stage in stages) else ()
    last = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
    runtime.step(*first, **last)
    found = {
        f"{stage.stage_index}.{name}": parameter.grad
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
        if parameter.grad is not None
    }
    return found | {f"loss {number}": value.detach() for number, value in enumerate(losses)}


def unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one | other if not torch.equal(one[name], other[name])]


def catalogue_beside_torch(
    rank: int, ranks: int, cases: list[tuple[str, int | None, int]]
) -> list[tuple[int, list[str], float]]:
    """For each case (name, virtual stages, microbatches) how many values a step gave, the names of those that differ in
    any bit from the same ops under torch's own communication, and the largest difference from torch's own schedule."""
    return [_beside_torch(rank, ranks, *case) for case in cases]


def _beside_torch(rank: int, ranks: int, name: str, virtual: int | None, m: int) -> tuple[int, list[str], float]:
    indices = stages_of_rank(name, rank, ranks, m, virtual_stages=virtual)
    total = ranks * len(indices)
    stages = pipeline_stages(indices, total)
    ours = schedule(name, stages, m, loss)
    found = result(ours, stages, m)
    stages = pipeline_stages(indices, total)
    theirs = torch_schedules._PipelineScheduleRuntime(stages, m, loss_fn=loss)
    theirs._prepare_schedule_with_comms(ours.pipeline_order)
    different = unequal(found, result(theirs, stages, m))
    if name not in OWN:
        return len(found), different, 0.0
    stages = pipeline_stages(indices, total)
    single = issubclass(OWN[name], torch_schedules.PipelineScheduleSingle)
    own = result(OWN[name](stages[0] if single else stages, m, loss_fn=loss), stages, m)
    assert own.keys() == found.keys()
    return len(found), different, max(float((own[key] - found[key]).abs().max()) for key in found)


def relowered_beside_torch(rank: int, ranks: int, cases: list[tuple[str, int, int]]) -> list[tuple[int, list[str]]]:
    """For each case (torch's class, stages a rank, microbatches): values, and those that `relower` changes in a bit."""
    results = []
    for name, local, m in cases:
        total = local * ranks
        v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        indices = [rank, total - 1 - rank] if v_shaped else list(range(rank, total, ranks))
        found = []
        for change in (relower, lambda own: own):
            stages = pipeline_stages(indices, total)
            found.append(result(change(getattr(torch_schedules, name)(stages, m, loss_fn=loss)), stages, m))
        results.append((len(found[0]), unequal(*found)))
    return results
