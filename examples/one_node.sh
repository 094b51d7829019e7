#!/usr/bin/env bash
# A 1.3B Llama-style model on one machine with 8 GPUs: tensor parallel 2, pipeline 4. Prints what the simulator
# predicts, checks the links between the GPUs, and trains.
# Data: a prefix of .bin/.idx files made by tools/preprocess_data.py; tokenizer: a local Hugging Face folder.
#
#   DATA=data/mine_text_document TOKENIZER=/models/llama-tokenizer SCHEDULE=interleaved-1f1b examples/one_node.sh
#   HARDWARE=h100 DRY_RUN=1 examples/one_node.sh       # the prediction and the command
set -euo pipefail
cd -P "$(dirname "$0")/.."
. examples/launch.sh

export GPUS=${GPUS:-8} NODES=1
TENSOR=${TENSOR:-2}
PIPELINE=${PIPELINE:-4}
SCHEDULE=${SCHEDULE:-1f1b}
HARDWARE=${HARDWARE:-a100-80}  # what predictions, and schedules found from costs, assume: `helixpipe simulate --help hardware`
RUN=${RUN:-runs/one_node}
read -r -a extra <<<"${EXTRA:-}"
if [ "$SCHEDULE" = interleaved-1f1b ]; then extra+=(--num-virtual-stages-per-pipeline-rank 2); fi

data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 31999)  # and the end of a document
if [ -n "${DATA:-}" ]; then
    : "${TOKENIZER:?set TOKENIZER to a tokenizer folder}"
    data=(--data-path "$DATA" --split 969,30,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi
parallel=(
    --tensor-model-parallel-size "$TENSOR"
    --pipeline-model-parallel-size "$PIPELINE"
    --pipeline-schedule "$SCHEDULE"
    --hardware "$HARDWARE"
    --use-distributed-optimizer
)
if [ "$TENSOR" != 1 ]; then parallel+=(--sequence-parallel); fi

launch "${parallel[@]}" \
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 \
    --group-query-attention --num-query-groups 8 --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 32 --train-iters 10000 --bf16 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 \
    "${data[@]}" \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 500 --tensorboard-dir "$RUN/tensorboard" \
    --log-interval 10 --log-throughput --eval-interval 500 --eval-iters 10 \
    ${extra[@]+"${extra[@]}"}
