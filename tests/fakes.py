"""Stand-ins for libraries of GPU kernels: the signatures of the real ones, and what they compute, in plain torch.

Each keeps its calls, so that tests see how a library is called where it cannot run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import megatron.core
import torch
from torch import Tensor

ENGINE_IN_CORE = "megatron.core.extensions.transformer_engine"


def lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[b, n, heads, d] and [b, c + n, groups, d] to [b, n, heads, d]: causal attention of the last n tokens."""
    keys, values = (tensor.repeat_interleave(query.size(2) // key.size(2), dim=2) for tensor in (key, value))
    scores = torch.einsum("bnhd,bmhd->bhnm", query, keys) * scale
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(scores.size(-1) - scores.size(-2))
    return torch.einsum("bhnm,bmhd->bnhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)


def packed(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[n, heads, d] and [c + n, groups, d] to [n, heads, d], part by part. queries, keys: first rows of each and the
    end."""
    assert queries.dtype == keys.dtype == torch.int32 and queries[-1] == len(query) and keys[-1] == len(key)
    ends = zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
    parts = [lower_right(query[None, a:b], key[None, c:d], value[None, c:d], scale) for a, b, c, d in ends]
    return torch.cat(parts, dim=1)[0]


class FlashAttention:
    """`flash_attn.flash_attn_func` and `flash_attn_varlen_func`, of version 2.7."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        assert causal and softmax_scale is not None and not return_attn_probs
        assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))
        self.calls.append({"dropout_p": dropout_p, "deterministic": deterministic, "shapes": (q.shape, k.shape)})
        return lower_right(q, k, v, softmax_scale)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal and softmax_scale is not None
        assert (max_seqlen_q, max_seqlen_k) == tuple(int(ends.diff().max()) for ends in (cu_seqlens_q, cu_seqlens_k))
        self.calls.append({"dropout_p": dropout_p, "deterministic": deterministic, "shapes": (q.shape, k.shape)})
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)


class FlashAttention3:
    """`flash_attn_interface.flash_attn_func` and `flash_attn_varlen_func`; as_tuple: with the log-sums, as
    older versions."""

    def __init__(self, as_tuple: bool = False) -> None:
        self.calls: list[tuple[torch.Size, torch.Size]] = []
        self._as_tuple = as_tuple

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert causal and softmax_scale is not None
        self.calls.append((q.shape, k.shape))
        output = lower_right(q, k, v, softmax_scale)
        return (output, output.new_zeros(())) if self._as_tuple else output

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert causal and softmax_scale is not None
        self.calls.append((q.shape, k.shape))
        output = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
        return (output, output.new_zeros(())) if self._as_tuple else output


class TransformerEngine:
    """megatron-core's `TEDotProductAttention`, its `TENorm`, whose module has a state of its own beside torch's
    weights, and its `fused_apply_rotary_pos_emb`.

    made: how each attention was made. rotated: the shape of what was rotated.
    """

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.attended = self.normed = 0
        self.rotated: list[tuple[int, ...]] = []

    def make_attention(self, config: Any, **options: Any) -> Callable[..., Tensor]:
        assert set(options) <= arguments_in_core("TEDotProductAttention", "__init__")
        self.made.append(options)
        scale = options["softmax_scale"] or config.kv_channels**-0.5

        def forward(query: Tensor, key: Tensor, value: Tensor, attention_mask: None, attn_mask_type: Any) -> Tensor:
            assert attn_mask_type.name == "causal" and query.size(0) == key.size(0)
            self.attended += 1
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            return lower_right(query, key, value, scale).transpose(0, 1).flatten(2)

        return forward

    def make_norm(self, config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        engine = self

        class Norm(kind):  # type: ignore[misc, valid-type]
            def forward(self, hidden: Tensor) -> Tensor:
                engine.normed += 1
                return super().forward(hidden)

            def get_extra_state(self) -> Tensor:
                return torch.empty(0)

            def set_extra_state(self, state: Tensor) -> None:
                """Nothing to restore."""

        return Norm(hidden_size, eps=eps)

    def rotate(
        self, t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
    ) -> Tensor:
        """The kernel takes the rows of `freqs`, float32 and dense, from the first one on, and any strides of `t`."""
        assert freqs.dtype == torch.float32 and freqs.is_contiguous() and freqs.shape[1:3] == (1, 1)
        assert freqs.size(0) >= t.size(0) and freqs.size(3) <= t.size(3) and not interleaved
        self.rotated.append(tuple(t.shape))
        cosine, sine = freqs[: t.size(0)].cos().to(t.dtype), freqs[: t.size(0)].sin().to(t.dtype)
        turned, rest = t.tensor_split([freqs.size(3)], dim=-1)
        left, right = turned.chunk(2, dim=-1)
        return torch.cat((turned * cosine + torch.cat((-right, left), dim=-1) * sine, rest), dim=-1)


class FusedNorms:
    """`apex.normalization`."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def norm(self, kind: type[torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        def make(
            normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
        ) -> torch.nn.Module:
            self.made.append(kind.__name__)
            return kind(normalized_shape, eps=eps)

        return make


class WeightGradientKernels(ModuleType):
    """apex's `fused_weight_gradient_mlp_cuda`."""

    def __init__(self) -> None:
        super().__init__("fused_weight_gradient_mlp_cuda")
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == torch.float32
        self._add(inputs, output_gradient, main_grad)

    def wgrad_gemm_accum_fp16(self, inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype in (torch.float16, torch.bfloat16)
        self._add(inputs, output_gradient, main_grad)

    def _add(self, inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        assert inputs.dim() == output_gradient.dim() == 2 and inputs.is_contiguous() and output_gradient.is_contiguous()
        assert main_grad.is_contiguous() and inputs.dtype == output_gradient.dtype
        self.calls += 1
        main_grad += output_gradient.t().to(main_grad.dtype) @ inputs.to(main_grad.dtype)


def arguments_in_core(name: str, method: str) -> set[str]:
    """Names of a method's arguments in megatron-core's Transformer Engine extension, which cannot be imported whole."""
    path = Path(megatron.core.__file__).parent / "extensions" / "transformer_engine.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    (function,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return {argument.arg for argument in function.args.args}


@contextmanager
def installed(**modules: Any) -> Iterator[None]:
    """Let these be imported: names with `__` for dots, and objects whose attributes are the module's."""
    named: dict[str, Any] = {name.replace("__", "."): module for name, module in modules.items()}
    with mock.patch.dict(sys.modules, named):
        yield


def engine_modules(engine: TransformerEngine) -> dict[str, Any]:
    """`transformer_engine`, which only has to be there, and megatron-core's extension for it."""
    extension: Any = ModuleType(ENGINE_IN_CORE)
    extension.TEDotProductAttention, extension.TENorm = engine.make_attention, engine.make_norm
    extension.fused_apply_rotary_pos_emb = engine.rotate
    library, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    return {
        "transformer_engine": library,
        "transformer_engine__pytorch": pytorch,
        ENGINE_IN_CORE.replace(".", "__"): extension,
    }


def apex_modules(norms: FusedNorms) -> dict[str, Any]:
    """`apex` and `apex.normalization`."""
    apex: Any = ModuleType("apex")
    apex.normalization = normalization = ModuleType("apex.normalization")
    normalization.FusedLayerNorm = norms.norm(torch.nn.LayerNorm)  # type: ignore[attr-defined]
    normalization.FusedRMSNorm = norms.norm(torch.nn.RMSNorm)  # type: ignore[attr-defined]
    return {"apex": apex, "apex__normalization": normalization}
