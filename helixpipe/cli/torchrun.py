"""The command that trains a model of the presets as it was planned."""

from __future__ import annotations

from helixpipe.costs.attention_kernels import CUDNN, UNFUSED
from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.layer_patterns import pattern_flags
from helixpipe.costs.models import OFF, ModelShape
from helixpipe.costs.verdict import tensor_limit
from helixpipe.planning.search.documents import bounds_of
from helixpipe.planning.search.flags import documents_flags, limit_in_gib, setting_flags, sizes_flags
from helixpipe.planning.search.space import Candidate, Question

_BACKENDS = {UNFUSED: "unfused", CUDNN: "fused"}
"""Training's words for kernels of attention that it does not choose by itself."""


def model_flags(model: ModelShape) -> list[str]:
    """Return training's flags for a model, of one word or two each; mock tokens of its vocabulary."""
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
    ]
    if model.groups != model.heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.groups}"]
    flags += [
        f"--seq-length {model.seq_length}",
        f"--max-position-embeddings {model.seq_length}",
        f"--position-embedding-type {model.positions}",
        f"--normalization {model.norm}",
    ]
    flags += pattern_flags(model.window, model.windowed, model.unrotated)
    if model.experts:
        flags += [
            f"--num-experts {model.experts}",
            f"--moe-layer-freq {_pattern(model)}",
            f"--moe-ffn-hidden-size {model.expert_ffn}",
            f"--moe-router-topk {model.topk}",
            "--moe-token-dispatcher-type alltoall",
        ]
        flags += [f"--moe-shared-expert-intermediate-size {model.shared_ffn}"] * bool(model.shared_ffn)
    if model.kv_rank:
        flags += [
            "--multi-latent-attention",
            f"--kv-lora-rank {model.kv_rank}",
            f"--qk-head-dim {model.own_channels}",
            f"--qk-pos-emb-head-dim {model.shared_channels}",
            f"--v-head-dim {model.value_channels}",
            "--rope-type rope",
        ]
    for flag, given in (
        (f"--q-lora-rank {model.q_rank}", model.q_rank > 0),
        (f"--mtp-num-layers {model.further}", model.further > 0),
        (f"--kv-channels {model.head_channels}", model.head_channels > 0),
        ("--add-qkv-bias", model.qkv_bias),
        ("--qk-layernorm", model.qk_norm),
        ("--attention-output-gate", model.output_gate),
        ("--softmax-type learnable", model.sinks),
        ("--apply-layernorm-1p", model.centered),
        ("--swiglu", model.gated),
        ("--disable-bias-linear", not model.bias),
        ("--untie-embeddings-and-output-weights", not model.tied),
    ):
        flags += [flag] * given
    return [
        *flags,
        "--attention-dropout 0",
        "--hidden-dropout 0",
        "--mock-data",
        "--tokenizer-type NullTokenizer",
        f"--vocab-size {max(1, model.vocab - 1)}",  # and the end of a document
    ]


def _pattern(model: ModelShape) -> str:
    """Return which layers have experts: 1 where all have."""
    mixed = [model.mixed[layer % len(model.mixed)] for layer in range(model.layers)]
    return str(mixed).replace(" ", "") if 0 in mixed else "1"


def torchrun_command(question: Question, candidate: Candidate) -> str:
    """Return a command for each node, with a line for each group of flags."""
    hardware, host = question.hardware, question.hardware.host_memory
    nodes = question.gpus // hardware.gpus_per_node
    several = " --node-rank $NODE_RANK --master-addr $MASTER_ADDR" if nodes > 1 else ""
    schedule = question.catalogue[candidate.setting.schedule]
    division = bounds_of(question).division(candidate.sizes, candidate.setting)
    on_host, layout = question.adam_on_host, question.layout
    backend = _BACKENDS.get(layout.attention_kernel)
    limits = [
        *[f"--optimizer-cpu-offload --optimizer-offload-fraction {on_host:g}"] * bool(on_host),
        f"--hardware {hardware.name}",
        *[f"--memory-limit {limit_in_gib(question.limit)}"]
        * (question.limit != tensor_limit(find_hardware(hardware.name).memory)),
        *[f"--host-memory {host / GIB:g}"] * (host != find_hardware(hardware.name).host_memory),
    ]
    training = [
        *documents_flags(question),
        *[f"--cuda-graphs {layout.cuda_graphs}"] * (layout.cuda_graphs != OFF),
        *[f"--attention-backend {backend}"] * (backend is not None),
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--global-batch-size {question.sequences}",
        "--train-iters 10",
        "--lr 1e-4",
        "--bf16",
    ]
    lines = [
        f"torchrun --nproc-per-node {hardware.gpus_per_node} --nnodes {nodes}{several} pretrain_gpt.py",
        " ".join(model_flags(question.model)),
        " ".join(sizes_flags(question, candidate.sizes)),
        " ".join([*setting_flags(schedule, candidate.setting, division, question.model.further), *limits]),
        " ".join(training),
    ]
    return " \\\n    ".join(lines)
