"""Chooses the kernels that a model runs on: a pure function of its configuration and of what the machine has.

`choose` decides, once and alike on every rank; the model takes its decisions from the result, and `Kernels.line` says
at start-up what they are. Nothing here calls a kernel (`attention/kernels.py` and `norms.py` do), so what a GPU would
run is known, and tested, where there is none.

Core attention is the first of the candidates of `--attention-backend` that nothing speaks against. On the CPU every
value means torch's kernels for the CPU, whose fused one is a flash kernel too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from helixpipe.common.errors import UserError
from helixpipe.model.device import device

FLASH_ATTN, FLASH_ATTN_3, ENGINE, APEX = "flash-attn", "flash-attn-3", "transformer-engine", "apex"
WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"
TORCH_FLASH, TORCH_CUDNN, TORCH_EFFICIENT, TORCH_MATH = "torch flash", "torch cuDNN", "torch efficient", "torch math"
TORCH_CPU, TORCH = "torch CPU", "torch"


class _Library(NamedTuple):
    """Where a library is found: modules that must all be there, and names of the distribution that has its version."""

    modules: tuple[str, ...]
    distributions: tuple[str, ...]


LIBRARIES: Mapping[str, _Library] = MappingProxyType(
    {
        FLASH_ATTN: _Library(("flash_attn",), ("flash-attn",)),
        FLASH_ATTN_3: _Library(("flash_attn_interface",), ("flash-attn-3", "flashattn-hopper")),
        ENGINE: _Library(("transformer_engine",), ("transformer-engine", "transformer-engine-torch")),
        # The kernels' module tells NVIDIA's from another package of that name.
        APEX: _Library(("apex", "fused_layer_norm_cuda"), ("apex",)),
        WEIGHT_GRADIENTS: _Library((WEIGHT_GRADIENTS,), ("apex",)),
    }
)
"""Libraries of kernels that are used where they are installed; none is needed."""


@dataclass(frozen=True)
class Machine:
    """All that the choice depends on besides the model.

    device: `cuda` or `cpu`. capability: the GPU's compute capability. libraries: version of each of `LIBRARIES` that is
    installed, empty where unknown. torch_flash: whether this torch has its flash kernel. cudnn: as torch numbers
    versions, 90100 or so; 0: none.
    """

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    libraries: Mapping[str, str] = field(default_factory=dict)
    torch_flash: bool = True
    cudnn: int = 0

    @classmethod
    def here(cls) -> Machine:
        """Return this process's device; no library is imported."""
        if device().type == "cpu":
            return cls()
        versions = {name: _installed(library) for name, library in LIBRARIES.items()}
        return cls(
            device="cuda",
            capability=torch.cuda.get_device_capability(),
            libraries={name: version for name, version in versions.items() if version is not None},
            torch_flash=torch.backends.cuda.is_flash_attention_available(),
            cudnn=torch.backends.cudnn.version() or 0,
        )


def _installed(library: _Library) -> str | None:
    """The version, empty where unknown; None: not installed. A folder that only shares the name is no package."""
    for module in library.modules:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            return None
    for distribution in library.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@dataclass(frozen=True)
class Kernels:
    """The kernels that a model runs on.

    attention: of whole sequences; chunk_attention: of sequences that run chunk by chunk; each with why it is not what
    one might expect, or nothing. norm: `torch`, `apex` or `transformer-engine`; rope: the first or the last of these.
    machine: for which this was chosen. warning: a sentence for who asked for something that is not there, or nothing.
    """

    attention: str
    chunk_attention: str
    norm: str
    rope: str = TORCH
    machine: Machine = field(default_factory=Machine)
    attention_note: str = ""
    chunk_attention_note: str = ""
    warning: str = ""

    def line(self, config: TransformerConfig, *, chunked: bool, transport: str, gradients: torch.dtype) -> str:
        """All that is in use, in one line. chunked: whether sequences run chunk by chunk. gradients: the type they are
        added up in."""
        attention, note = self.attention, self.attention_note
        if chunked:
            attention, note = self.chunk_attention, self.chunk_attention_note
        linear = "megatron-core"
        if config.gradient_accumulation_fusion:
            linear += " + fused weight gradients"
        parts = {
            "attention": self._with_version(attention) + (f" ({note})" if note else ""),
            "norm": f"{self._with_version(self.norm)} {config.normalization}",
            "linear": linear,
            "activation": "fused" if config.bias_activation_fusion else "not fused",
            "rope": "" if self.rope == TORCH else self._with_version(self.rope),
            "transport": transport,
            "gradients": _name(gradients),
        }
        return ", ".join(f"{part} {kernel}" for part, kernel in parts.items() if kernel)

    def _with_version(self, kernel: str) -> str:
        return f"{kernel} {self.machine.libraries.get(kernel, '')}".strip()


