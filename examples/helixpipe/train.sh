#!/usr/bin/env bash
# HelixPipe's published setups: GPTs of 1.3B, 3B and 7B weights on 32k to 128k tokens, on 2, 4 or 8 nodes of 8 GPUs,
# tensor parallel 8 and one pipeline rank a node. Prints what the simulator predicts, step and memory, then launches.
# Run it on every node, with the first one's address (slurm.sh does), or without any to see the prediction:
#
#   MODEL=7b SEQ=128k NODES=8 HARDWARE=h20 SCHEDULE=helix MASTER_ADDR=node0 examples/helixpipe/train.sh
#   MODEL=7b SEQ=128k NODES=8 HARDWARE=h20 SCHEDULE=1f1b DRY_RUN=1 examples/helixpipe/train.sh
#
# MODEL      1.3b, 3b or 7b                 HARDWARE  h20 or a800
# SEQ        tokens: 32k, 64k, 96k, 128k    SCHEDULE  helix, 1f1b, zb1p, adapipe, ...
# NODES      pipeline ranks: 2, 4, 8        EXTRA     flags for the simulator and for training alike, such as
#                                                     EXTRA="--chunk-size 16384" (docs/helixpipe.md: which is fastest)
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder; without, made-up tokens
# DRY_RUN=1         print the prediction and the command, and end
set -euo pipefail
cd -P "$(dirname "$0")/../.."

MODEL=${MODEL:-7b}
SEQ=${SEQ:-128k}
NODES=${NODES:-8}
HARDWARE=${HARDWARE:-h20}
SCHEDULE=${SCHEDULE:-helix}
ITERATIONS=${ITERATIONS:-30}
RUN=${RUN:-runs/helixpipe-$MODEL-$SEQ-$NODES-$SCHEDULE}
BIN=${BIN:-.venv/bin}
read -r -a extra <<<"${EXTRA:-}"
export CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

refuse() {
    echo "train.sh: $1" >&2
    exit 2
}
case $MODEL in
    1.3b) layers=24 hidden=2048 heads=16 ;;
    3b) layers=16 hidden=4096 heads=32 ;;
    7b) layers=32 hidden=4096 heads=32 ;;
    *) refuse "MODEL=$MODEL must be 1.3b, 3b or 7b." ;;
esac
[[ $SEQ =~ ^[1-9][0-9]*k$ ]] || refuse "SEQ=$SEQ must be thousands of tokens, such as 32k, 64k, 96k or 128k."
[[ $NODES =~ ^[1-9][0-9]*$ ]] || refuse "NODES=$NODES must be a number of nodes, such as 2, 4 or 8."
tokens=$((${SEQ%k} * 1024))
batch=$((2 * NODES))

predict=(
    "$BIN/helixpipe" simulate "$SCHEDULE"
    --model "helix-$MODEL"
    --seq-length "$tokens"
    --hardware "$HARDWARE"
    --nodes "$NODES"
    --ranks "$NODES"
    --tensor-parallel 8
    --global-batch-size "$batch"
    ${extra[@]+"${extra[@]}"}
)
model=(
    --num-layers "$layers"
    --hidden-size "$hidden"
    --num-attention-heads "$heads"
    --position-embedding-type learned_absolute
    --seq-length "$tokens"
    --max-position-embeddings "$tokens"
    --attention-dropout 0
    --hidden-dropout 0
)
parallel=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size "$NODES"
    --pipeline-schedule "$SCHEDULE"
    --hardware "$HARDWARE"
    ${extra[@]+"${extra[@]}"}
)
training=(
    --micro-batch-size 1
    --global-batch-size "$batch"
    --train-iters "$ITERATIONS"
    --bf16
    --lr 1.5e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.01
    --clip-grad 1.0
)
data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50257)
if [ -n "${DATA:-}" ]; then
    : "${TOKENIZER:?set TOKENIZER to a tokenizer folder}"
    data=(--data-path "$DATA" --split 969,30,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi
output=(
    --log-interval 1
    --log-throughput
    --eval-iters 0
    --record-timeline "$RUN/timeline.json"
)
launch=(
    "$BIN/torchrun"
    --nnodes "$NODES"
    --nproc-per-node 8
    --rdzv-backend c10d
    --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}"
    pretrain_gpt.py
    "${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${output[@]}"
)

if [ "${SLURM_NODEID:-0}" = 0 ]; then "${predict[@]}"; fi
if [ -n "${DRY_RUN:-}" ]; then
    printf '\nThe command on each node:'
    printf ' %q' "${launch[@]}"
    echo
    exit
fi
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node, or DRY_RUN=1}"
exec "${launch[@]}"
