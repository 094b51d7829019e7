"""Flags of Megatron-LM that ask for something this project does not do, and why. Data; see `compat`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def each_for(reason: str, flags: str) -> dict[str, str]:
    """The reason, for each of the flags."""
    return dict.fromkeys(flags.split(), reason)


_LAYERS = "every layer is the same pre-norm attention and MLP"
_LOW_PRECISION = "8-bit and 4-bit training is not supported"
_MOE = "mixture-of-experts models are not supported"
_MLA = "multi-latent attention is not supported"
_MTP = "multi-token prediction is not supported"
_MUP = "maximal update parametrization is not supported"
_OPTIMIZER = "optimizer state is kept in float32 on the device"
_CUDA_GRAPHS = "CUDA graphs are not supported"
_NON_PERSISTENT = "every checkpoint is written to --save"
_OLD = "Megatron-LM no longer has it"
_NOT_GPT = "only GPT models are trained here"
_NO_INFERENCE = "only training is supported"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "--batch-size": f"{_OLD}; use --micro-batch-size",
        "--warmup": f"{_OLD}; use --lr-warmup-fraction",
        "--model-parallel-size": f"{_OLD}; use --tensor-model-parallel-size",
        "--distribute-saved-activations": "--sequence-parallel splits what is kept over the tensor-parallel ranks",
        "--spec": "the layers cannot be replaced",
        "--yaml-cfg": "options are given as flags",
        "--encoder-num-layers": f"{_NOT_GPT}; use --num-layers",
        "--decoder-num-layers": f"{_NOT_GPT}; use --num-layers",
        "--encoder-seq-length": f"{_NOT_GPT}; use --seq-length",
        "--decoder-seq-length": f"{_NOT_GPT}; use --seq-length",
        "--apply-residual-connection-post-layernorm": _LAYERS,
        "--qk-l2-norm": _LAYERS,
        "--qk-clip": _LAYERS,
        "--softmax-type": _LAYERS,
        "--window-size": _LAYERS,
        "--window-attn-skip-freq": _LAYERS,
        "--no-rope-freq": _LAYERS,
        "--openai-gelu": "the activation is GELU, SwiGLU or squared ReLU",
        "--quick-geglu": "the activation is GELU, SwiGLU or squared ReLU",
        "--onnx-safe": "models are not exported",
        "--activation-func-clamp-value": "the activation is GELU, SwiGLU or squared ReLU",
        "--glu-linear-offset": "the activation is GELU, SwiGLU or squared ReLU",
        "--relative-attention-num-buckets": "positions are learned_absolute, rope, yarn or none",
        "--relative-attention-max-distance": "positions are learned_absolute, rope, yarn or none",
        "--mrope-section": "positions are learned_absolute, rope, yarn or none",
        "--rope-type": "it is for multi-latent attention; give --position-embedding-type yarn",
        "--multi-latent-attention": _MLA,
        "--q-lora-rank": _MLA,
        "--kv-lora-rank": _MLA,
        "--qk-head-dim": _MLA,
        "--qk-pos-emb-head-dim": _MLA,
        "--v-head-dim": _MLA,
        "--cache-mla-latents": _MLA,
        "--mtp-num-layers": _MTP,
        "--mtp-loss-scaling-factor": _MTP,
        "--num-experts": _MOE,
        "--expert-model-parallel-size": _MOE,
        "--overlap-moe-expert-parallel-comm": _MOE,
        "--delay-wgrad-compute": "weight gradients follow from the schedule",
        "--disable-bf16-reduced-precision-matmul": "matrix products run at torch's default precision",
        "--fp32-residual-connection": "the residual stream has the precision of the weights",
        "--fp16-lm-cross-entropy": "the loss is computed in float32",
        "--first-last-layers-bf16": _LOW_PRECISION,
        "--num-layers-at-start-in-bf16": _LOW_PRECISION,
        "--num-layers-at-end-in-bf16": _LOW_PRECISION,
        "--keep-fp8-transpose-cache": _LOW_PRECISION,
        "--no-fp8-wgrad": _LOW_PRECISION,
        "--reuse-grad-buf-for-mxfp8-param-ag": _LOW_PRECISION,
        "--main-grads-dtype": _OPTIMIZER,
        "--main-params-dtype": _OPTIMIZER,
        "--exp-avg-dtype": _OPTIMIZER,
        "--exp-avg-sq-dtype": _OPTIMIZER,
        "--dump-param-to-param-group-map": "parameter groups are not dumped",
        "--enable-full-sharding-in-hsdp": "weights are shared out over all data-parallel ranks or none",
        "--init-model-with-meta-device": "a rank's weights are made whole before they are shared out",
        "--lazy-mpu-init": "process groups are made at the start",
        "--enable-cuda-graph": _CUDA_GRAPHS,
        "--external-cuda-graph": _CUDA_GRAPHS,
        "--cuda-graph-impl": _CUDA_GRAPHS,
        "--cuda-graph-scope": _CUDA_GRAPHS,
        "--cuda-graph-warmup-steps": _CUDA_GRAPHS,
        "--data-parallel-random-init": "all model copies start alike",
        "--iterations-to-skip": "no iteration is skipped",
        "--full-validation": "an evaluation has --eval-iters iterations",
        "--multiple-validation-sets": "an evaluation gives one loss",
        "--vocab-extra-ids": _NOT_GPT,
        "--tiktoken-special-tokens": "the special tokens follow from --tiktoken-num-special-tokens",
        "--trust-remote-code": "code that comes with a tokenizer is not run",
        "--non-persistent-save-interval": _NON_PERSISTENT,
        "--non-persistent-ckpt-type": _NON_PERSISTENT,
        "--non-persistent-global-ckpt-dir": _NON_PERSISTENT,
        "--non-persistent-local-ckpt-dir": _NON_PERSISTENT,
        "--non-persistent-local-ckpt-algo": _NON_PERSISTENT,
        "--replication": _NON_PERSISTENT,
        "--replication-jump": _NON_PERSISTENT,
        "--replication-factor": _NON_PERSISTENT,
        "--pretrained-checkpoint": "use --load with --finetune",
        "--load-main-params-from-ckpt": "main weights come from the optimizer's state or the model",
        "--use-mp-args-from-checkpoint-args": "parallel sizes are given as flags and may differ from the checkpoint's",
        "--ckpt-convert-format": "checkpoints are not converted",
        "--ckpt-convert-save": "checkpoints are not converted",
        "--ckpt-convert-update-legacy-dist-opt-format": "checkpoints are not converted",
        "--perform-rl-step": "reinforcement learning is not supported",
        "--bert-no-binary-head": _NOT_GPT,
        "--bert-load": _NOT_GPT,
        "--mask-prob": _NOT_GPT,
        "--short-seq-prob": _NOT_GPT,
        "--sample-rate": "all data is used",
        "--is-hybrid-model": _NOT_GPT,
        "--disable-mamba-mem-eff-path": _NOT_GPT,
        "--flash-decode": _NO_INFERENCE,
        "--symmetric-ar-type": _NO_INFERENCE,
        "--vision-pretraining": _NOT_GPT,
        "--data-impl": "data files are mapped into memory",
        "--experimental-attention-variant": _LAYERS,
        "--attention-output-gate": _LAYERS,
        "--apply-wd-to-qk-layernorm": _LAYERS,
        "--use-mup": _MUP,
        **each_for(
            _NOT_GPT,
            """--pipeline-model-parallel-split-rank --encoder-tensor-model-parallel-size
            --encoder-pipeline-model-parallel-size --titles-data-path --query-in-block-prob --use-one-sent-docs
            --evidence-data-path --block-data-path --embedding-path --output-bert-embeddings --bert-embedder-type
            --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction
            --no-data-sharding --head-lr-mult --swin-backbone-type --mask-type --mask-factor --iter-per-epoch""",
        ),
        **each_for(
            _NO_INFERENCE,
            """--max-tokens-to-oom --use-legacy-static-engine --decode-only-cuda-graphs --nccl-all-reduce-for-prefill
            --mlp-chunks-for-prefill --disable-chunked-prefill""",
        ),
    }
)

REFUSED_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "--moe-": _MOE,
        "--fp8-": _LOW_PRECISION,
        "--fp4-": _LOW_PRECISION,
        "--muon-": "the optimizer is adam or sgd",
        "--mamba-": _NOT_GPT,
        "--hybrid-": _NOT_GPT,
        "--heterogeneous-": _LAYERS,
        "--dsa-": _LAYERS,
        "--linear-": _LAYERS,
        "--mup-": _MUP,
        "--fim-": "fill-in-the-middle data is not supported",
        "--export-": "distillation, pruning and quantization are not supported",
        "--retro-": _NOT_GPT,
        "--retriever-": _NOT_GPT,
        "--ict-": _NOT_GPT,
        "--biencoder-": _NOT_GPT,
        "--indexer-": _NOT_GPT,
        "--vision-": _NOT_GPT,
        "--dino-": _NOT_GPT,
        "--rl-": "reinforcement learning is not supported",
        "--grpo-": "reinforcement learning is not supported",
        "--langrl-": "reinforcement learning is not supported",
        "--inference-": _NO_INFERENCE,
        "--kitchen-": _LOW_PRECISION,
    }
)
