"""Runs in each process of `helixpipe profile`: measures the times of pieces, of whole units, of copies and of messages.

    python -m helixpipe.profile.profiler TASK.json RESULT.json     (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set)

The conditions are those of a training step. Weights lie in megatron-core's DistributedDataParallel, so a backward adds
to its float32 buffers. Pieces run one after another as in a step, which decides what the caches hold. As many
processes as asked measure the same at the same time, since the ranks of a machine share its memory's bandwidth.
"""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from helixpipe.common.command import run_command
from helixpipe.costs.models import Layout
from helixpipe.costs.profile_costs import Profile, WeightTimes
from helixpipe.model.backends import transport_name
from helixpipe.profile.copy_times import measure_copies
from helixpipe.profile.machine import clock_name, machine, needs_wall_clock
from helixpipe.profile.measurement import measured_layers
from helixpipe.profile.message_times import measure_messages
from helixpipe.profile.subject import DTYPES, Task, initialize_parallel_state


def main() -> int:
    """Rank 0 writes the profile; every rank measures messages, the first `task.processes` the rest."""
    task = Task.load(sys.argv[1])
    torch.set_num_threads(task.threads)
    gpus = torch.cuda.device_count()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(rank % gpus)
    dist.init_process_group("nccl" if gpus >= world_size else "gloo", timeout=timedelta(hours=12))
    initialize_parallel_state(world_size)
    processes = task.processes or (1 if gpus == 1 else 2)
    measuring = dist.new_group(list(range(processes)))
    measured = measured_layers(task, measuring) if rank < processes else None
    weights = measured.first.weight_times() if measured is not None else WeightTimes()
    copies = measure_copies(measuring, processes) if measured is not None else None
    dist.barrier()
    messages = measure_messages(rank, processes)
    if measured is not None and rank == 0:
        element_bytes = DTYPES[task.dtype].itemsize
        micro, slices = task.micro_batch_size, (task.chunk_size, task.loss_chunk_size)
        layout = Layout(1, False, micro, element_bytes, bool(gpus), *slices)
        Profile(
            model=task.model,
            layout=layout,
            dtype=task.dtype,
            seq_length=task.seq_length,
            chunks=measured.chunks,
            messages=messages,
            copies=copies,
            weights=weights,
            expert_loads=measured.expert_loads,
            torch=torch.__version__,
            machine=machine(),
            assumed={
                "processes": processes,
                "threads": task.threads,
                "repeats": task.repeats,
                "clock": clock_name(bool(gpus), needs_wall_clock(task.threads, processes)),
                "gradients": "added to float32 buffers",
                "dropout": 0.0,
                "kernels": measured.first.kernels(transport_name(dist.get_backend(), bool(gpus))),
            },
        ).save(sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    gc.freeze()  # neither collections between measurements nor the end of the process need search what was imported
    sys.exit(run_command("profiler", main))
