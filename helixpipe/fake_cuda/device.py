"""The fake device of this process: `install` before torch is imported, `join` before torch.distributed is started."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from helixpipe.fake_cuda.load import load
from helixpipe.fake_cuda.sequences import Calls
from helixpipe.fake_cuda.waits import Wait, Waits

_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled for a device that computes nothing
    "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
}


class FakeDevice:
    """What the device has counted, and the job's groups. memory: bytes it has."""

    def __init__(self, module: Any, memory: int):
        self.module, self.memory = module, memory
        self.waits = Waits()
        self.groups: Any = None
        module.set_total(memory)
        module.listen(self.waits)

    def join(self, rank: int, world_size: int, others: Any) -> None:
        """Make torch.distributed's groups those of a job in which this process is a rank. others: see `groups`."""
        from helixpipe.fake_cuda.groups import replace_groups

        self._rank = rank
        self.groups = replace_groups(self.module, rank, world_size, others)

    def take_calls(self) -> Calls:
        """Return what the groups have been asked for since this was last called."""
        from helixpipe.fake_cuda.sequences import GroupCall

        calls = [
            GroupCall(group, kind, tuple(numbers), dtype, peer, stream, thread, tuple(sent), tuple(received))
            for group, kind, numbers, dtype, peer, stream, thread, sent, received in self.module.take_entries()
        ]
        return Calls(self._rank, dict(self.groups.own), calls)

    def take_waits(self) -> Counter[Wait]:
        return self.waits.take()


def install(**gpu: Any) -> FakeDevice:
    """Give this process, for good, a CUDA device that computes nothing. gpu: fields of `cuda.Gpu`. Raises UserError
    where the compiled part is missing."""
    os.environ.update(_ENVIRONMENT)
    module = load()
    from helixpipe.fake_cuda.cuda import Gpu, ops_of_cuda, replace_cuda

    described = Gpu(**gpu)
    module.install(*ops_of_cuda())
    replace_cuda(module, described)
    return FakeDevice(module, described.memory)
