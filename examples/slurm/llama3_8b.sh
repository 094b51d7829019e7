# Sourced by the batch scripts in this folder: `pretrain FLAGS…` trains a model of Llama 3's 8B shape on all nodes of
# the job. What differs from cluster to cluster is in the scripts: hardware, parallel sizes, sequence length, schedule.
#
# HF                a Hugging Face folder: train this model, from its weights, instead of a random one
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder (default: HF); without DATA, made-up tokens
# RUN               folder of checkpoints and logs, on a file system that all nodes share
# SCHEDULE          a schedule, with flags of its own if it needs any: SCHEDULE="seq1f1b --pipe-sp-splits 8"
# ITERATIONS        of training
# EXTRA             more flags; of a flag given twice the last counts

. examples/launch.sh

pretrain() {
    local data extra load=$RUN/checkpoints
    data=(--mock-data)
    [ -n "${HF:-}" ] || data+=(--tokenizer-type NullTokenizer --vocab-size 128255)  # and the end of a document
    if [ -n "${DATA:-}" ]; then
        TOKENIZER=${TOKENIZER:-${HF:-}}
        : "${TOKENIZER:?set TOKENIZER to a tokenizer folder}"
        data=(--data-path "$DATA" --split 969,30,1)
        data+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    fi
    read -r -a extra <<<"${EXTRA:-}"
    local model=(
        --num-layers 32
        --hidden-size 4096
        --ffn-hidden-size 14336
        --num-attention-heads 32
        --group-query-attention
        --num-query-groups 8
        --position-embedding-type rope
        --rotary-base 500000
        --normalization RMSNorm
        --swiglu
        --disable-bias-linear
        --untie-embeddings-and-output-weights
        --attention-dropout 0
        --hidden-dropout 0
    )
    if [ -n "${HF:-}" ]; then
        model=(--use-checkpoint-args --attention-dropout 0 --hidden-dropout 0)
        # A job that was put back goes on from its own checkpoints. Only the batch script looks, so all nodes agree.
        [ -e "$load/latest_checkpointed_iteration.txt" ] || load=$HF
    fi
    local training=(
        --micro-batch-size 1
        --train-iters "${ITERATIONS:-5000}"
        --bf16
        --use-distributed-optimizer
        --lr 1e-4
        --min-lr 1e-5
        --lr-decay-style cosine
        --lr-warmup-fraction 0.01
        --weight-decay 0.1
        --adam-beta2 0.95
        --clip-grad 1.0
    )
    local output=(
        --save "$RUN/checkpoints"
        --load "$load"
        --save-interval 100
        --save-retain-interval 1000
        --tensorboard-dir "$RUN/tensorboard"
        --log-interval 1
        --log-throughput
        --eval-interval 500
        --eval-iters 4
    )
    launch "${model[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@" ${extra[@]+"${extra[@]}"}
}
