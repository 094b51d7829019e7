#!/usr/bin/env bash
# The main job in small, on any machine: a Llama-style GPT over 2 pipeline ranks under Seq1F1B with 4 chunks a sequence,
# trained on the source of Python's standard library. `make quickstart` installs and runs this. Everything is written
# below runs/quickstart. Run it again and it resumes from its checkpoint, for ITERATIONS more once it had finished, under
# whatever SCHEDULE it is then given.
#
#   ITERATIONS=300 SCHEDULE=1f1b examples/quickstart.sh
#   SCHEDULE="seq1f1b --pipe-sp-splits 2" examples/quickstart.sh    a schedule with flags of its own
#   SCHEDULE=helix MICROBATCHES=4 examples/quickstart.sh            one that takes four microbatches a step, or eight
#   DRY_RUN=1 examples/quickstart.sh                     the prediction and the commands, on any machine
set -euo pipefail
cd -P "$(dirname "$0")/.."

ITERATIONS=${ITERATIONS:-120}
CHUNKED="seq1f1b --pipe-sp-splits 4"
SCHEDULE=${SCHEDULE:-$CHUNKED}
OTHER=$([ "${SCHEDULE%% *}" = 1f1b ] && echo "$CHUNKED" || echo 1f1b)  # what it is compared with
RUN=${RUN:-runs/quickstart}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${BIN:-.venv/bin}/python
[ -x "$python" ] || [ -n "${DRY_RUN:-}" ] || { echo "quickstart: there is no .venv yet; run make install" >&2; exit 1; }
[ -n "${DRY_RUN:-}" ] || mkdir -p "$RUN/data"

# Data: one document a file, byte by byte, as a .bin/.idx pair.
prefix=$RUN/data/stdlib_text_document
if [ ! -e "$prefix.idx" ] && [ -z "${DRY_RUN:-}" ]; then
    echo "quickstart: writing the standard library's source as tokens to $prefix.bin"
    "$python" tools/stdlib_corpus.py --output "$RUN/data/stdlib.jsonl"
    "$python" tools/preprocess_data.py \
        --input "$RUN/data/stdlib.jsonl" \
        --json-keys text \
        --output-prefix "$RUN/data/stdlib" \
        --tokenizer-type ByteLevelTokenizer \
        --append-eod \
        --workers 2
fi

# How far: to ITERATIONS, or that much further than a run that got there.
target=$ITERATIONS
tracker=$RUN/checkpoints/latest_checkpointed_iteration.txt
if [ -e "$tracker" ]; then
    done_before=$(cat "$tracker")
    while [ "$target" -le "$done_before" ]; do target=$((target + ITERATIONS)); done
    echo "quickstart: resuming at iteration $done_before, up to $target (make clean starts over)"
fi

shape=(  # of the model and of a microbatch, as `helixpipe profile` takes them, too
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 344
    --num-attention-heads 8
    --num-query-groups 2
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --seq-length 256
    --micro-batch-size 16
)
MICROBATCHES=${MICROBATCHES:-2}
model=(
    "${shape[@]}"
    --group-query-attention
    --attention-dropout 0
    --hidden-dropout 0
    --max-position-embeddings 256
)
training=(
    --pipeline-model-parallel-size 2
    --global-batch-size $((16 * MICROBATCHES))
    --cost-profile "$RUN/profile.json"
    --lr 3e-3
    --lr-decay-style constant
    --lr-warmup-iters 10
    --override-opt-param-scheduler
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234
)
data=(
    --data-path "$prefix"
    --split 95,5,0
    --tokenizer-type ByteLevelTokenizer
    --data-cache-path "$RUN/data/cache"
    --num-workers 0
)
output=(
    --save "$RUN/checkpoints"
    --load "$RUN/checkpoints"
    --save-interval 50
    --log-interval 10
    --eval-interval 50
    --eval-iters 4
    --tensorboard-dir "$RUN/tensorboard"
    --record-timeline "$RUN/timeline.json"
)
read -r -a chosen <<<"$SCHEDULE"
read -r -a compared <<<"$OTHER"
run=(--pipeline-schedule "${chosen[@]}" --train-iters "$target")
if [ -n "${DRY_RUN:-}" ]; then  # in times of pieces: what they take here is not known before it is measured
    [ -x "$python" ] || python=$(command -v python3)
    "$python" -m schedules.command simulate "${chosen[@]}" -p 2 -m "$MICROBATCHES" -L 4 --piece-times pre=1,attn=1,post=2
    printf '\nThe command, after tools/stdlib_corpus.py, tools/preprocess_data.py and helixpipe profile:'
    printf ' %q' torchrun --standalone --nproc-per-node 2 pretrain_gpt.py \
        "${model[@]}" "${training[@]}" "${data[@]}" "${run[@]}" "${output[@]}"
    echo
    exit
fi
if [ ! -e "$RUN/profile.json" ]; then
    echo "quickstart: measuring what the model's pieces take on this machine, into $RUN/profile.json"
    "$python" -m schedules.command profile "${shape[@]}" --vocab-size 257 --repeats 3 --output "$RUN/profile.json" \
        >"$RUN/profile.txt"
fi
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
    "${model[@]}" "${training[@]}" "${data[@]}" "${run[@]}" "${output[@]}" 2>&1 | tee "$RUN/log.txt"
size=(-p 2 -m "$MICROBATCHES" --profile "$RUN/profile.json")
"$python" -m schedules.command simulate "${compared[@]}" "${size[@]}" --save-program "$RUN/other.json" >>"$RUN/log.txt"
"$python" -m schedules.command draw "$RUN/other.json" "${chosen[@]}" "${size[@]}" --measured "$RUN/timeline.json" \
    --width 1600 --output "$RUN/timeline.png" >>"$RUN/log.txt"  # the other as a file: flags of chunks are for the chosen

# What came of it: the loss against that of a model that only knows how frequent each byte is.
"$python" - "$RUN" <<'PYTHON'
import json, re, sys
from pathlib import Path

run = Path(sys.argv[1])
unigram = json.loads((run / "data/stdlib.jsonl.stats.json").read_text())["unigram_entropy_nats"]
loss = float(re.findall(r"validation loss at .*? lm loss value: (\S+)", (run / "log.txt").read_text())[-1])
print(f"\nquickstart: validation loss {loss:.3f}, unigram entropy of the data {unigram:.3f} (nats a token)")
print(f"  checkpoints  {run / 'checkpoints'}")
print(f"  picture      {run / 'timeline.png'} (a step under two schedules, simulated, above the last one, measured)")
print(f"  curves       .venv/bin/tensorboard --logdir {run / 'tensorboard'}")
if loss > 0.9 * unigram and int((run / "checkpoints/latest_checkpointed_iteration.txt").read_text()) >= 100:
    sys.exit("quickstart: the loss is not clearly below the unigram entropy: something is wrong")
PYTHON

# What the model writes by now, and what the schedule is worth here.
echo
echo "quickstart: what the model writes (up to ten lines)"
"$python" tools/generate.py --load "$RUN/checkpoints" --prompt "    def " --max-new-tokens 900 --temperature 0.7 \
    --sampling-seed 7 | grep -v -e "successfully loaded" -e "^-*$" | head -n 10 || true
echo
echo "quickstart: $("$python" tools/step_times.py --ranks 2 --schedules "$SCHEDULE" "$OTHER" \
    --profile "$RUN/profile.json" --microbatches "$MICROBATCHES" -- \
    "${model[@]}" "${training[@]}" "${data[@]}" --lr-warmup-iters 1)"
