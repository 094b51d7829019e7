"""`torch.cuda` of a torch built without CUDA, over the fake device: what the modules of this project call."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """What a program can ask a GPU: an H100 unless said otherwise."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 85_520_809_984  # bytes, as the driver tells of 80 GiB
    processors: int = 132
    capability: tuple[int, int] = (9, 0)


def ops_of_cuda() -> tuple[list[str], list[str]]:
    """Return the ops that a CUDA build has kernels for, and those that take scalars of the host beside its tensors.

    From native_functions.yaml, which torch's wheel has with its code generator.
    """
    spec = find_spec("torchgen")
    assert spec is not None and spec.submodule_search_locations, "torch's wheel has torchgen"
    table = Path(spec.submodule_search_locations[0]) / "packaged/ATen/native/native_functions.yaml"
    kernels, any_device = [], []
    for entry in table.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        name = entry[: entry.index("(")]
        dispatch = re.search(r"\n  dispatch:\n((?:    .*\n)+)", entry + "\n")
        own = dispatch is not None and re.search(r"^    [^#\n:]*\bCUDA\b[^:\n]*:", dispatch.group(1), re.MULTILINE)
        if own or "\n  structured_delegate:" in entry:
            kernels.append(name)
        if "device_check: NoCheck" in entry:
            any_device.append(name)
    return kernels, any_device


class CudaStream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> CudaStream:
        where = torch.device("cuda" if device is None else device)
        if str(where) == "cuda":  # the current one
            where = torch.device("cuda", torch.cuda.current_device())
        made: CudaStream = (
            torch.Stream.__new__(cls, **ids) if ids else torch.Stream.__new__(cls, where, priority=priority)
        )
        return made


class Event(torch.Event):
    """`torch.cuda.Event`."""

    recorded: float

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made: Event = torch.Event.__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)
        made.recorded = 0.0
        return made

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self.recorded = time.monotonic()

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds between the two as the host recorded them, since the device takes no time."""
        return 1000.0 * float(end_event.recorded - self.recorded)


class GraphPool:
    """`torch.cuda.graph_pool_handle`. reserved: memory for what graphs of this pool need only while they run."""

    reserved: torch.Tensor | None = None


class CudaGraph:
    """`torch.cuda.CUDAGraph`: a replay does nothing. What a capture has allocated and let go of stays reserved, for
    the largest graph of a pool. fake: the compiled module. capturing: the graph of the capture under way."""

    fake: Any = None
    capturing: CudaGraph | None = None

    def __init__(self, keep_graph: bool = False):
        self._captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        if CudaGraph.capturing is not None or torch.cuda.current_stream().stream_id == 0:
            raise RuntimeError("CUDA graphs are captured one at a time, on a stream that is not the default one")
        self._pool = pool or GraphPool()
        self._reserved = 0 if self._pool.reserved is None else self._pool.reserved.numel()
        self._pool.reserved = None  # this graph's own needs lie in the same memory
        self._threads = torch.autograd.set_multithreading_enabled(False)  # one of its own would let go of tensors later
        self.fake.begin_capture()
        CudaGraph.capturing = self

    def capture_end(self) -> None:
        CudaGraph.capturing, self._captured = None, True
        self._threads.__exit__(None, None, None)
        released = max(self.fake.end_capture(), self._reserved)
        self._pool.reserved = torch.empty(released, dtype=torch.uint8, device="cuda")

    def replay(self) -> None:
        if not self._captured or CudaGraph.capturing is not None:
            raise RuntimeError("a CUDA graph is replayed that has not been captured, or while another one is")


class _CudaTensor:
    """Of the kind of `torch.cuda.FloatTensor`."""

    dtype: torch.dtype

    def __new__(cls, data: Any) -> Any:
        return torch.tensor(data, dtype=cls.dtype).to("cuda")


_TENSORS = {
    "FloatTensor": torch.float32,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
}


def replace_cuda(fake: Any, gpu: Gpu) -> None:
    """Make `torch.cuda` speak of the fake device, in this process and for good. fake: the compiled module."""
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name=gpu.name,
        multi_processor_count=gpu.processors,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory,
        L2_cache_size=50 << 20,
        pci_domain_id=0,
        pci_bus_id=0,
        pci_device_id=0,
    )
    values: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **kwargs: call(),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 8,
        "current_device": fake.current_device,
        "set_device": lambda device: fake.set_device(_index(fake, device)),
        "get_device_capability": lambda *device: gpu.capability,
        "get_device_properties": lambda *device: properties,
        "get_device_name": lambda *device: gpu.name,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "synchronize": lambda *device: fake.wait("the device"),
        "empty_cache": _nothing,
        "is_current_stream_capturing": lambda: CudaGraph.capturing is not None,
        "graph_pool_handle": GraphPool,
        "check_error": _nothing,
        "stream": lambda stream: _on_stream(fake, stream),
        "device": lambda device: _on_device(fake, device),
        "current_stream": lambda device=None: _stream(fake, fake.current_stream()),
        "default_stream": lambda device=None: _stream(fake, 0),
        "memory_allocated": lambda *device: fake.allocated(),
        "memory_reserved": lambda *device: fake.allocated(),
        "max_memory_allocated": lambda *device: fake.peak(),
        "max_memory_reserved": lambda *device: fake.peak(),
        "reset_peak_memory_stats": lambda *device: fake.reset_peak(),
        "memory_stats": lambda *device: _statistics(fake),
        "mem_get_info": lambda *device: (gpu.memory - fake.allocated(), gpu.memory),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda data, size, flags: fake.register_pinned(data, size),
            cudaHostUnregister=fake.unregister_pinned,
        ),
    }
    CudaGraph.fake = fake
    core: Any = torch._C
    core._host_emptyCache = _nothing
    for name, value in {**values, "Stream": CudaStream, "Event": Event, "CUDAGraph": CudaGraph}.items():
        _replace_everywhere(name, getattr(cuda, name), value)
    cuda.default_generators = tuple(fake.default_generator(index) for index in range(8))
    cuda.nccl.version = lambda: (2, 27, 5)
    for name, dtype in _TENSORS.items():
        setattr(cuda, name, type(name, (_CudaTensor,), {"dtype": dtype}))
    resize = torch.UntypedStorage.resize_
    storages: Any = torch.UntypedStorage
    storages.resize_ = lambda storage, size: _resize(resize, storage, size)
    backends: Any = torch.backends
    backends.cuda.is_flash_attention_available = lambda: True
    backends.cudnn.version = lambda: 91000
    lower_right: Any = import_module("torch.nn.attention.bias")
    lower_right.can_use_flash_attention = _takes_flash
    lower_right.can_use_efficient_attention = lambda parameters, debug=False: backends.cuda.mem_efficient_sdp_enabled()
    compiler: Any = torch
    compiler.compile = partial(_compiled, fake)
    version: Any = torch.version
    version.cuda = "13.0"


def _replace_everywhere(name: str, original: Any, value: Any) -> None:
    """Replace a function of torch.cuda, in whichever of its modules have it by this name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[:2] == ["torch", "cuda"] and getattr(module, name, None) is original:
            setattr(module, name, value)


