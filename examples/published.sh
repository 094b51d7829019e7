# Sourced by the train.sh of each paper: what all published setups have in common. The script sets MODEL, SEQ, SCHEDULE
# and HARDWARE, refuses what it does not know, and calls `train` with the flags of its setup.
. examples/launch.sh

read -r -a extra <<<"${EXTRA:-}"

refuse() {
    echo "train.sh: $1" >&2
    exit 2
}

# tokens_of "32k, 64k or 128k": set `tokens` to what SEQ says
tokens_of() {
    [[ $SEQ =~ ^[1-9][0-9]*k$ ]] || refuse "SEQ=$SEQ must be thousands of tokens, such as $1."
    tokens=$((${SEQ%k} * 1024))
}

# train FLAGS…: a GPT of `layers`, `hidden` and `heads` on `tokens`, on `tensor` x `pipeline` GPUs, in steps of `batch`
train() {
    local model=(
        --num-layers "$layers"
        --hidden-size "$hidden"
        --num-attention-heads "$heads"
        --seq-length "$tokens"
        --max-position-embeddings "$tokens"
        --attention-dropout 0
        --hidden-dropout 0
    )
    local parallel=(
        --tensor-model-parallel-size "$tensor"
        --pipeline-model-parallel-size "$pipeline"
        --pipeline-schedule "$SCHEDULE"
        --hardware "$HARDWARE"
    )
    [ "$tensor" = 1 ] || parallel+=(--sequence-parallel)
    local training=(
        --global-batch-size "$batch"
        --train-iters "${ITERATIONS:-30}"
        --bf16
        --lr 1.5e-4
        --min-lr 1e-5
        --lr-decay-style cosine
        --lr-warmup-fraction 0.01
        --weight-decay 0.01
        --clip-grad 1.0
    )
    local data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50257)
    if [ -n "${DATA:-}" ]; then
        : "${TOKENIZER:?set TOKENIZER to a tokenizer folder}"
        data=(--data-path "$DATA" --split 969,30,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    fi
    local output=(
        --log-interval 1
        --log-throughput
        --eval-iters 0
        --record-timeline "$RUN/timeline.json"
    )
    launch "${model[@]}" "${parallel[@]}" "$@" "${training[@]}" "${data[@]}" "${output[@]}" ${extra[@]+"${extra[@]}"}
}