def choose(config: TransformerConfig, machine: Machine, context_parallel: int = 1) -> Kernels:
    """The kernels on a machine. Raises UserError where `--attention-backend flash` cannot be had."""
    attention, note = _attention(config, machine, context_parallel, chunk=False)
    chunk_attention, chunk_note = _attention(config, machine, context_parallel, chunk=True)
    warning = ""
    if config.transformer_impl == "transformer_engine" and not _has_engine(machine):
        why = "is not installed" if machine.device == "cuda" else "needs a GPU"
        warning = f"--transformer-impl transformer_engine: Transformer Engine {why}; layers are those of local."
    half_or_single = config.params_dtype != torch.float64
    rope = ENGINE if config.apply_rope_fusion and half_or_single and fuses_rope(machine) else TORCH
    return Kernels(attention, chunk_attention, _norm(config, machine), rope, machine, note, chunk_note, warning)


def fuses_weight_gradients(machine: Machine) -> bool:
    """Whether linear layers can add a weight's gradient to its sum in the matrix product itself."""
    return machine.device == "cuda" and WEIGHT_GRADIENTS in machine.libraries


def fuses_rope(machine: Machine) -> bool:
    """Whether RoPE can be one kernel: Transformer Engine's, from 1.4 on as megatron-core asks."""
    return _has_engine(machine) and _numbers(machine.libraries[ENGINE]) >= (1, 4)


def transport_name(backend: str, on_gpu: bool, nccl: tuple[int, ...] = ()) -> str:
    """Name of a backend of torch.distributed, `nccl` with its version."""
    if backend == "gloo" and on_gpu:
        return "gloo through host memory"
    return " ".join([backend, ".".join(map(str, nccl))]).strip()


def load(library: str, module: str) -> Any:
    """A module of one of `LIBRARIES`. Raises UserError where it is installed but cannot be imported, as when it was
    built for another torch."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{library} is installed, but importing {module} fails ({why}); build it for this torch, or uninstall it."
        ) from error


def load_engine() -> Any:
    """megatron-core's extension for Transformer Engine, whose classes only work where that can be imported."""
    load(ENGINE, "transformer_engine.pytorch")
    return importlib.import_module("megatron.core.extensions.transformer_engine")


def _has_engine(machine: Machine) -> bool:
    return machine.device == "cuda" and ENGINE in machine.libraries


def _norm(config: TransformerConfig, machine: Machine) -> str:
    if machine.device == "cpu" or config.params_dtype == torch.float64:
        return TORCH
    if config.transformer_impl == "transformer_engine" and ENGINE in machine.libraries:
        return ENGINE
    return APEX if APEX in machine.libraries else TORCH


# ------------------------------------------------------------------------------------------------------ core attention

_CANDIDATES: Mapping[AttnBackend, tuple[str, ...]] = MappingProxyType(
    {
        AttnBackend.auto: (
            ENGINE,
            FLASH_ATTN_3,
            FLASH_ATTN,
            TORCH_FLASH,
            TORCH_CUDNN,
            TORCH_EFFICIENT,
            TORCH_MATH,
        ),
        AttnBackend.flash: (FLASH_ATTN_3, FLASH_ATTN, TORCH_FLASH),
        AttnBackend.fused: (ENGINE, TORCH_CUDNN, TORCH_EFFICIENT, TORCH_MATH),
        AttnBackend.unfused: (TORCH_MATH,),
        AttnBackend.local: (TORCH_MATH,),
    }
)
"""What each value of --attention-backend may be on a GPU, best first."""


def _attention(config: TransformerConfig, machine: Machine, context_parallel: int, chunk: bool) -> tuple[str, str]:
    """The kernel, and what spoke against the first that was passed over."""
    if machine.device == "cpu":
        return TORCH_CPU, "without a fused kernel for dropout" if config.attention_dropout else ""
    absent = set() if FLASH_ATTN_3 in machine.libraries else {FLASH_ATTN_3}
    if context_parallel > 1 or config.transformer_impl != "transformer_engine" or ENGINE not in machine.libraries:
        absent.add(ENGINE)
    note, last = "", ""
    for kernel in _CANDIDATES[config.attention_backend]:
        if kernel in absent:
            continue
        against = _OBSTACLES[kernel](config, machine, chunk)
        if not against:
            return kernel, note
        last = f"{kernel} {against}"
        note = note or last
    raise UserError(
        f"--attention-backend {config.attention_backend.name} cannot be had: {last}; "
        "valid here are auto, fused, unfused and local."
    )


