#!/usr/bin/env bash
# A 1.3B Llama-style model on one machine with 8 GPUs: tensor parallel 2, pipeline 4.
# Data: a prefix of .bin/.idx files made by tools/preprocess_data.py; tokenizer: a local Hugging Face folder.
#
#   DATA=data/mine_text_document TOKENIZER=/models/llama-tokenizer SCHEDULE=interleaved-1f1b examples/workstation_gpus.sh
set -euo pipefail
cd -P "$(dirname "$0")/.."

: "${DATA:?set DATA to a prefix of .bin/.idx files}" "${TOKENIZER:?set TOKENIZER to a tokenizer folder}"
GPUS=${GPUS:-8}
TENSOR=${TENSOR:-2}
PIPELINE=${PIPELINE:-4}
SCHEDULE=${SCHEDULE:-1f1b}
RUN=${RUN:-runs/workstation}
export CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

extra=()
if [ "$SCHEDULE" = interleaved-1f1b ]; then extra=(--num-virtual-stages-per-pipeline-rank 2); fi

# What the schedule alone costs, before a GPU is touched.
.venv/bin/helixpipe simulate "$SCHEDULE" --ranks "$PIPELINE" --microbatches 32 --layers 24 \
    ${extra:+--virtual-stages 2} --piece-times pre=1,attn=1,post=2

.venv/bin/torchrun --standalone --nproc-per-node "$GPUS" pretrain_gpt.py \
    --tensor-model-parallel-size "$TENSOR" --sequence-parallel --pipeline-model-parallel-size "$PIPELINE" \
    --pipeline-schedule "$SCHEDULE" ${extra[@]+"${extra[@]}"} --use-distributed-optimizer \
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 \
    --group-query-attention --num-query-groups 8 --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 32 --train-iters 10000 --bf16 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$DATA" --split 969,30,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 500 --tensorboard-dir "$RUN/tensorboard" \
    --log-interval 10 --log-throughput --eval-interval 500 --eval-iters 10
