#!/usr/bin/env bash
# train.sh on a SLURM cluster: one torchrun a node, for MODEL, SEQ, HARDWARE, SCHEDULE and the other variables of
# train.sh. The number of nodes is that of the job. From the checkout's folder:
#
#   mkdir -p logs
#   MODEL=7b SEQ=128k HARDWARE=h20 SCHEDULE=helix sbatch --nodes 8 examples/helixpipe/slurm.sh
#   MODEL=7b SEQ=128k HARDWARE=h20 SCHEDULE=1f1b sbatch --nodes 8 examples/helixpipe/slurm.sh
#
#SBATCH --job-name=helixpipe
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
cd -P "$SLURM_SUBMIT_DIR"

NODES=$SLURM_JOB_NUM_NODES
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NODES MASTER_ADDR
srun --ntasks-per-node=1 examples/helixpipe/train.sh
