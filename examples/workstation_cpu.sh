#!/usr/bin/env bash
# The quick start's data on 4 processes without a GPU: tensor parallel 2 with sequence parallelism, pipeline 2.
# Run examples/quickstart.sh (or make quickstart) first; it makes the data.
#
#   SCHEDULE=interleaved-1f1b ITERATIONS=40 examples/workstation_cpu.sh
set -euo pipefail
cd -P "$(dirname "$0")/.."

SCHEDULE=${SCHEDULE:-1f1b}
ITERATIONS=${ITERATIONS:-20}
RUN=${RUN:-runs/workstation_cpu}
DATA=${DATA:-runs/quickstart/data/stdlib_text_document}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ -e "$DATA.idx" ] || { echo "workstation_cpu: there is no $DATA.idx; run make quickstart first" >&2; exit 1; }

extra=()
if [ "$SCHEDULE" = interleaved-1f1b ]; then extra=(--num-virtual-stages-per-pipeline-rank 2); fi

.venv/bin/torchrun --standalone --nproc-per-node 4 pretrain_gpt.py \
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 \
    --pipeline-schedule "$SCHEDULE" ${extra[@]+"${extra[@]}"} \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --attention-dropout 0 --hidden-dropout 0 --seq-length 128 --max-position-embeddings 128 \
    --micro-batch-size 2 --global-batch-size 16 --train-iters "$ITERATIONS" --lr 3e-3 --lr-decay-style constant \
    --data-path "$DATA" --split 95,5,0 --tokenizer-type ByteLevelTokenizer --num-workers 0 \
    --log-interval 5 --eval-interval 1000 --eval-iters 2 \
    --record-timeline "$RUN/timeline.json" --timeline-png "$RUN/timeline.png"
