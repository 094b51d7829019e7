"""Flags of others: Megatron-LM's that this project does not have, and other names of those it has. Data.

ALIASES: flags of papers' own code -> the words that say the same here.
READ_AS: a flag with its value -> what says the same here; one warning names them all.
IGNORED: accepted because ignoring them changes no result; one warning names them all. What asks for memory that would
         not be saved is not among them: a run that does not fit should say so at once.
LATER: parts of the command line that belong to work not finished yet; refused, saying what is missing.
REFUSED: they ask for something this project does not do; refused, saying what (in `refused`).
NEUTRAL: values at which a LATER or REFUSED flag asks for nothing, and is accepted without a word.
REFUSED_FAMILIES, IGNORED_FAMILIES: the same for every flag that begins so.
When a flag is implemented its line goes away here and a field appears in one of the configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron.pretrain.config.refused import REFUSED as REFUSED
from megatron.pretrain.config.refused import REFUSED_FAMILIES as REFUSED_FAMILIES
from megatron.pretrain.config.refused import each_for

ALIASES: Mapping[str, str] = MappingProxyType(
    {"--checkpoint-without-attn": "--recompute-granularity without-attention"}
)
"""HelixPipe's authors', besides those that the catalogue's entry has. Seq1F1B's are the flags' own names here."""


class Reading(NamedTuple):
    """What a flag of Megatron-LM means here. words: flags with their values; why: a clause for the warning."""

    words: tuple[str, ...]
    why: str


_FULL = ("--recompute-granularity", "full")
_FORMAT = Reading(("--ckpt-format", "torch_dist"), "the one format that is written")
_OLDER = "an older name"

READ_AS: Mapping[tuple[str, ...], Reading] = MappingProxyType(
    {
        ("--ckpt-format", "torch"): _FORMAT,
        ("--ckpt-format", "torch_dcp"): _FORMAT,
        ("--ckpt-format", "zarr"): _FORMAT,
        ("--ckpt-format", "fsdp_dtensor"): _FORMAT,
        ("--use-custom-fsdp",): Reading(("--use-megatron-fsdp",), _OLDER),
        ("--distributed-backend", "nccl2"): Reading(("--distributed-backend", "nccl"), "NCCL is reached in one way"),
        ("--checkpoint-activations",): Reading(_FULL, _OLDER),
        ("--activations-checkpoint-method", "uniform"): Reading(_FULL, _OLDER),
        ("--activations-checkpoint-method", "block"): Reading((*_FULL, "--recompute-method", "block"), _OLDER),
        ("--tokenizer-type", "SFTTokenizer"): Reading(
            ("--tokenizer-type", "HuggingFaceTokenizer"), "--sft says that there are conversations"
        ),
        ("--fine-grained-activation-offloading",): Reading(("--offload-activations", "1"), "a share of 1 is all of it"),
    }
    | {
        ("--tokenizer-library", library): Reading(("--tokenizer-type", kind), "the type says the library")
        for library, kind in (
            ("byte-level", "ByteLevelTokenizer"),
            ("huggingface", "HuggingFaceTokenizer"),
            ("null", "NullTokenizer"),
            ("null-text", "NullTokenizer"),
            ("sentencepiece", "GPTSentencePieceTokenizer"),
            ("tiktoken", "TikTokenizer"),
        )
    }
)
"""The flag on the right still counts where it is given itself."""


