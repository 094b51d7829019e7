#!/usr/bin/env bash
# HelixPipe's published setups: GPTs of 1.3B, 3B and 7B weights on 32k to 128k tokens, on 2, 4 or 8 nodes of 8 GPUs,
# tensor parallel 8 and one pipeline rank a node. Prints what the simulator predicts, step and memory, checks the links,
# then trains. Run it on every node, with its number and the first one's address (for SLURM: ../slurm.sh), or without any
# to see the prediction:
#
#   MODEL=7b SEQ=128k NODES=8 HARDWARE=h20 SCHEDULE=helix MASTER_ADDR=node0 NODE_RANK=0 examples/helixpipe/train.sh
#   MODEL=7b SEQ=128k NODES=8 HARDWARE=h20 SCHEDULE=1f1b DRY_RUN=1 examples/helixpipe/train.sh
#
# MODEL      1.3b, 3b or 7b                 HARDWARE  h20 or a800
# SEQ        tokens: 32k, 64k, 96k, 128k    SCHEDULE  helix, 1f1b, zb1p, adapipe, ...
# NODES      pipeline ranks: 2, 4, 8        EXTRA     more flags, such as EXTRA="--chunk-size 16384"
#                                                     (docs/helixpipe.md: which is fastest)
# DATA, TOKENIZER   a prefix of .bin/.idx files and a Hugging Face folder; without, made-up tokens
# DRY_RUN=1         print the prediction and the command, and end
set -euo pipefail
cd -P "$(dirname "$0")/../.."
MODEL=${MODEL:-7b}
SEQ=${SEQ:-128k}
export NODES=${NODES:-8} GPUS=${GPUS:-8}
HARDWARE=${HARDWARE:-h20}
SCHEDULE=${SCHEDULE:-helix}
RUN=${RUN:-runs/helixpipe-$MODEL-$SEQ-$NODES-$SCHEDULE}
. examples/published.sh

case $MODEL in
    1.3b) layers=24 hidden=2048 heads=16 ;;
    3b) layers=16 hidden=4096 heads=32 ;;
    7b) layers=32 hidden=4096 heads=32 ;;
    *) refuse "MODEL=$MODEL must be 1.3b, 3b or 7b." ;;
esac
tokens_of "32k, 64k, 96k or 128k"
[[ $NODES =~ ^[1-9][0-9]*$ ]] || refuse "NODES=$NODES must be a number of nodes, such as 2, 4 or 8."
tensor=8 pipeline=$NODES batch=$((2 * NODES))
train --micro-batch-size 1 --position-embedding-type learned_absolute
