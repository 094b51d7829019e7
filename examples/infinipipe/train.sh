#!/usr/bin/env bash
# InfiniPipe's published setups: GPTs of 7B, 13B and 30B weights on documents of all lengths up to 48k, 96k or 192k
# tokens, 512 of them a step, on 4 nodes of 8 A800: tensor parallel 8 (the paper has Ulysses and ZeRO-3), 4 pipeline
# ranks. Prints what the simulator predicts, step and memory, checks the links, then trains. Run it on every node, with
# its number and the first one's address, or without any to see the prediction (in a SLURM job: once, as
# ../slurm.sh does):
#
#   MODEL=7b SEQ=96k DATA=data/github_text_document TOKENIZER=/models/llama MASTER_ADDR=node0 NODE_RANK=0 \
#       examples/infinipipe/train.sh
#   MODEL=7b SEQ=96k DRY_RUN=1 examples/infinipipe/train.sh
#
# MODEL      7b, 13b or 30b                 SCHEDULE  infinipipe, seq1f1b, 1f1b, ...
# SEQ        the longest: 48k, 96k, 192k    BATCH     documents a step: 512
# EXTRA      more flags, such as EXTRA="--recompute-granularity full"
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder; without, made-up tokens
# DRY_RUN=1         print the prediction and the command, and end
set -euo pipefail
cd -P "$(dirname "$0")/../.."

MODEL=${MODEL:-7b}
SEQ=${SEQ:-96k}
SCHEDULE=${SCHEDULE:-infinipipe}
HARDWARE=${HARDWARE:-a800}
RUN=${RUN:-runs/infinipipe-$MODEL-$SEQ-$SCHEDULE}
. examples/published.sh

case $MODEL in
    7b) layers=32 hidden=4096 heads=32 ;;
    13b) layers=40 hidden=5120 heads=40 ;;
    30b) layers=48 hidden=7168 heads=56 ;;
    *) refuse "MODEL=$MODEL must be 7b, 13b or 30b." ;;
esac
tokens_of "48k, 96k or 192k"
export GPUS=${GPUS:-8} NODES=${NODES:-4}
tensor=8 pipeline=$((NODES * GPUS / tensor)) batch=${BATCH:-512}
train --variable-seq-lengths --position-embedding-type rope
