#!/usr/bin/env bash
# WeiPipe's published setups: Llama-style models of 32 layers on 16 A800, two nodes of 8 joined by Ethernet of 10 Gb/s,
# or on one node, one pipeline rank a GPU. Prints what the simulator predicts, step and memory, checks the links, then
# trains. Run it on every node, with its number and the first one's address, or without any to see the prediction
# (in a SLURM job: once, as ../slurm.sh does):
#
#   MODEL=2048 SEQ=16k MASTER_ADDR=node0 NODE_RANK=0 examples/weipipe/train.sh
#   MODEL=2048 SEQ=16k SCHEDULE=1f1b DRY_RUN=1 PREFLIGHT="--preflight-network-bandwidth 10" examples/weipipe/train.sh
#
# MODEL      hidden size: 1024, 2048, 4096  SCHEDULE  weipipe, weipipe-naive, wzb1, wzb2, 1f1b, zb1p, ...
# SEQ        4k, 8k or 16k                  NODES     2 or 1
#            (16, 8 or 4 sequences in a microbatch, 4 microbatches a GPU in a step)
# EXTRA="--no-weipipe-eager --weipipe-grad-dtype bf16"   WeiPipe as published, in turns (docs/weipipe.md)
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder; without, made-up tokens
# DRY_RUN=1         print the prediction and the command, and end
set -euo pipefail
cd -P "$(dirname "$0")/../.."

MODEL=${MODEL:-2048}
SEQ=${SEQ:-16k}
SCHEDULE=${SCHEDULE:-weipipe}
HARDWARE=${HARDWARE:-a800}
RUN=${RUN:-runs/weipipe-$MODEL-$SEQ-$SCHEDULE}
. examples/published.sh

case $MODEL in
    1024 | 2048 | 4096) layers=32 hidden=$MODEL heads=32 ;;
    *) refuse "MODEL=$MODEL must be a hidden size: 1024, 2048 or 4096." ;;
esac
tokens_of "4k, 8k or 16k"
case $SEQ in
    4k) samples=16 ;;
    8k) samples=8 ;;
    16k) samples=4 ;;
    *) samples=1 ;;
esac
export GPUS=${GPUS:-8} NODES=${NODES:-2}
tensor=1 pipeline=$((NODES * GPUS)) batch=$((4 * pipeline * samples))
train --micro-batch-size "$samples" --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --recompute-granularity full
