"""The fake device of this process: `install` before torch is imported, `join` before torch.distributed is started."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
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


_BUILD = "install the checkout where there are a C++ compiler and a build of torch without CUDA: make install"


def load() -> Any:
    """Return the compiled module, and import torch with it. Raises UserError where it cannot be had."""
    spec, torch = find_spec("helixpipe.fake_cuda._device"), find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        raise UserError("the fake device needs torch, which is not installed.")
    libraries = Path(torch.submodule_search_locations[0]) / "lib"
    if (libraries / "libtorch_cuda.so").exists():
        raise UserError(
            "the fake device stands in for the CUDA that a build of torch lacks, and this one has it; take an "
            "environment with torch's build for the CPU (pip install torch --index-url of its CPU builds)."
        )
    if spec is None or spec.origin is None:
        raise UserError(f"the fake device has not been built; {_BUILD}.")
    assert "torch" not in sys.modules, "torch has already looked for a device"
    try:
        for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
            ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(spec.origin, mode=ctypes.RTLD_GLOBAL)
        import_module("torch")
        return import_module("helixpipe.fake_cuda._device")
    except (ImportError, OSError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the fake device was built for another torch ({why}); {_BUILD}.") from error
