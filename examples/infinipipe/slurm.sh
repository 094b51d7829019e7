#!/usr/bin/env bash
# train.sh as a SLURM job, a torchrun on each node, for MODEL, SEQ, SCHEDULE and the other variables of train.sh. The
# number of nodes is that of the job: 4. From the checkout's folder:
#
#   MODEL=7b SEQ=96k sbatch --nodes 4 examples/infinipipe/slurm.sh
#   DRY_RUN=1 bash examples/infinipipe/slurm.sh             the prediction and the command, also without SLURM
#
#SBATCH --job-name=infinipipe
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
cd -P "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
NODES=${SLURM_JOB_NUM_NODES:-${NODES:-}} exec examples/infinipipe/train.sh
