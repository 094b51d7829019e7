"""Lets NVIDIA's unmodified scripts run on the CPU over gloo: torch.cuda answers, and tensors stay where they are.

Python imports it at the start of each rank whose PYTHONPATH names this folder.
"""

import contextlib
import importlib.util
import os
import sys
import time
import types
from typing import Any


def _install() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    cpu, cuda = torch.device("cpu"), torch.cuda

    def caller_needs_a_gpu() -> bool:
        """Return whether the function that asks for a GPU is one of the scripts or unit tests, which refuse without."""
        name = sys._getframe(2).f_code.co_filename
        return "/unit_tests/" in name or ("/megatron/training/" in name and "/config" not in name)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    class Stream:
        """A stream, or an event: work is done when it is asked for."""

        def __init__(self, *_: Any, **__: Any):
            self.time = 0.0

        def record(self, *_: Any) -> None:
            self.time = time.time()

        def record_event(self, *_: Any) -> "Stream":
            return Stream()

        def elapsed_time(self, other: "Stream") -> float:
            return 1000 * (other.time - self.time)

        def query(self) -> bool:
            return True

        wait = synchronize = wait_stream = wait_event = nothing

    generator = torch.default_generator
    properties = types.SimpleNamespace(major=8, minor=0, total_memory=80 << 30, name="cpu", multi_processor_count=1)
    statistics = [f"{what}_bytes.all.{when}" for what in ("allocated", "reserved") for when in ("current", "peak")]
    statistics += ["allocation.all.current", "allocation.all.peak", "num_alloc_retries"]
    answers: dict[str, Any] = {
        "is_available": lambda: caller_needs_a_gpu(),
        "device_count": lambda: 8 * caller_needs_a_gpu(),
        "current_device": lambda: cpu,
        "Event": Stream,
        "Stream": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": contextlib.nullcontext,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: "cpu",
        "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        "memory_stats": lambda *_: dict.fromkeys(statistics, 0),
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
    }
    counters = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]
    answers |= {name: lambda *_: 0 for name in counters}
    silent = ["set_device", "synchronize", "empty_cache", "set_stream", "_lazy_init", "reset_peak_memory_stats"]
    answers |= {
        name: lambda *_, **__: None for name in silent
    }  # torch's compiler wants each to be a function of its own
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(cuda.random, name, answers[name])
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    for kind in (torch.Tensor, torch.nn.Module):
        setattr(kind, "cuda", lambda self, *_, **__: self)  # noqa: B010
    setattr(torch.Tensor, "pin_memory", lambda self, *_: self)  # noqa: B010
    torch.compile = lambda model=None, **_: (lambda f: f) if model is None else model  # type: ignore[assignment]
    init: Any = torch.distributed.init_process_group

    def over_gloo(*arguments: Any, device_id: Any = None, backend: Any = None, **named: Any) -> Any:
        return init(*arguments, backend="gloo", **named)

    torch.distributed.init_process_group = over_gloo

    def is_cuda(device: Any) -> bool:
        return device is not None and str(device).startswith("cuda")

    class OfCuda(str):
        """Name of a tensor's type, which `helixpipe.model.device` would rename once more."""

        def replace(self, *_: Any) -> str:
            return self

    class OnCpu(TorchFunctionMode):
        """Makes and moves tensors on the CPU wherever CUDA is named, and names their types after CUDA."""

        def __torch_function__(self, function: Any, kinds: Any, arguments: Any = (), named: Any = None) -> Any:
            named = dict(named or {})
            named.pop("pin_memory", None)
            if is_cuda(named.get("device")):
                named["device"] = cpu
            if function is torch.Tensor.to and len(arguments) > 1 and is_cuda(arguments[1]):
                arguments = (arguments[0], cpu, *arguments[2:])
            if function is torch.Tensor.type and len(arguments) == 1 and not named:
                return OfCuda(str(function(*arguments)).replace("torch.", "torch.cuda.", 1))
            return function(*arguments, **named)

    OnCpu().__enter__()

    def of_random(module: Any) -> None:
        module._get_cuda_rng_state = answers["get_rng_state"]
        module._set_cuda_rng_state = answers["set_rng_state"]

    def of_inference(module: Any) -> None:  # it names classes of Transformer Engine, which are None without it
        module.is_inference_column_parallel_linear = lambda _: False

    class Finder:
        """Changes two modules of megatron-core right after they are imported."""

        def __init__(self) -> None:
            core = "megatron.core.tensor_parallel"
            self.changes = {f"{core}.random": of_random, f"{core}.inference_layers": of_inference}

        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if (change := self.changes.pop(name, None)) is None or (spec := importlib.util.find_spec(name)) is None:
                return None
            assert spec.loader is not None
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


if "RANK" in os.environ:
    _install()