def _flash_limits(config: TransformerConfig, machine: Machine) -> str:
    """Return what all flash kernels ask for."""
    channels = config.kv_channels or 0
    if config.params_dtype not in (torch.float16, torch.bfloat16):
        return f"needs half precision, not {_name(config.params_dtype)}"
    if machine.capability < (8, 0):
        return f"needs compute capability 8.0, not {machine.capability[0]}.{machine.capability[1]}"
    if channels > 256:
        return f"takes heads of at most 256 channels, not {channels}"
    small = machine.capability in ((8, 6), (8, 7), (8, 9)) or machine.capability[0] == 12
    if small and channels > 192 and (channels <= 224 or config.attention_dropout):
        return f"has no backward for heads of {channels} channels on this GPU"
    return ""


def _flash_attn(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    """From 2.1 on a causal mask ends in the lower right corner, and 2.4.1 brought the deterministic backward."""
    version = machine.libraries.get(FLASH_ATTN)
    if limits := _flash_limits(config, machine):
        return limits
    if version is None:
        return "is not installed"
    return "" if _numbers(version) >= (2, 4, 1) else f"must be at least 2.4.1, not {version or 'of unknown version'}"


def _flash_attn_3(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    channels = config.kv_channels or 0
    if limits := _flash_limits(config, machine):
        return limits
    if machine.capability[0] != 9:
        return "needs a Hopper GPU"
    if channels % 8:
        return f"takes heads of a multiple of 8 channels, not {channels}"
    if config.attention_dropout:
        return "has no dropout"
    return "is left out in deterministic mode" if config.deterministic_mode else ""


def _engine(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    """Say why Transformer Engine cannot be: it draws dropout from megatron-core's random state, which depends on the
    order of work, and copies all keys to another layout, which for chunks would be kept once a chunk."""
    if limits := _flash_limits(config, machine):
        return limits
    if config.attention_dropout:
        return "draws dropout in the order of work"
    if config.deterministic_mode:
        return "is left out in deterministic mode"
    return "copies the keys before a chunk" if chunk else ""


def _torch_flash(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    if not machine.torch_flash:
        return "is not part of this torch"
    return _flash_limits(config, machine)


def _torch_cudnn(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    """As torch asks in its `sdp_utils.cpp`; it has no mask for a chunk but one that is written out."""
    channels, dropout = config.kv_channels or 0, config.attention_dropout
    if machine.cudnn < 90000:
        return "needs cuDNN 9"
    if limits := _flash_limits(config, machine):
        return limits
    if channels % 8 or channels > 128:
        return f"takes heads of a multiple of 8 channels up to 128, not {channels}"
    if dropout and (dropout * 16 % 1 or 91100 < machine.cudnn < 91400):
        return f"has no dropout of {dropout:g}"
    if config.deterministic_mode:
        return "is not deterministic"
    return "has no mask for chunks" if chunk else ""


def _torch_efficient(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    dtype, channels, modern = config.params_dtype, config.kv_channels or 0, machine.capability >= (8, 0)
    if dtype == torch.float64 or (dtype == torch.bfloat16 and not modern):
        return f"has no {_name(dtype)} here"
    unit = 8 if dtype != torch.float32 else 4
    return f"takes heads of a multiple of {unit} channels, not {channels}" if channels % unit else ""


def _torch_math(config: TransformerConfig, machine: Machine, chunk: bool) -> str:
    return ""


_OBSTACLES: Mapping[str, Callable[[TransformerConfig, Machine, bool], str]] = MappingProxyType(
    {
        FLASH_ATTN: _flash_attn,
        FLASH_ATTN_3: _flash_attn_3,
        ENGINE: _engine,
        TORCH_FLASH: _torch_flash,
        TORCH_CUDNN: _torch_cudnn,
        TORCH_EFFICIENT: _torch_efficient,
        TORCH_MATH: _torch_math,
    }
)
"""What speaks against a kernel, as the end of a sentence that begins with its name; nothing: it can be used."""


def _numbers(version: str) -> tuple[int, ...]:
    """2.7.4.post1 to (2, 7, 4)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
