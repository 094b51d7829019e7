#!/usr/bin/env bash
# train.sh as a SLURM job, a torchrun on each node, for MODEL, SEQ, HARDWARE, SCHEDULE and the other variables of
# train.sh. The number of nodes is that of the job. From the checkout's folder:
#
#   MODEL=7b SEQ=128k HARDWARE=h20 SCHEDULE=helix sbatch --nodes 8 examples/helixpipe/slurm.sh
#   MODEL=7b SEQ=128k HARDWARE=h20 SCHEDULE=1f1b sbatch --nodes 8 examples/helixpipe/slurm.sh
#   DRY_RUN=1 bash examples/helixpipe/slurm.sh        the prediction and the command, also without SLURM
#
#SBATCH --job-name=helixpipe
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
cd -P "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
NODES=${SLURM_JOB_NUM_NODES:-${NODES:-}} exec examples/helixpipe/train.sh
