"""Argument lists of Megatron-LM's own GPT examples and functional tests parse, or are refused in one sentence."""

from __future__ import annotations

import pytest

from helixpipe.errors import UserError
from megatron.training.arguments import parse_args

GPT3_175B = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto
--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
--min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
--data-path data/my_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
--log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10
--tensorboard-dir logs
"""

LLAMA3_8B = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
--split 99,1,0 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save ckpt
--load ckpt --tensorboard-dir logs
"""

GPT3_15B = """
--distributed-timeout-minutes 60 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel
--disable-bias-linear --micro-batch-size 4 --rampup-batch-size 384 384 97656250 --global-batch-size 1152
--train-samples 19531250 --manual-gc --transformer-impl transformer_engine --data-cache-path cache
--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model nemotron_2_256k.model --data-path 0.5 a 0.5 b
--split 99,1,0 --no-mmap-bin-files --num-workers 6 --untie-embeddings-and-output-weights
--position-embedding-type rope --no-rope-fusion --rotary-percent 0.5 --squared-relu --num-layers 32 --hidden-size 6144
--num-attention-heads 48 --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 4.5e-4 --min-lr 4.5e-5 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --eval-iters 32 --eval-interval 2000 --save ckpt --load ckpt
--save-interval 1000 --save-retain-interval 5000 --init-method-std 0.0134 --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard
--log-throughput --log-interval 100 --tensorboard-dir logs --wandb-project megatron-core-release-runs --wandb-entity me
--wandb-exp-name run --bf16 --exit-interval 51000 --wandb-save-dir wandb --async-save
"""

GPT3_345M_PP4 = """
--num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad
--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --tensorboard-dir logs --micro-batch-size 4
--global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --timing-log-level 2
--lr-decay-iters 320000 --save ckpt --load ckpt --data-path my-gpt3_00_text_document --vocab-file vocab.json
--merge-file merges.txt --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1 --save-interval 10000
--eval-interval 1000 --eval-iters 10 --transformer-impl local --tensor-model-parallel-size 1
--pipeline-model-parallel-size 4 --deterministic-mode --no-gradient-accumulation-fusion --use-mcore-models
--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness log_all --data-cache-path cache
--bf16 --apply-query-key-layer-scaling --log-memory-to-tensorboard
"""


@pytest.mark.parametrize(("words", "world"), [(GPT3_175B, 128), (LLAMA3_8B, 8), (GPT3_15B, 64), (GPT3_345M_PP4, 8)])
def test_megatron_examples_parse(words: str, world: int) -> None:
    config = parse_args(words.split(), environ={"WORLD_SIZE": str(world)})
    parallel = config.parallel
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size)
    assert sizes[0] * sizes[1] * sizes[2] == world
    assert config.training.micro_batch_size and config.training.global_batch_size


@pytest.mark.parametrize(
    ("words", "world", "backend", "impl", "fused"),
    [
        (GPT3_175B, 128, "auto", "local", True),
        (LLAMA3_8B, 8, "fused", "local", True),
        (GPT3_15B, 64, "auto", "transformer_engine", True),
        (GPT3_345M_PP4, 8, "auto", "local", False),
    ],
)
def test_the_kernels_an_example_asks_for_arrive(words: str, world: int, backend: str, impl: str, fused: bool) -> None:
    model = parse_args(words.split(), environ={"WORLD_SIZE": str(world)}).model
    assert (model.attention_backend, model.transformer_impl) == (backend, impl)
    assert model.gradient_accumulation_fusion is fused


def test_values_of_an_example_arrive() -> None:
    config = parse_args(GPT3_345M_PP4.split(), environ={"WORLD_SIZE": "8"})
    assert config.parallel.pipeline_schedule == "1f1b"
    assert (config.training.lr, config.training.lr_decay_iters) == (0.00015, 320000)
    assert config.checkpoint.dist_ckpt_strictness == "log_all"
    assert (config.data.split, config.data.tokenizer_type) == ("949,50,1", "GPT2BPETokenizer")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("--apply-layernorm-1p", "norm weights are not centered around zero"),
        ("--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-param-gather", "8-bit and 4-bit training"),
        ("--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2", "mixture-of-experts"),
        ("--use-rope-scaling", "scaled rotary embeddings"),
        ("--multi-latent-attention --q-lora-rank 512", "multi-latent attention"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "fully sharded"),
        ("--distribute-saved-activations --recompute-activations", "--sequence-parallel splits what is kept"),
    ],
)
def test_what_an_example_asks_beyond_is_refused_in_one_sentence(extra: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_args(f"{LLAMA3_8B} {extra}".split(), environ={"WORLD_SIZE": "8"})
    message = str(caught.value)
    assert message.startswith("--") and reason in message and message.count(". ") == 0 and message.endswith(".")
