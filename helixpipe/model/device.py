"""Chooses the device of tensors, and holds the one shim that lets megatron-core run on machines without CUDA.

`prepare()` is called once, before anything of `megatron.core` is imported (importing `helixpipe.model` calls it). It
imports the parts of megatron-core used here with the notices about missing optional packages (Transformer Engine, apex)
silenced, during these imports only, so later warnings are seen. Everywhere it has the
norm of gradients computed in few kernels (`_norm_in_few_kernels`); with CUDA it raises a limit of torch's compiler
besides (`_compile_every_variant`), and that is all.

Start-up without CUDA takes a third of the time because megatron-core's functions are not handed to `torch.compile`
(`_uncompiled`), and everywhere because Python's garbage collector does not search half a million objects that are all
in use, again and again, while they are imported (`collector_paused`).

Without CUDA, megatron-core still names the device "cuda" in several places. Two remedies, by cost:

- functions that can only fail without CUDA (`torch.cuda.current_device`, `current_stream`, `synchronize`, the CUDA
  random state, `Tensor.cuda`) are replaced for good by their CPU meaning. Nothing else slows down, and all that the
  forward and backward passes of megatron-core's layers need is among them;
- literal `device="cuda"` arguments and the checks of `Tensor.type()` are rewritten by a `TorchFunctionMode`. It costs
  about a microsecond for every torch call made while it is active, as much as a small op itself, so it is active only
  inside megatron-core's own construction, optimizer and checkpoint code (`_ENTRY_POINTS`), never in the forward and
  backward passes. `redirect()` gives it to other code that needs it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from helixpipe.common.collector import collector_paused
from helixpipe.model.releases import with_router_products, without_advice

_IMPORTS = (
    "megatron.core",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.tensor_parallel",
)

_ENTRY_POINTS = {
    "megatron.core.dist_checkpointing.strategies.fully_parallel": (
        "FullyParallelLoadStrategyWrapper.load",
        "FullyParallelSaveStrategyWrapper.save",
        "FullyParallelSaveStrategyWrapper.async_save",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": (
        "TorchDistLoadShardedStrategy.load",
        "TorchDistSaveShardedStrategy.async_save",
    ),
    "megatron.core.distributed.distributed_data_parallel": ("DistributedDataParallel.__init__",),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer.__init__",),
    "megatron.core.optimizer.grad_scaler": ("MegatronGradScaler.__init__", "DynamicGradScaler.__init__"),
    "megatron.core.optimizer.optimizer": (
        "FP32Optimizer.__init__",
        "Float16OptimizerWithFloat16Params.__init__",
        "ChainedOptimizer.count_zeros",
        "ChainedOptimizer.get_grad_norm",
        "ChainedOptimizer.get_loss_scale",
        "ChainedOptimizer.load_state_dict",
        "ChainedOptimizer.sharded_state_dict",
        "ChainedOptimizer.step",
    ),
}
"""Methods of megatron-core that run under `redirect()` without CUDA; methods, so that it does not matter who imported
their classes before."""

_OFFLOADING = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
_OFFLOADING_METHODS = ("_init_sub_optimizers", "_set_sub_optimizer_grads", "_move_new_state_to_right_device")
"""Those of `HybridDeviceOptimizer` that ask where a tensor is, or put it there."""

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
"""It copies numbers of tokens to the host on a stream of its own."""

_NOISE = (
    (FutureWarning, r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"),
    (FutureWarning, r"`load_state_dict` is deprecated and will be removed"),
    (FutureWarning, r"Please use DTensor instead and we are deprecating ShardedTensor"),
    (UserWarning, r"MimoModelConfig is experimental"),  # imported with the optimizer, in 0.19
    (UserWarning, r"Could not determine rank from torch\.distributed"),  # in tools, in 0.19
    (UserWarning, r"barrier\(\): using the device under current context"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed"),
)
"""Warnings that megatron-core's own code draws from torch at every run; whoever runs it can do nothing about them."""

_NOISE_WITHOUT_CUDA = ((UserWarning, r".* recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS"),)

VARIANTS = 64
"""Of one compiled function."""

_CPU = torch.device("cpu")


