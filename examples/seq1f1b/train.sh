#!/usr/bin/env bash
# Seq1F1B's published setups: GPTs of 2.7B weights on one node of 8 A100 (8 pipeline ranks), of 7B and 13B on 4 nodes
# (tensor parallel 8, 4 pipeline ranks) and of 30B on 8 (8, 8). Prints what the simulator predicts, step and memory,
# checks the links, then trains. Run it on every node, with its number and the first one's address, or without any to
# see the prediction (in a SLURM job: once, as ../slurm.sh does):
#
#   MODEL=7b SEQ=128k MASTER_ADDR=node0 NODE_RANK=0 examples/seq1f1b/train.sh
#   MODEL=2.7b SEQ=32k SCHEDULE=1f1b CHUNKS=1 DRY_RUN=1 examples/seq1f1b/train.sh
#
# MODEL      2.7b, 7b, 13b or 30b           CHUNKS    of a sequence (4, as published; also 8, 16 or auto)
# SEQ        2.7b: 16k, 24k, 32k            SCHEDULE  seq1f1b, seq1f1b-interleaved, 1f1b (CHUNKS=1), ...
#            7b: 32k, 64k, 128k             BATCH     sequences a step: 8, 16 or 32
#            13b: 32k, 48k, 64k; 30b: the same
# EXTRA      more flags, such as EXTRA="--recompute-granularity full"
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder; without, made-up tokens
# DRY_RUN=1         print the prediction and the command, and end
set -euo pipefail
cd -P "$(dirname "$0")/../.."

MODEL=${MODEL:-2.7b}
SEQ=${SEQ:-32k}
SCHEDULE=${SCHEDULE:-seq1f1b}
HARDWARE=${HARDWARE:-a100-80}
RUN=${RUN:-runs/seq1f1b-$MODEL-$SEQ-$SCHEDULE}
. examples/published.sh

case $MODEL in
    2.7b) layers=32 hidden=2560 heads=32 tensor=1 pipeline=8 ;;
    7b) layers=32 hidden=4096 heads=32 tensor=8 pipeline=4 ;;
    13b) layers=40 hidden=5120 heads=40 tensor=8 pipeline=4 ;;
    30b) layers=64 hidden=6144 heads=64 tensor=8 pipeline=8 ;;
    *) refuse "MODEL=$MODEL must be 2.7b, 7b, 13b or 30b." ;;
esac
tokens_of "16k, 32k or 128k"
export GPUS=${GPUS:-8}
export NODES=${NODES:-$((tensor * pipeline / GPUS))}
batch=${BATCH:-16}
train --micro-batch-size 1 --position-embedding-type rope --untie-embeddings-and-output-weights \
    --pipe-sp-splits "${CHUNKS:-4}"
