#!/usr/bin/env bash
# train.sh as a SLURM job, a torchrun on each node, for MODEL, SEQ, SCHEDULE and the other variables of train.sh. The
# number of nodes is that of the job: 4 for 7b and 13b, 8 for 30b, 1 for 2.7b. From the checkout's folder:
#
#   MODEL=7b SEQ=128k sbatch --nodes 4 examples/seq1f1b/slurm.sh
#   DRY_RUN=1 bash examples/seq1f1b/slurm.sh             the prediction and the command, also without SLURM
#
#SBATCH --job-name=seq1f1b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
cd -P "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
NODES=${SLURM_JOB_NUM_NODES:-${NODES:-}} exec examples/seq1f1b/train.sh
