#!/usr/bin/env bash
# SPPO's published setups: GPTs of 7B, 13B and 65B weights on 512k to 1280k tokens, one sequence a step, on nodes of
# 8 A100: 7B on 4 nodes (tensor parallel 8, 4 pipeline ranks), 13B on 8 (8, 8), 65B on 16 (16, 8). Prints what the
# simulator predicts, step and memory, checks the links, then trains. Run it on every node, with its number and the
# first one's address (for SLURM: ../slurm.sh), or without any to see the prediction:
#
#   MODEL=7b SEQ=512k MASTER_ADDR=node0 NODE_RANK=0 examples/sppo/train.sh
#   MODEL=7b SEQ=512k SCHEDULE=seq1f1b DRY_RUN=1 examples/sppo/train.sh
#
# MODEL      7b, 13b or 65b                 CHUNKS    of the sequence (default: as published, else auto)
# SEQ        tokens: 512k, 640k, ...        SCHEDULE  sppo, seq1f1b, 1f1b (CHUNKS=1), ...
# EXTRA      more flags, such as EXTRA="--recompute-granularity full"
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder; without, made-up tokens
# DRY_RUN=1         print the prediction and the command, and end
set -euo pipefail
cd -P "$(dirname "$0")/../.."
MODEL=${MODEL:-7b}
SEQ=${SEQ:-512k}
SCHEDULE=${SCHEDULE:-sppo}
HARDWARE=${HARDWARE:-a100-80}
RUN=${RUN:-runs/sppo-$MODEL-$SEQ-$SCHEDULE}
. examples/published.sh

case $MODEL in
    7b) layers=32 hidden=4096 heads=32 tensor=8 pipeline=4 ;;
    13b) layers=40 hidden=5120 heads=40 tensor=8 pipeline=8 ;;
    65b) layers=80 hidden=8192 heads=64 tensor=16 pipeline=8 ;;
    *) refuse "MODEL=$MODEL must be 7b, 13b or 65b." ;;
esac
tokens_of "512k or 1024k"
case $MODEL-$SEQ in  # Table 4 of the paper
    *-512k) published=32 ;;
    13b-640k) published=48 ;;
    7b-640k | 13b-768k | 65b-600k) published=64 ;;
    7b-768k | 13b-1024k | 65b-640k) published=80 ;;
    65b-768k) published=96 ;;
    7b-896k | 65b-1024k) published=128 ;;
    7b-1024k | 13b-1280k) published=160 ;;
    *) published=auto ;;
esac
export GPUS=${GPUS:-8}
export NODES=${NODES:-$((tensor * pipeline / GPUS))}
batch=1
train --micro-batch-size 1 --position-embedding-type rope --pipe-sp-splits "${CHUNKS:-$published}"
