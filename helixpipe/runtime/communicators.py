"""The process groups of NCCL that carry a pipeline's messages: one for what goes up its ranks, one for what goes down.

Two ranks that exchange messages have a communicator in each of the two, so that what goes up never waits for what goes
down. They are made here and not taken from the job, because they want other settings than collectives do: few thread
blocks, since those of a receive stay on the GPU until the message has come, and streams of high priority, since a
message is short and others wait for it. torch.distributed.ProcessGroupNCCL.Options takes both.

torch makes a communicator for each two ranks of a group when they first meet, and it takes the next of the 32 streams
that a device has for a priority, in turn (c10/cuda/CUDAStream.h). A rank needs one for each channel it is an end of,
2(p - 1) where all ranks talk to all: 30 for helix at p = 16, where the job's other groups take theirs from the streams
of normal priority. From p = 18 on two communicators share a stream and their messages go one after the other, in the
order of the one list like all else (see `lowering.lower`): that costs overlap and nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.costs.thread_blocks import fitting_blocks

Settings = Mapping[str, int | str | bool]
"""The settings of a process group: `is_high_priority_stream`, and fields of NCCL's ncclConfig_t such as `max_ctas`, the
most thread blocks that a communicator uses.
"""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend by which a group carries tensors of a device; "" if it has none. A group may have one for each
    kind of device ("cpu:gloo,cuda:nccl"), as torch's default one has.
    """
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "")


def nccl_options(settings: Settings, blocks: int, timeout: timedelta) -> Any:
    """Return torch's options for a process group, a torch.distributed.ProcessGroupNCCL.Options. Unless the settings say
    otherwise, streams have high priority and at most `blocks` blocks.
    """
    chosen: dict[str, Any] = {"is_high_priority_stream": True, "max_ctas": blocks, **settings}
    chosen["max_ctas"] = max(chosen["max_ctas"], chosen.get("min_ctas", 0))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=chosen.pop("is_high_priority_stream"))
    for name, value in chosen.items():
        setattr(options.config, name, value)
    options._timeout = timeout  # new_group takes its own argument, and warns where this says otherwise
    return options


def direction_groups(
    group: dist.ProcessGroup, device: torch.device, settings: Settings, channels: Sequence[tuple[int, int]]
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create (up, down): groups of a pipeline's ranks with its backend for the device and its timeout.

    settings: in place of high priority and of as many thread blocks as fit beside those of all channels.
    Collective over all ranks of the job: every rank makes every pipeline's groups, in one order, as torch's new_group
    asks.
    """
    own = tuple(dist.get_process_group_ranks(group))
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own)
    timeout = group._get_backend(device).options._timeout  # torch tells it nowhere else
    backend = backend_of(group, device)
    if backend == "nccl":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        ends = Counter(rank for channel in channels for rank in channel)
        blocks = fitting_blocks(max(ends.values(), default=1), processors)
    made = {}
    for ranks in sorted(set(pipelines)):
        for direction in ("up", "down"):
            # Each its own: torch writes there.
            options = nccl_options(settings, blocks, timeout) if backend == "nccl" else None
            made[ranks, direction] = dist.new_group(
                ranks, timeout, backend, options, group_desc=f"PIPELINE_{direction.upper()}"
            )
    return made[own, "up"], made[own, "down"]


def used_channels(channels: Iterable[tuple[int, int]] | None, size: int) -> list[tuple[int, int]]:
    """Return the (source, target) pairs that exchange messages, in the order in which all ranks create communicators.
    None: all of a pipeline of `size` ranks.
    """
    return sorted(permutations(range(size), 2) if channels is None else channels)


def release(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups with their communicators, on all of their ranks and in one order; messages on their way
    arrive before (ProcessGroupNCCL::shutdown in torch/csrc/distributed/c10d). After torch.distributed has been ended,
    which destroys all, there is nothing to do."""
    for group in groups:
        if dist.is_initialized():
            dist.destroy_process_group(group)