def _resize(original: Any, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """`UntypedStorage.resize_`."""
    if storage.device.type != "cuda":
        resized: torch.UntypedStorage = original(storage, size)
        return resized
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))
    torch.ops.fake_cuda.resize_storage(view, size)
    return storage


def _takes_flash(parameters: Any, debug: bool = False) -> bool:
    """Whether torch's flash kernel takes a query, as a CUDA build says."""
    enabled: bool = torch.backends.cuda.flash_sdp_enabled()
    return enabled and parameters.query.dtype in (torch.float16, torch.bfloat16) and parameters.query.size(-1) <= 256


def _compiled(fake: Any, function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """`torch.compile`: one kernel, whose inner tensors take no memory. What autograd keeps of them does."""
    if function is None:
        return partial(_compiled, fake)

    @wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        fake.begin_fused()
        try:
            return function(*args, **kwargs)
        finally:
            fake.end_fused()

    return kernel


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for functions of torch.cuda that have nothing to do here."""


def _index(fake: Any, device: Any) -> int:
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return fake.current_device() if index is None else index


def _stream(fake: Any, stream: int) -> CudaStream:
    return CudaStream(stream_id=stream, device_index=fake.current_device(), device_type=1)


@contextmanager
def _on_stream(fake: Any, stream: Any) -> Iterator[None]:
    """`torch.cuda.stream`."""
    if stream is None:
        yield
        return
    before = fake.exchange_stream(stream.stream_id)
    try:
        yield
    finally:
        fake.exchange_stream(before)


@contextmanager
def _on_device(fake: Any, device: Any) -> Iterator[None]:
    """`torch.cuda.device`."""
    before = fake.current_device()
    fake.set_device(_index(fake, device))
    try:
        yield
    finally:
        fake.set_device(before)


def _statistics(fake: Any) -> dict[str, int]:
    known = {"allocated_bytes.all.current": fake.allocated(), "allocated_bytes.all.peak": fake.peak()}
    return defaultdict(int, known)
