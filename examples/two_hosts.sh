#!/usr/bin/env bash
# A 1.3B Llama-style model on two workstations joined by Ethernet, a GPU each. Start it on both:
#
#   MASTER_ADDR=192.168.1.10 NODE_RANK=0 INTERFACE=eno1 examples/two_hosts.sh     on 192.168.1.10
#   MASTER_ADDR=192.168.1.10 NODE_RANK=1 INTERFACE=eno1 examples/two_hosts.sh     on the other
#   NETWORK_GBPS=0.88 DRY_RUN=1 examples/two_hosts.sh                             the predictions and the command
#
# SCHEDULE   by default that of 1f1b, zb1p and weipipe which is predicted to be the fastest with
#            NETWORK_GBPS and GLOBAL_BATCH. weipipe sends weights, as many bytes however large the batch is, so slow networks and large
#            batches favour it; DRY_RUN prints what is predicted of each
# NETWORK_GBPS  Gb/s that one host really sends to the other (8.8 over 10 Gbit Ethernet, 0.88 over 1), for predictions;
#            the preflight measures it
# INTERFACE  the network interface that joins the hosts, by its name there (`ip -brief address`)
# GPUS       GPUs of each host (1)
set -euo pipefail
cd -P "$(dirname "$0")/.."
. examples/launch.sh

export NODES=2 GPUS=${GPUS:-1}
if [ -n "${NETWORK:-}" ]; then
    echo "two_hosts.sh: NETWORK=$NETWORK was in GB/s: give NETWORK_GBPS in Gb/s, 8 times as much." >&2
    exit 2
fi
NETWORK_GBPS=${NETWORK_GBPS:-8.8}
HARDWARE=${HARDWARE:-a100-80}
SEQ=${SEQ:-8192}
GLOBAL_BATCH=${GLOBAL_BATCH:-256}
RUN=${RUN:-runs/two_hosts}
read -r -a extra <<<"${EXTRA:-}"

if [ -z "${DRY_RUN:-}" ]; then
    : "${MASTER_ADDR:?set MASTER_ADDR to the address of the first host}" "${NODE_RANK:?set NODE_RANK to 0 or 1}"
    : "${INTERFACE:?set INTERFACE to the interface that joins the hosts, one of: $(ls /sys/class/net | xargs)}"
    # Both libraries guess an interface, and guess wrong where there is a bridge of Docker's or a second network.
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
    export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}  # Ethernet: NCCL need not look for InfiniBand
fi

data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 31999)  # and the end of a document
if [ -n "${DATA:-}" ]; then
    : "${TOKENIZER:?set TOKENIZER to a tokenizer folder}"
    data=(--data-path "$DATA" --split 969,30,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi

flags=(
    --pipeline-model-parallel-size $((NODES * GPUS))
    --hardware "$HARDWARE"
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 5504
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length "$SEQ"
    --max-position-embeddings "$SEQ"
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters 10000
    --bf16
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta2 0.95
    "${data[@]}"
    --save "$RUN/checkpoints"
    --load "$RUN/checkpoints"
    --save-interval 100
    --tensorboard-dir "$RUN/tensorboard"
    --log-interval 1
    --log-throughput
    --eval-interval 1000
    --eval-iters 4
    ${extra[@]+"${extra[@]}"}
)
network=(--preflight-network-bandwidth "$NETWORK_GBPS" --preflight-network-adapters 1)
network+=(--preflight-compare 1f1b zb1p weipipe)
if [ "${PREFLIGHT:-}" != skip ]; then
    read -r -a more <<<"${PREFLIGHT:-}"
    network+=(${more[@]+"${more[@]}"})
    PREFLIGHT=${network[*]}
fi
if [ -z "${SCHEDULE:-}" ]; then  # both hosts come to the same
    SCHEDULE=$(WORLD_SIZE=$((NODES * GPUS)) LOCAL_WORLD_SIZE=$GPUS \
        "$BIN/python" tools/preflight.py --preflight-fastest "${network[@]}" "${flags[@]}")
    echo "two_hosts.sh: $SCHEDULE is predicted to be the fastest" >&2
fi
launch --pipeline-schedule "$SCHEDULE" "${flags[@]}"
