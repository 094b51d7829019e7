#!/usr/bin/env bash
# Two schedules on a laptop, in minutes: measures what the model's pieces take here, predicts a step under each
# schedule, trains under each for a few steps, and prints predicted beside measured. Needs no data and no GPU; run
# `make install` first.
#
#   examples/laptop.sh                                   1f1b and seq1f1b with 4 chunks, on 2 processes
#   SCHEDULES="zb1p,helix" RANKS=4 examples/laptop.sh    others; "seq1f1b --pipe-sp-splits 8" brings a flag
#   SEQ=128 examples/laptop.sh                           shorter sequences (1024), so that it is over sooner
#   DRY_RUN=1 examples/laptop.sh                         the predictions and the commands, on any machine
set -euo pipefail
cd -P "$(dirname "$0")/.."

RANKS=${RANKS:-2}
SCHEDULES=${SCHEDULES:-1f1b,seq1f1b --pipe-sp-splits 4}
ITERATIONS=${ITERATIONS:-6}
SEQ=${SEQ:-1024}
RUN=${RUN:-runs/laptop}
export OMP_NUM_THREADS=1 GPUS=$RANKS NODES=1 BIN=${BIN:-.venv/bin}
[ -x "$BIN/python" ] || BIN=$(dirname "$(command -v torchrun || command -v python3)")
python=$BIN/python
[ -x "$python" ] || python=$(command -v python3)
[ -n "${DRY_RUN:-}" ] || mkdir -p "$RUN"

model=(
    --num-layers $((2 * RANKS))
    --hidden-size 256
    --ffn-hidden-size 688
    --num-attention-heads 8
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --seq-length "$SEQ"
    --micro-batch-size 1
    --vocab-size 512
)
training=(
    "${model[@]}"
    --max-position-embeddings "$SEQ"
    --attention-dropout 0
    --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --num-workers 0
    --vocab-size 511  # and the end of a document
    --pipeline-model-parallel-size "$RANKS"
    --global-batch-size $((2 * RANKS))
    --train-iters "$ITERATIONS"
    --lr 1e-3
    --log-interval 1
    --eval-iters 0
    --cost-profile "$RUN/profile.json"
)

if [ -z "${DRY_RUN:-}" ] && [ ! -e "$RUN/profile.json" ]; then
    "$BIN/helixpipe" profile "${model[@]}" --repeats 5 --output "$RUN/profile.json"
fi
IFS=, read -r -a schedules <<<"$SCHEDULES"
for schedule in "${schedules[@]}"; do
    read -r -a flags <<<"$schedule"
    flags=("${training[@]}" --pipeline-schedule "${flags[@]}")
    name=${schedule%% *}
    if [ -n "${DRY_RUN:-}" ]; then  # in times of pieces: what they take here is not known before it is measured
        read -r -a chosen <<<"$schedule"
        "$python" -m schedules.command simulate "${chosen[@]}" -p "$RANKS" -m $((2 * RANKS)) -L $((2 * RANKS))
        examples/node.sh pretrain_gpt.py "${flags[@]}"
        continue
    fi
    printf '\n== %s\n' "$schedule"
    WORLD_SIZE=$RANKS "$BIN/python" tools/preflight.py "${flags[@]}" --preflight-predict-only | tee "$RUN/$name.txt"
    examples/node.sh pretrain_gpt.py "${flags[@]}" --timeline-png "$RUN/$name.png" >"$RUN/$name.log"
    step='.* iteration *\([0-9]*\)\/.*(ms): \([0-9.]*\).*lm loss: \([^ ]*\).*'
    sed -n "s/$step/  step \1: \2 ms, loss \3/p" "$RUN/$name.log"
done
[ -z "${DRY_RUN:-}" ] || exit 0

printf '\n%-30s %14s %14s\n' schedule 'predicted, ms' 'measured, ms'
for schedule in "${schedules[@]}"; do
    name=${schedule%% *}
    predicted=$(sed -n 's/^step time *\([0-9.]*\) ms.*/\1/p' "$RUN/$name.txt")
    # The median step; the first one also warms up.
    measured=$(sed -n 's/.*(ms): \([0-9.]*\).*/\1/p' "$RUN/$name.log" | tail -n +2 | sort -n |
        awk '{times[NR] = $1} END {print times[int((NR + 1) / 2)]}')
    printf '%-30s %14s %14s   %s\n' "$schedule" "$predicted" "$measured" "$RUN/$name.png"
done
