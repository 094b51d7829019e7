#!/usr/bin/env bash
# A published setup as a SLURM job, a torchrun on each node: the train.sh of a paper, which explains MODEL, SEQ, SCHEDULE
# and its other variables. The number of nodes is that of the job. From the checkout's folder:
#
#   MODEL=7b SEQ=128k HARDWARE=h20 SCHEDULE=helix sbatch --nodes 8 examples/slurm.sh helixpipe
#   MODEL=7b SEQ=512k sbatch --nodes 4 examples/slurm.sh sppo
#   DRY_RUN=1 bash examples/slurm.sh weipipe          the prediction and the command, also without SLURM
#
#SBATCH --job-name=published
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
cd -P "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
NODES=${SLURM_JOB_NUM_NODES:-${NODES:-}} exec "examples/${1:?name a folder of examples/ with a train.sh, such as helixpipe}/train.sh"
