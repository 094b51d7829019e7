"""Tiny random models of each family, made by transformers, and what the ranks of test_families.py run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from helixpipe.costs.model_config import ModelConfig
from helixpipe.model import Microbatch, PipelineModel, UnitContext
from helixpipe.model.options import layers_of
from helixpipe.program.stages import model_pieces
from megatron.pretrain.checkpoint.checkpointing import Checkpointer
from megatron.pretrain.checkpoint.from_huggingface import KEPT, checkpoint_place, import_folder, load_weights
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.to_huggingface import Checkpoint, export_folder
from megatron.pretrain.config import Config, core
from megatron.pretrain.huggingface.folder import Folder
from megatron.pretrain.huggingface.weights import EXPERT_BIAS, Weights
from tests.model.common import BATCH, SEQUENCE, gradients_of, number_or_infinity, run_parts, score, set_parallel
from tests.model.equality import whole

LAYERS, VOCABULARY = 2, 51
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
    "experts_implementation": "eager",  # the default has no float64
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
_YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 20, "beta_fast": 4.0, "beta_slow": 0.1}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "tie_word_embeddings": False}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_V3 = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}),
    "llama3.2": (
        "Llama",
        {
            "head_dim": 10,
            "tie_word_embeddings": True,
            "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 30},
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}}),
    "qwen3": ("Qwen3", {"head_dim": 12, "rms_norm_eps": 1e-4, "rope_parameters": {**_YARN, "rope_theta": 1000.0}}),
    "qwen3-yarn": (
        "Qwen3",
        {"head_dim": 8, "rope_parameters": {**_YARN, "rope_theta": 900.0, "attention_factor": 1.7, "truncate": False}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "mistral-window": ("Mistral", {"sliding_window": 5, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "tie_word_embeddings": False}),
    "qwen3-experts": ("Qwen3Moe", {**_EXPERTS, "head_dim": 12, "norm_topk_prob": True, "decoder_sparse_step": 1}),
    "qwen3-some-experts": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "deepseek-v2": ("DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": ("DeepseekV3", {**_DEEPSEEK, **_V3}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**_DEEPSEEK, **_V3, "rope_parameters": {**_YARN, "rope_theta": 900.0, "mscale": 0.8, "mscale_all_dim": 0.6}},
    ),
    "qwen3-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}
"""The class in transformers, and what differs from `_SHAPE`."""


class _Wide(TorchFunctionMode):
    """transformers' RMSNorm casts to float32; of float64 that is left out, so that it stays what it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def batch() -> Microbatch:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    return Microbatch(tokens, tokens.roll(-1, 1), torch.ones(BATCH, SEQUENCE))


def make_theirs(name: str, folder: Path) -> dict[str, Any]:
    """Save a model of transformers with random weights; its logits [s, b, v], loss and gradients of `score`."""
    import transformers

    kind, changes = FAMILIES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**{**_SHAPE, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases begin at 0 and norms at 1
            parameter += 0.2 * torch.randn_like(parameter)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer += 0.2 * torch.randn_like(buffer)
    model.save_pretrained(folder, max_shard_size="40KB" if name in ("mistral", "qwen2") else "1GB")
    (folder / "tokenizer.json").write_text('{"of": "nobody"}')
    with _Wide():
        logits = model(batch().tokens).logits.transpose(0, 1)
    value = score(logits)
    value.backward()
    gradients = of_each_expert({key: p.grad for key, p in model.named_parameters()}, kind)
    labels = batch().labels.t().reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits.detach().reshape(-1, VOCABULARY), labels, reduction="sum").item()
    return {"logits": logits.detach(), "gradients": gradients, "loss": loss}


