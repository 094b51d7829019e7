#!/usr/bin/env bash
# One node's part of a job: a program of this checkout under torchrun. The other scripts call it; by hand:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node0 GPUS=8 examples/node.sh pretrain_gpt.py --num-layers …      on each node
#
# NODES, NODE_RANK    nodes of the job, and the number of this one       (default: SLURM's, else 1 and 0)
# MASTER_ADDR, _PORT  address of node 0, and a port free there with the next  (SLURM's first and its own; else needed, 29500)
# GPUS                ranks on this node                                 (8)
# BIN                 folder of python and torchrun                      (.venv/bin, else torchrun's)
# DRY_RUN=1           print the prediction, or the command, and end
#
# SIGTERM and SIGUSR1 go to the ranks, which finish their step, save and end. The exit status is then 75: to be run again.
# Else it is the status of the first rank here that failed: 2 for a wrong flag, 76 where ranks only lost another one.
set -euo pipefail
cd -P "$(dirname "$0")/.."
. examples/launch.sh

NODES=${NODES:-${SLURM_JOB_NUM_NODES:-1}}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
GPUS=${GPUS:-8}
[ $# != 0 ] || { echo "node.sh: name a program and its flags, such as pretrain_gpt.py --num-layers 4 …" >&2; exit 2; }

# Tensor-parallel kernels and their communication must start in the order they were launched, which up to Hopper takes a
# single hardware queue. Without tensor parallelism it would only serialize.
tensor=1 before=''
for word in "$@"; do
    [ "$before" != --tensor-model-parallel-size ] || tensor=$word
    before=$word
done
[ "$tensor" = 1 ] || export CUDA_DEVICE_MAX_CONNECTIONS=1
# Chunks and microbatches come in many sizes: segments that grow keep memory from falling to pieces.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Else torchrun sets 1 and says so; the loader and the optimizer's host part gain nothing from more.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# torch's C++ warns of names it cannot resolve, and prints its stack where another rank has ended.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# On node 0 torchrun holds the job's store, to which every rank has three connections.
ulimit -Sn "$(ulimit -Hn)" || true

meet=(--standalone)
if [ "$NODES" != 1 ]; then  # in the order of their numbers: neighbours in the pipeline are neighbours there
    if [ -z "${DRY_RUN:-}" ]; then
        [ -z "${SLURM_JOB_ID:-}" ] ||
            read -r MASTER_ADDR MASTER_PORT < <("$BIN/python" -m megatron.pretrain.process.slurm)
        : "${MASTER_ADDR:?set MASTER_ADDR to the address of node 0, or DRY_RUN=1}"
    fi
    meet=(--nnodes "$NODES" --node-rank "$NODE_RANK" --master-addr "${MASTER_ADDR:-node0}")
    port=${MASTER_PORT:-29500}
    # A port of its own for the preflight: a node that is done with it must not meet there one that is not.
    [ "$1" != tools/preflight.py ] || port=$((port + 1))
    meet+=(--master-port "$port")
fi
command=("$BIN/python" tools/torchrun.py "${meet[@]}" --nproc-per-node "$GPUS" "$@")

if [ -n "${DRY_RUN:-}" ]; then
    export WORLD_SIZE=$((NODES * GPUS)) LOCAL_WORLD_SIZE=$GPUS
    if [ "$1" = tools/preflight.py ]; then exec "$BIN/python" "$@" --preflight-predict-only; fi
    printf '\nThe command on each node, here number %s:' "$NODE_RANK"
    printf ' %q' "${command[@]}"
    echo
    exit
fi

pass_on() {
    pkill -TERM -P "$1" || kill -TERM "$1"  # without ranks yet, torchrun itself
}

deaf() {  # SLURM may send SIGUSR1 to every process of a step: it would end torchrun, and ranks that still start
    trap '' USR1
    exec "$@"
}

{  # read to its end before it runs: bash reads as it goes, and a run is long enough for an edit of this file
    status=0
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}  # ranks may take long to save
    run deaf "${command[@]}" || status=$?
    [ -z "$asked" ] || status=$TRY_AGAIN
    case $status in
        0 | "$USAGE" | "$TRY_AGAIN" | 76) ;;
        *) [ -z "${FAILURES:-}" ] || { mkdir -p "${FAILURES%/*}" && echo "$SLURM_JOB_ID $SLURMD_NODENAME" >>"$FAILURES"; } || true ;;
    esac
    exit "$status"
}
