"""Jobs for the fake device: every schedule and every family of options, small."""

from __future__ import annotations

from benchmarks.fake_jobs import Job
from helixpipe.costs.expert_loads import ALIKE

_MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --train-iters 9 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --lr 1e-3 "
    "--eval-iters 0 --num-workers 0 --stall-timeout-seconds 0"
)


def job(
    name: str,
    flags: str,
    p: int = 2,
    t: int = 1,
    c: int = 1,
    d: int = 1,
    ranks: tuple[int, ...] = (),
    steps: int = 2,
    load: str = ALIKE,
) -> Job:
    """A job of p x t x c x d ranks, with bfloat16 and 2 p microbatches unless the flags say otherwise. ranks: those
    that run; all if none are given. load: as --moe-load says."""
    size = p * t * c * d
    flags = f"{_MODEL} --pipeline-model-parallel-size {p} --tensor-model-parallel-size {t} {flags}"
    flags += f" --context-parallel-size {c}" * (c > 1)
    flags += " --bf16" * ("--fp16" not in flags)
    flags += f" --global-batch-size {2 * p * d}" * ("--global-batch-size" not in flags)
    return Job(name, size, tuple(flags.split()), ranks or tuple(range(size)), steps, load)


NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA = (
    f"{NO_DROPOUT} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4"
)
_ONE_F = "--pipeline-schedule 1f1b"
_CHUNKS = "--pipeline-schedule seq1f1b --pipe-sp-splits 2"
_AWAY = "--offload-activations 1 --min-offloaded-tensor-size 1"
_DOCUMENTS = "--variable-seq-lengths --infinipipe-chunks"
_PARTS = "--data-parallel-sharding-strategy optim_grads_params"
EXPERTS = f"{_ONE_F} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"
_ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
_SHARED = "--moe-shared-expert-intermediate-size 128"
_LATENT = (
    f"{NO_DROPOUT} --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--v-head-dim 32 --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
)
CORE = [
    job("tensor parallel", f"{_CHUNKS} --micro-batch-size 2 --global-batch-size 8 --sequence-parallel {LLAMA}", t=2),
    job("split backwards", f"--pipeline-schedule zb1p --sequence-parallel {LLAMA}", t=2, ranks=(0, 1)),
    job("infinipipe", f"--pipeline-schedule infinipipe {LLAMA}"),
    job("parts", f"{_ONE_F} {_PARTS} --recompute-granularity selective {LLAMA}", d=2),
    job(
        "offload",
        f"--pipeline-schedule sppo --pipe-sp-splits 4 {_AWAY} {LLAMA}",
    ),
    job(
        "experts on two",
        f"{EXPERTS} {_ALL_TO_ALL} {_SHARED} --expert-model-parallel-size 2 {LLAMA}",
        d=2,
        ranks=(0, 1),
        load="zipf:2",
    ),
]
"""What `make test` runs: the options that have the most of their own on a GPU."""

_OPTIONS = [
    job("experts", f"{EXPERTS} {_ALL_TO_ALL} {LLAMA}"),
    job("experts on four", f"{EXPERTS} {_ALL_TO_ALL} --expert-model-parallel-size 4 {LLAMA}", d=4),
    job(
        "gathered experts",
        f"{EXPERTS} --moe-token-dispatcher-type allgather --expert-model-parallel-size 2 {LLAMA}",
        d=2,
    ),
    job(
        "latent attention and experts",
        f"{EXPERTS} {_ALL_TO_ALL} {_SHARED} --expert-model-parallel-size 2 --moe-layer-freq ([0]+[1]*3) {_LATENT}",
        d=2,
    ),
    job(
        "tensor parallel experts",
        f"{EXPERTS} {_ALL_TO_ALL} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
        f"{LLAMA}",
        t=2,
    ),
    job(
        "experts with a capacity",
        f"{EXPERTS} {_ALL_TO_ALL} --moe-expert-capacity-factor 1.2 --expert-model-parallel-size 2 {LLAMA}",
        d=2,
        load="zipf:2",
    ),
    job("experts and p2p", f"{EXPERTS} {_ALL_TO_ALL} --expert-model-parallel-size 2 {LLAMA}", c=2),
    job("pairs", f"{_ONE_F} --sequence-parallel --overlap-tp-comm pairs --num-layers 6 {LLAMA}", p=3, t=2),
    job("further tokens", f"{_CHUNKS} --num-layers 6 --mtp-num-layers 1 {LLAMA}", p=3),
    job("dropout", f"{_ONE_F} --sequence-parallel", t=2),
    job("halves", f"{_ONE_F} --sequence-parallel --overlap-tp-comm halves {LLAMA}", t=2),
    job("a2a", f"{_ONE_F} --cp-comm-type a2a {LLAMA}", c=2),
    job("p2p", f"{_CHUNKS} --cp-comm-type p2p {LLAMA}", c=2),
    job("distributed optimizer", f"{_ONE_F} --use-distributed-optimizer --overlap-grad-reduce", d=2),
    job("fp16", "--pipeline-schedule zb1p --fp16"),
    job("full", f"{_ONE_F} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    job("post-validation", "--pipeline-schedule zbv --enable-optimizer-post-validation"),
    job("packing", f"{_ONE_F} --reset-attention-mask --reset-position-ids --eod-mask-loss {LLAMA}"),
    job("documents", f"--pipeline-schedule infinipipe {_DOCUMENTS} 3 {LLAMA}", p=4, steps=6),
    job("whole documents", f"{_ONE_F} {_DOCUMENTS} 1 {LLAMA}", p=4, steps=6),
    job("split head", f"{_ONE_F} --pipeline-vocab-parallel split {LLAMA}"),
    job("spread head", f"{_ONE_F} --pipeline-vocab-parallel spread {LLAMA}"),
    job("graphs", f"--pipeline-schedule 1f1b --cuda-graphs auto --global-batch-size 8 {LLAMA}"),
    job("graphs of chunks", f"{_CHUNKS} --cuda-graphs auto --global-batch-size 8 {LLAMA}"),
    job("tied", f"{_ONE_F} --use-distributed-optimizer", p=4, d=2, ranks=(0, 3, 7)),
]
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
_LAYERS = "--num-layers 8"
_SCHEDULES = {
    "gpipe": "",
    "adapipe": "",
    "interleaved-1f1b": f"{_VIRTUAL} {_LAYERS}",
    "chimera": "",
    "hanayo": f"{_VIRTUAL} {_LAYERS}",
    "zb2p": "",
    "v-half": _LAYERS,
    "v-min": _LAYERS,
    "zb-interleaved": f"{_VIRTUAL} {_LAYERS}",
    "terapipe": "--pipe-sp-splits 4",
    "seq1f1b-interleaved": f"--pipe-sp-splits 2 {_VIRTUAL} {_LAYERS}",
    "seq1f1b-zb": "--pipe-sp-splits 4",
    "helix": "",
    "weipipe-naive": "",
    "weipipe": "",
    "wzb1": "",
    "wzb2": "",
}
MORE = [
    *_OPTIONS,
    *(job(name, f"--pipeline-schedule {name} {LLAMA} {flags}", p=4) for name, flags in _SCHEDULES.items()),
]