_FUSION = "kernels are chosen for you; fused and unfused agree up to rounding"
_TP_OVERLAP = "tensor-parallel communication overlaps no computation yet, so a step takes as long as without"
_DATA_PARALLEL = "gradients are reduced and weights gathered once at the edge of a step"
_P2P = "pipeline messages follow from the schedule"
_CHECKPOINT = "checkpoints are always torch_dist and can be loaded at any parallel sizes"
_ONE_LOGGER = "one-logger is an internal tool of NVIDIA"
_SHARDS = "weights are gathered around each op, stage by stage, and let go after it"
_GC = "Python's garbage collector is left alone"
_RERUN = "results are not recomputed to look for faults"
_STRAGGLER = "stragglers are not tracked"
_DEFAULT_HERE = "this is always so here"

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "--no-masked-softmax-fusion": _FUSION,
        "--no-persist-layer-norm": _FUSION,
        "--cross-entropy-loss-fusion": _FUSION,
        "--cross-entropy-fusion-impl": _FUSION,
        "--use-te-activation-func": _FUSION,
        "--use-fused-weighted-squared-relu": _FUSION,
        "--use-flash-attn": "flash attention is used wherever it can be; --attention-backend flash insists on it",
        "--use-mcore-models": _DEFAULT_HERE,
        "--apply-query-key-layer-scaling": "scores are not rescaled; mathematically it changes nothing",
        "--no-async-tensor-model-parallel-allreduce": "Megatron-LM ignores it too",
        "--tp-comm-overlap": _TP_OVERLAP,
        "--tp-comm-overlap-cfg": _TP_OVERLAP,
        "--disable-tp-comm-overlap-ag": _TP_OVERLAP,
        "--disable-tp-comm-overlap-rs": _TP_OVERLAP,
        "--tp-comm-overlap-rs-dgrad": _TP_OVERLAP,
        "--disable-tp-comm-bulk-dgrad": _TP_OVERLAP,
        "--disable-tp-comm-bulk-wgrad": _TP_OVERLAP,
        "--disable-tp-comm-split-ag": _TP_OVERLAP,
        "--disable-tp-comm-split-rs": _TP_OVERLAP,
        "--tp-comm-bootstrap-backend": _TP_OVERLAP,
        "--no-clone-scatter-output-in-embedding": "only changes memory",
        "--overlap-grad-reduce": _DATA_PARALLEL,
        "--overlap-param-gather": _DATA_PARALLEL,
        "--overlap-param-gather-with-optimizer-step": _DATA_PARALLEL,
        "--no-align-grad-reduce": _DATA_PARALLEL,
        "--no-align-param-gather": _DATA_PARALLEL,
        "--ddp-num-buckets": _DATA_PARALLEL,
        "--ddp-pad-buckets-for-high-nccl-busbw": _DATA_PARALLEL,
        "--ddp-reduce-scatter-with-fp32-accumulation": _DATA_PARALLEL,
        "--no-gradient-reduce-div-fusion": _DATA_PARALLEL,
        "--torch-fsdp2-no-reshard-after-forward": _SHARDS,
        "--fsdp-double-buffer": _SHARDS,
        "--suggested-communication-unit-size": _SHARDS,
        "--megatron-fsdp-version": "there is one way to share out weights",
        "--use-nccl-ub": "NCCL's buffers are left at their defaults",
        "--disable-symmetric-registration": "NCCL's buffers are left at their defaults",
        "--use-sharp": "the network's settings are left at their defaults",
        "--sharp-enabled-group": "the network's settings are left at their defaults",
        "--pipeline-model-parallel-comm-backend": _P2P,
        "--no-overlap-p2p-communication": _P2P,
        "--overlap-p2p-communication-warmup-flush": _P2P,
        "--no-scatter-gather-tensors-in-pipeline": _P2P,
        "--use-ring-exchange-p2p": _P2P,
        "--defer-embedding-wgrad-compute": _P2P,
        "--wgrad-deferral-limit": _P2P,
        "--distributed-timeout-seconds-after-init": "--distributed-timeout-minutes holds throughout",
        "--disable-gloo-process-groups": "only changes how checkpoints are coordinated",
        "--local-rank": "torchrun passes it in the environment",
        "--expert-tensor-parallel-size": "there are no experts to split",
        "--empty-unused-memory-level": "the memory cache is left alone",
        "--manual-gc": _GC,
        "--manual-gc-interval": _GC,
        "--no-manual-gc-eval": _GC,
        "--train-sync-interval": "the host never runs far ahead of the device",
        "--check-weight-hash-across-dp-replicas-interval": "replicas are not compared",
        "--check-for-spiky-loss": _RERUN,
        "--check-for-large-grads": _RERUN,
        "--error-injection-rate": _RERUN,
        "--error-injection-type": _RERUN,
        "--rerun-mode": _RERUN,
        "--result-rejected-tracker-filename": _RERUN,
        "--log-straggler": _STRAGGLER,
        "--disable-straggler-on-startup": _STRAGGLER,
        "--straggler-ctrlr-port": _STRAGGLER,
        "--straggler-minmax-count": _STRAGGLER,
        "--log-progress": "no progress.txt is written",
        "--log-energy": "energy is not measured",
        "--record-memory-history": "no memory history is recorded",
        "--memory-snapshot-path": "no memory history is recorded",
        "--run-workload-inspector-server": "there is no inspector",
        "--config-logger-dir": "configurations are not dumped to files",
        "--test-mode": "there are no tests that run alongside",
        "--enable-experimental": "there are no experimental features",
        "--no-create-attention-mask-in-dataloader": _DEFAULT_HERE,
        "--object-storage-cache-path": "data is read from files",
        "--disable-msc": "data is read from files",
        "--tokenizer-library": "it follows from --tokenizer-type",
        "--legacy-tokenizer": "tokenizers are megatron-core's",
        "--tokenizer-metadata": "it follows from --tokenizer-type",
        "--allow-ambiguous-pad-tokens": "pretraining data has no padding",
        "--no-initialization": "weights are always initialized; a checkpoint replaces them",
        "--use-persistent-ckpt-worker": "what --async-save writes is written by a thread of each rank",
        "--ckpt-assume-constant-structure": "only makes saving faster",
        "--ckpt-fully-parallel-save": "it is the default",
        "--use-dist-ckpt": _CHECKPOINT,
        "--no-strict-fsdp-dtensor-load": _CHECKPOINT,
        "--dist-ckpt-format": _CHECKPOINT,
        "--auto-detect-ckpt-format": _CHECKPOINT,
        "--dist-ckpt-optim-fully-reshardable": _CHECKPOINT,
        "--distrib-optim-fully-reshardable-mem-efficient": _CHECKPOINT,
        "--no-use-tokenizer-model-from-checkpoint-args": "the tokenizer is never taken from a checkpoint",
        "--adlr-autoresume": "relaunching the same command resumes",
        "--adlr-autoresume-interval": "relaunching the same command resumes",
        "--no-one-logger": _ONE_LOGGER,
        "--app-tag-run-name": _ONE_LOGGER,
        "--app-tag-run-version": _ONE_LOGGER,
        "--enable-ft-package": "relaunching the same command resumes",
        "--calc-ft-timeouts": "relaunching the same command resumes",
        "--te-rng-tracker": "random states follow from step, microbatch and layer",
        "--num-distributed-optimizer-instances": "the optimizer is split over all data-parallel ranks",
        "--use-tp-pp-dp-mapping": "ranks are ordered tensor, context, data, pipeline",
        "--verify-integrity": "every checkpoint is verified when it is loaded",
        "--standalone-embedding-stage": "it stands with the first layers; --pipeline-model-parallel-layout places it",
        "--use-legacy-models": "models are built of megatron-core's layers, which compute the same",
        **each_for(_CHECKPOINT, "--dist-ckpt-save-pre-mcore-014 --dist-ckpt-use-dtensor-format"),
        **each_for(
            _DATA_PARALLEL,
            """--DDP-impl --use-contiguous-parameters-in-local-ddp --no-contiguous-buffers-in-local-ddp
            --delay-grad-reduce --no-delay-grad-reduce --delay-param-gather""",
        ),
        **each_for("scores are never rescaled", "--no-query-key-layer-scaling"),
    }
)

IGNORED_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"--one-logger-": _ONE_LOGGER, "--inprocess-": "relaunching the same command resumes"}
)

LATER: Mapping[str, str] = MappingProxyType(
    {
        "--hierarchical-context-parallel-sizes": "context-parallel ranks are one group; give --context-parallel-size",
        "--cpu-offloading-num-layers": "it offloads whole layers; --offload-activations takes a share, or auto",
    }
)

NEUTRAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--cpu-offloading-num-layers": ("0",),
        "--expert-model-parallel-size": ("1",),
        "--num-experts": ("0",),
        "--softmax-type": ("vanilla",),
        "--rope-type": ("rope",),
        "--cuda-graph-impl": ("none",),
        "--main-grads-dtype": ("fp32",),
        "--main-params-dtype": ("fp32",),
        "--exp-avg-dtype": ("fp32",),
        "--exp-avg-sq-dtype": ("fp32",),
        "--data-impl": ("mmap", "infer"),
        "--encoder-tensor-model-parallel-size": ("0",),
        "--encoder-pipeline-model-parallel-size": ("0",),
        "--vocab-extra-ids": ("0",),
        "--sample-rate": ("1", "1.0"),
    }
)
