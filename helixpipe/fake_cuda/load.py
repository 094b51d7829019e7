"""Loads the compiled part of the fake device, which must be there before torch looks for a device of its own."""

from __future__ import annotations

import ctypes
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError

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