def of_each_expert(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """The tensors of transformers' modules by their names in files, where each expert has its own."""
    of, names = (
        ("block_sparse_moe", ("w1", "w3", "w2"))
        if kind == "Mixtral"
        else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    tensors = {}
    for key, tensor in found.items():
        layer, fused, last = key.partition(".mlp.experts.")
        if not fused:
            tensors[key.replace(".mlp.gate.", f".{of}.gate.")] = tensor
            continue
        for number, own in enumerate(tensor):
            parts = own.chunk(2) if last == "gate_up_proj" else (own,)
            for name, part in zip(names[:2] if len(parts) == 2 else names[2:], parts, strict=True):
                tensors[f"{layer}.{of}.experts.{number}.{name}.weight"] = part
    return tensors


def logits_of(folder: Path) -> torch.Tensor:
    """Return what transformers makes of a folder: [s, b, v]."""
    import transformers

    model = (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", experts_implementation="eager"
        )
        .double()
        .eval()
    )
    with _Wide(), torch.no_grad():
        return model(batch().tokens).logits.transpose(0, 1)


def configuration(arguments: dict[str, Any], tp: int) -> Config:
    names = ModelConfig.__dataclass_fields__
    model = ModelConfig(**{name: value for name, value in arguments.items() if name in names}, seq_length=SEQUENCE)
    config = Config(model=model).replace("parallel", tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    return config.replace("data", vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY + VOCABULARY % tp)


def make_ours(folder: Path, tp: int, first: int = 0, last: int | None = None) -> tuple[PipelineModel, dict[str, Any]]:
    """The model as training builds it, in float64, with weights drawn at random: of its chain some pieces."""
    arguments = Folder(folder).arguments
    config = configuration(arguments, tp)
    transformer, gpt = core.transformer_config(config), core.gpt_options(config)
    transformer.params_dtype = torch.float64
    return PipelineModel(transformer, gpt, model_pieces(layers_of(transformer))[first:last]), arguments


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """An expert that no token goes to has a gradient of zeros."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    found = []
    for name in theirs:
        error = (ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-30)
        found.append((number_or_infinity(float(error)), name))
    return max(found)


def by_their_names(model: PipelineModel, found: dict[str, torch.Tensor], arguments: Any) -> dict[str, torch.Tensor]:
    """Tensors of ours, whole, under their names."""
    weights, tensors = Weights(arguments), {}
    by_place = {checkpoint_place(name, model): tensor for name, tensor in found.items()}
    for weight in weights:
        if (weight.layer, weight.expert, weight.key) not in by_place and weight.key.endswith(EXPERT_BIAS):
            continue  # which has no gradient
        parts = weights.split(weight, by_place[weight.layer, weight.expert, weight.key])
        tensors |= dict(zip(weight.names, parts, strict=True))
    return tensors


def compare_one(name: str, folder: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    """Whole, cut everywhere, on two ranks' models, and in chunks."""
    results: dict[str, Any] = {}
    model, arguments = make_ours(folder, 1)
    load_weights(model, folder)
    chain = model.pieces
    (state,) = model.run(chain[:-1], (), batch(), UnitContext(0, 0))
    results["logits"] = worst({"": model.logits(state)}, {"": theirs["logits"]})
    ours = model.run(chain, (), batch(), UnitContext(0, 0))[0].item()
    results["loss"] = (abs(ours / theirs["loss"] - 1), "loss")
    run_parts([(model, (piece,)) for piece in chain], batch(), score)
    results["every piece"] = worst(by_their_names(model, gradients_of(model), arguments), theirs["gradients"])
    for cut in (3, 4, 8):
        parts = [(part, part.pieces) for part in (make_ours(folder, 1, *ends)[0] for ends in ((0, cut), (cut, None)))]
        for part, _ in parts:
            load_weights(part, folder)
        run_parts(parts, batch(), score)
        found = by_their_names(model, gradients_of(*(part for part, _ in parts)), arguments)
        results[f"cut {cut}"] = worst(found, theirs["gradients"])
    return results


def compare(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Differences from transformers, relative to the largest element, and where; then of folders written back."""
    set_parallel(tp=1)
    results: dict[str, Any] = {}
    for name in FAMILIES if rank == 0 else ():  # transformers saves nothing on other ranks
        torch.save(make_theirs(name, Path(path) / name), Path(path) / name / "expected.pt")
    torch.distributed.barrier()
    for name in list(FAMILIES)[rank::world_size]:
        folder = Path(path) / name
        theirs = torch.load(folder / "expected.pt")
        results |= {f"{name} {case}": value for case, value in compare_one(name, folder, theirs).items()}
        imported, exported = folder / "imported", folder / "exported"
        import_folder(Folder(folder), imported)
        export_folder(Checkpoint(imported), exported)
        results[f"{name} files"] = [
            each.name
            for each in sorted(folder.iterdir())
            if each.is_file() and each.name != "expected.pt" and not _equal(each, exported / each.name)
        ]
        shutil.rmtree(imported / KEPT)
        export_folder(Checkpoint(imported), folder / "anew")
    torch.distributed.barrier()
    for name in FAMILIES if rank == 0 else ():
        theirs = torch.load(Path(path) / name / "expected.pt")
        results[f"{name} anew"] = worst({"": logits_of(Path(path) / name / "anew")}, {"": theirs["logits"]})
    set_parallel(tp=2)
    for name in FAMILIES:
        folder = Path(path) / name
        theirs = torch.load(folder / "expected.pt")
        model, arguments = make_ours(folder, 2)
        load_weights(model, folder)
        run_parts([(model, (piece,)) for piece in model.pieces], batch(), lambda logits: score(logits, rank))
        gradients = whole(model, gradients_of(model), partial_sums=True)
        results[f"{name} tp2"] = worst(by_their_names(model, gradients, arguments), theirs["gradients"])
        other, _ = make_ours(folder, 2)
        loaded = Checkpointer(CheckpointOptions(load=str(folder / "imported"))).load(other, None, None)
        assert loaded is not None and loaded[1]["num_layers"] == LAYERS
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        results[f"{name} checkpoint"] = all(torch.equal(one, two) for one, two in pairs)
    return results


def _equal(one: Path, two: Path) -> bool:
    return two.is_file() and one.read_bytes() == two.read_bytes()