def device() -> torch.device:
    """The device this process computes on: its current CUDA device, or the CPU when there is no CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def prepare() -> None:
    """Import megatron-core quietly and, without CUDA, make it run on the CPU. Calling it again does nothing."""
    with warnings.catch_warnings(), collector_paused(), _uncompiled(), _silent_logs():
        warnings.simplefilter("ignore")
        for name in _IMPORTS:
            importlib.import_module(name)
    without_advice()
    with_router_products()
    _ignore(_NOISE)
    _norm_in_few_kernels()
    if torch.cuda.is_available():
        _compile_every_variant()
    current_device: Any = torch.cuda.current_device
    if not torch.cuda.is_available() and current_device is not _current_device:
        _ignore(_NOISE_WITHOUT_CUDA)
        _replace_cuda_functions()
        for module, methods in _ENTRY_POINTS.items():
            for method in methods:
                _run_redirected(module, method)
        for name in _OFFLOADING_METHODS:
            _run_redirected(_OFFLOADING, f"HybridDeviceOptimizer.{name}", _HostAside)
        for name in (_OFFLOADING, _DISPATCHER):
            module_with_streams: Any = importlib.import_module(name)
            module_with_streams.torch = _TorchWithoutStreams()


@contextmanager
def _silent_logs() -> Iterator[None]:
    """Without torch's note that it found a CUDA toolkit but no GPU, when triton or an extension builder is imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Without CUDA, `torch.compile` leaves functions as they are: it imports a compiler merely to decorate them.

    megatron-core decorates its fused activations and dropout, which this program computes with on GPUs only. In a
    program that computes with them on the CPU they work as well, op by op.
    """
    if torch.cuda.is_available():
        yield
        return
    compiler: Any = torch.compile
    torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = compiler


def _compile_every_variant() -> None:
    """Let a compiled function have more variants than torch's 8; for those beyond, torch runs it op by op.

    It is compiled anew for the second length of chunks (then for all but a length of one), with and without a graph,
    and where its inputs need gradients in another combination: some three times as often as there are kinds of length.
    Compiled and op by op it draws other dropout masks from the same seed. Were its F compiled and its R no more, the
    gradients would be those of another model.
    """
    config: Any = importlib.import_module("torch._dynamo").config
    config.recompile_limit = max(config.recompile_limit, VARIANTS)


def _norm_in_few_kernels() -> None:
    """Replace megatron-core's own norm of gradients, used without Transformer Engine and apex: it reads a number of
    the device for each gradient.
    """
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    utils: Any = importlib.import_module("megatron.core.utils")
    if clipping.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clipping.l2_norm_impl = _norm


def _norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *others: Any
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors of the first list as a tensor of one element; as apex's multi_tensor_l2norm."""
    norms = torch._foreach_norm(tensor_lists[0])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1).float(), None


def _as_it_is(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Stands for `torch.compile`, as a function and as a decorator with or without options."""
    return _as_it_is if model is None else model


def _ignore(noise: tuple[tuple[type[Warning], str], ...]) -> None:
    for category, message in noise:
        warnings.filterwarnings("ignore", message=message, category=category)


def redirect() -> AbstractContextManager[Any]:
    """Within it torch reads the device "cuda" as "cpu" and names tensor types as CUDA would; nothing with CUDA."""
    return nullcontext() if torch.cuda.is_available() else _Redirect()


class _Redirect(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


class _HostAside(_Redirect):
    """Besides tells apart what is on the device and what on its host: all that `.cpu()` gave, and is made of that."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        on_host = any(getattr(arg, "_on_host", False) for arg in args)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not on_host
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and (on_host or func is torch.Tensor.cpu):
            result._on_host = True  # type: ignore[attr-defined]
        return result


class _TorchWithoutStreams:
    """`torch` for code that copies on streams of its own: what is put on a stream is done at once."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(current_stream=_current_stream, Stream=_current_stream, stream=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _run_redirected(module: str, method: str, mode: type[_Redirect] = _Redirect) -> None:
    """Wrap one method of megatron-core so that it runs under `redirect()`, or another mode."""
    class_name, name = method.split(".")
    owner = getattr(importlib.import_module(module), class_name)
    original = getattr(owner, name)

    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return original(*args, **kwargs)

    setattr(owner, name, redirected)


# ------------------------------------------------------------------------------ the CPU meaning of torch.cuda functions


def _current_device() -> torch.device:
    return _CPU


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for torch.cuda functions that have nothing to do on the CPU."""


def _current_stream(*args: Any, **kwargs: Any) -> SimpleNamespace:
    """A stream on which everything is done at once, so that nobody waits."""
    done = SimpleNamespace(wait=_nothing, synchronize=_nothing)
    return SimpleNamespace(wait_stream=_nothing, wait_event=_nothing, record_event=lambda: done, synchronize=_nothing)


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def _not_about_cpu_generator(record: logging.LogRecord) -> bool:
    """False for the notice that the CPU random state changed inside a CUDA one: here they are the same generator."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _replace_cuda_functions() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = _current_device
    cuda.current_stream = _current_stream
    cuda.synchronize = cuda.empty_cache = _nothing
    cuda.get_rng_state = cuda.random.get_rng_state = _get_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_rng_state
    cuda.manual_seed = cuda.random.manual_seed = _manual_seed
    tensor: Any = torch.Tensor
    tensor.cuda = _tensor_cuda
    tracker: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker._get_cuda_rng_state = _get_rng_state
    tracker._set_cuda_rng_state = _set_rng_state
    logging.getLogger(tracker.__name__).addFilter(_not_about_cpu_generator)
