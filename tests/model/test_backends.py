"""Which kernels are chosen, for machines that have other libraries and GPUs than this one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from helixpipe.common.errors import UserError
from helixpipe.model import backends
from helixpipe.model.backends import Kernels, Machine, choose, fuses_weight_gradients, transport_name
from tests.model.common import make_config

A100, H100, T4, RTX = (8, 0), (9, 0), (7, 5), (8, 9)
FLASH = {"flash-attn": "2.7.4.post1"}
FLASH_3 = {**FLASH, "flash-attn-3": "3.0.0b1"}
ENGINE = {"transformer-engine": "2.9.0"}
APEX = {"apex": "0.1", "fused_weight_gradient_mlp_cuda": "0.1"}


def gpu(capability: tuple[int, int] = A100, libraries: Mapping[str, str] | None = None, **facts: Any) -> Machine:
    return Machine("cuda", capability, libraries or {}, **{"cudnn": 91002, **facts})


def model(backend: str = "auto", **changes: Any) -> TransformerConfig:
    """bfloat16 with heads of 64 channels, no dropout, local implementation."""
    settings: dict[str, Any] = {
        "params_dtype": torch.bfloat16,
        "hidden_size": 256,
        "transformer_impl": "local",
        "attention_backend": AttnBackend[backend],
    }
    return make_config("llama", **{**settings, **changes})


@pytest.mark.parametrize(
    ("machine", "config", "attention", "note"),
    [
        (gpu(), model(), "torch flash", "flash-attn is not installed"),
        (gpu(libraries=FLASH), model(), "flash-attn", ""),
        (
            gpu(libraries={"flash-attn": "2.0.9"}),
            model(),
            "torch flash",
            "flash-attn must be at least 2.4.1, not 2.0.9",
        ),
        (
            gpu(libraries={"flash-attn": ""}),
            model(),
            "torch flash",
            "flash-attn must be at least 2.4.1, not of unknown",
        ),
        (gpu(H100, FLASH_3), model(), "flash-attn-3", ""),
        (gpu(A100, FLASH_3), model(), "flash-attn", "flash-attn-3 needs a Hopper GPU"),
        (gpu(H100, FLASH_3), model(attention_dropout=0.1), "flash-attn", "flash-attn-3 has no dropout"),
        (gpu(H100, FLASH_3), model(deterministic_mode=True), "flash-attn", "flash-attn-3 is left out in determin"),
        (gpu(H100, FLASH_3), model(kv_channels=60), "flash-attn", "flash-attn-3 takes heads of a multiple of 8"),
        (gpu(libraries=FLASH), model(params_dtype=torch.float32), "torch efficient", "flash-attn needs half precision"),
        (gpu(libraries=FLASH), model(params_dtype=torch.float64), "torch math", "flash-attn needs half precision"),
        (gpu(libraries=FLASH), model(kv_channels=512), "torch efficient", "flash-attn takes heads of at most 256"),
        (gpu(T4, FLASH), model(params_dtype=torch.float16), "torch efficient", "flash-attn needs compute capability 8"),
        (gpu(T4, FLASH), model(), "torch math", "flash-attn needs compute capability 8.0, not 7.5"),
        (gpu(RTX, FLASH), model(kv_channels=224), "torch efficient", "flash-attn has no backward for heads of 224"),
        (gpu(RTX, FLASH), model(kv_channels=256), "flash-attn", ""),
        (gpu(torch_flash=False), model(), "torch cuDNN", "flash-attn is not installed"),
        (gpu(libraries={**FLASH, **ENGINE}), model(), "flash-attn", ""),
        (gpu(libraries=ENGINE), model(transformer_impl="transformer_engine"), "transformer-engine", ""),
        (
            gpu(libraries={**FLASH, **ENGINE}),
            model(transformer_impl="transformer_engine", attention_dropout=0.1),
            "flash-attn",
            "transformer-engine draws dropout in the order of work",
        ),
        (gpu(libraries=FLASH), model("flash"), "flash-attn", ""),
        (gpu(libraries=ENGINE), model("flash", transformer_impl="transformer_engine"), "torch flash", "flash-attn is "),
        (gpu(libraries=FLASH), model("fused"), "torch cuDNN", ""),
        (gpu(libraries=ENGINE), model("fused", transformer_impl="transformer_engine"), "transformer-engine", ""),
        (gpu(cudnn=0), model("fused"), "torch efficient", "torch cuDNN needs cuDNN 9"),
        (gpu(), model("fused", deterministic_mode=True), "torch efficient", "torch cuDNN is not deterministic"),
        (gpu(), model("fused", attention_dropout=0.1), "torch efficient", "torch cuDNN has no dropout of 0.1"),
        (gpu(), model("fused", attention_dropout=0.125), "torch cuDNN", ""),
        (gpu(), model("fused", kv_channels=160), "torch efficient", "torch cuDNN takes heads of a multiple of 8"),
        (gpu(libraries=FLASH), model("unfused"), "torch math", ""),
        (gpu(libraries=ENGINE), model("local", transformer_impl="transformer_engine"), "torch math", ""),
    ],
)
def test_attention_of_whole_sequences(machine: Machine, config: TransformerConfig, attention: str, note: str) -> None:
    kernels = choose(config, machine)
    assert kernels.attention == attention
    assert kernels.attention_note.startswith(note) and bool(kernels.attention_note) == bool(note)


@pytest.mark.parametrize(
    ("machine", "config", "attention", "note"),
    [
        (gpu(), model(), "torch flash", "flash-attn is not installed"),
        (gpu(libraries=FLASH), model(), "flash-attn", ""),
        (gpu(H100, FLASH_3), model(), "flash-attn-3", ""),
        (gpu(), model("fused"), "torch efficient", "torch cuDNN has no mask for chunks"),
        (
            gpu(libraries={**FLASH, **ENGINE}),
            model(transformer_impl="transformer_engine"),
            "flash-attn",
            "transformer-engine copies the keys before a chunk",
        ),
        (gpu(libraries=FLASH), model("unfused"), "torch math", ""),
    ],
)
def test_attention_of_chunks(machine: Machine, config: TransformerConfig, attention: str, note: str) -> None:
    kernels = choose(config, machine)
    assert (kernels.chunk_attention, kernels.chunk_attention_note) == (attention, note)


@pytest.mark.parametrize(
    ("machine", "config", "why"),
    [
        (gpu(libraries=FLASH), model("flash", params_dtype=torch.float32), "torch flash needs half precision, not fl"),
        (gpu(T4), model("flash", params_dtype=torch.float16), "torch flash needs compute capability 8.0, not 7.5"),
        (gpu(), model("flash", kv_channels=320), "torch flash takes heads of at most 256 channels, not 320"),
        (gpu(torch_flash=False), model("flash"), "torch flash is not part of this torch"),
    ],
)
def test_flash_means_a_flash_kernel_or_an_error(machine: Machine, config: TransformerConfig, why: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(config, machine)
    message = str(caught.value)
    assert message.startswith(f"--attention-backend flash cannot be had: {why}") and "\n" not in message
    assert message.endswith("valid here are auto, fused, unfused and local.")


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused", "local"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_the_cpu_every_backend_is_torchs_and_accepted(backend: str, dropout: float) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        kernels = choose(model(backend, attention_dropout=dropout, params_dtype=dtype), Machine())
        assert kernels.attention == kernels.chunk_attention == "torch CPU" and kernels.norm == "torch"
        assert bool(kernels.attention_note) == bool(dropout)


@pytest.mark.parametrize(
    ("libraries", "impl", "norm"),
    [
        ({}, "local", "torch"),
        (APEX, "local", "apex"),
        (ENGINE, "local", "torch"),
        (ENGINE, "transformer_engine", "transformer-engine"),
        ({**ENGINE, **APEX}, "transformer_engine", "transformer-engine"),
        (APEX, "transformer_engine", "apex"),
    ],
)
def test_norms(libraries: dict[str, str], impl: str, norm: str) -> None:
    assert choose(model(transformer_impl=impl), gpu(libraries=libraries)).norm == norm
    assert choose(model(transformer_impl=impl, params_dtype=torch.float64), gpu(libraries=libraries)).norm == "torch"


def test_a_missing_transformer_engine_gives_one_warning() -> None:
    asked = model(transformer_impl="transformer_engine")
    assert choose(asked, gpu(libraries=ENGINE)).warning == choose(model(), gpu()).warning == ""
    start = "--transformer-impl transformer_engine: Transformer Engine"
    assert choose(asked, gpu()).warning == f"{start} is not installed; layers are those of local."
    assert choose(asked, Machine()).warning == f"{start} needs a GPU; layers are those of local."


def test_weight_gradients_are_fused_where_apex_has_the_kernel() -> None:
    assert fuses_weight_gradients(gpu(libraries=APEX))
    assert not fuses_weight_gradients(gpu(libraries=FLASH))
    assert not fuses_weight_gradients(Machine(libraries=APEX))


@pytest.mark.parametrize(
    ("machine", "fuse", "dtype", "rope"),
    [
        (gpu(libraries=ENGINE), True, torch.bfloat16, "transformer-engine"),
        (gpu(libraries=ENGINE), True, torch.float32, "transformer-engine"),
        (gpu(libraries=ENGINE), True, torch.float64, "torch"),
        (gpu(libraries=ENGINE), False, torch.bfloat16, "torch"),
        (gpu(libraries={"transformer-engine": "1.3.0"}), True, torch.bfloat16, "torch"),
        (gpu(libraries={"transformer-engine": ""}), True, torch.bfloat16, "torch"),
        (gpu(libraries=FLASH), True, torch.bfloat16, "torch"),
        (Machine(), True, torch.bfloat16, "torch"),
    ],
)
def test_rope_is_one_kernel_where_the_engine_is(machine: Machine, fuse: bool, dtype: torch.dtype, rope: str) -> None:
    config = model(params_dtype=dtype)
    config.apply_rope_fusion = fuse  # given, the class looks for the library
    kernels = choose(config, machine)
    assert kernels.rope == rope
    said = kernels.line(config, chunked=False, transport="nccl", gradients=torch.float32)
    assert ("rope transformer-engine 2.9.0" in said) == (rope != "torch")


def line(config: TransformerConfig, machine: Machine, chunked: bool = False) -> str:
    transport = transport_name("nccl", True, (2, 27, 3))
    return choose(config, machine).line(config, chunked=chunked, transport=transport, gradients=torch.float32)


def test_the_line_that_says_what_is_in_use() -> None:
    fused = model(bias_activation_fusion=True, gradient_accumulation_fusion=True)
    assert line(fused, gpu(H100, {**FLASH, **APEX})) == (
        "attention flash-attn 2.7.4.post1, norm apex 0.1 RMSNorm, linear megatron-core + fused weight gradients, "
        "activation fused, transport nccl 2.27.3, gradients float32"
    )
    plain = model("fused", transformer_impl="transformer_engine")
    assert line(plain, gpu(H100, ENGINE)) == (
        "attention transformer-engine 2.9.0, norm transformer-engine 2.9.0 RMSNorm, linear megatron-core, "
        "activation not fused, transport nccl 2.27.3, gradients float32"
    )
    assert line(plain, gpu(H100, ENGINE), chunked=True).startswith(
        "attention torch efficient (transformer-engine copies the keys before a chunk), norm"
    )


def test_the_line_on_the_cpu() -> None:
    config = make_config("gpt", params_dtype=torch.bfloat16)
    assert choose(config, Machine()).line(
        config, chunked=True, transport=transport_name("gloo", False), gradients=torch.bfloat16
    ) == (
        "attention torch CPU, norm torch LayerNorm, linear megatron-core, activation not fused, transport gloo, "
        "gradients bfloat16"
    )
    assert transport_name("gloo", True) == "gloo through host memory"


# ---------------------------------------------------------------------------------------------------- what is installed


def test_this_machine() -> None:
    here = Machine.here()
    assert here.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert isinstance(choose(model(), here), Kernels)


def package(folder: Path, name: str, version: str | None) -> None:
    """A regular package, and what pip leaves beside it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise ImportError('looking must not import')")
    if version is not None:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_libraries_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "flash_attn", "2.8.3")
    package(tmp_path, "transformer_engine", None)
    package(tmp_path, "apex", "0.9.10")  # another project's; NVIDIA's has the module of the kernels as well
    (tmp_path / "flash_attn_interface").mkdir()  # a folder, no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    found = {name: backends._installed(library) for name, library in backends.LIBRARIES.items()}
    assert found == {
        "flash-attn": "2.8.3",
        "flash-attn-3": None,
        "transformer-engine": "",
        "apex": None,
        "fused_weight_gradient_mlp_cuda": None,
    }
    (tmp_path / "fused_layer_norm_cuda.py").write_text("")
    importlib.invalidate_caches()
    assert backends._installed(backends.LIBRARIES["apex"]) == "0.9.10"


def test_a_library_built_for_another_torch_is_a_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "flash_attn", "2.8.3")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"flash-attn is installed, but importing flash_attn fails \(looking must not"):
        backends.load("flash-attn", "flash_attn")
