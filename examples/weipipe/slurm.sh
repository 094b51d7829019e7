#!/usr/bin/env bash
# train.sh as a SLURM job, a torchrun on each node, for MODEL, SEQ, SCHEDULE and the other variables of train.sh. The
# number of nodes is that of the job: 2, or 1. From the checkout's folder:
#
#   MODEL=2048 SEQ=16k sbatch --nodes 2 examples/weipipe/slurm.sh
#   DRY_RUN=1 bash examples/weipipe/slurm.sh             the prediction and the command, also without SLURM
#
#SBATCH --job-name=weipipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
cd -P "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
NODES=${SLURM_JOB_NUM_NODES:-${NODES:-}} exec examples/weipipe/train.sh
