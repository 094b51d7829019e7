# Sourced by the scripts beside it: `launch FLAGS…` runs the preflight and then training, with the same flags, on this
# node or, in a SLURM job, on every node of it. What runs on a node is examples/node.sh, which explains the variables.
# PREFLIGHT="…" adds flags for the preflight alone, SRUN_FLAGS="…" for every srun, to run in a container, say:
#
#   SRUN_FLAGS="--container-image=pytorch.sqsh --container-mounts=$PWD,/data,/models"
#
# A job that is asked to end (SIGTERM: preempted, or soon at its time limit) saves a checkpoint. In SLURM it then goes
# back to the queue, if it has --load, to resume from there. The exit status is 75.

set -euo pipefail

TRY_AGAIN=75  # EX_TEMPFAIL of sysexits.h: what examples/node.sh ends with when it was asked to
BIN=${BIN:-.venv/bin}
[ -x "$BIN/python" ] || BIN=$(dirname "$(command -v torchrun || command -v python3)")  # an image with its own packages

child='' asked='' again=''

# run COMMAND…: run it and return its exit status; SIGTERM and SIGUSR1 are given to `pass_on` meanwhile
run() {
    local status=0
    "$@" &
    child=$!
    again=1
    while [ -n "$again" ]; do  # a signal interrupts `wait`
        again=''
        wait "$child" && status=0 || status=$?
    done
    child=''
    return "$status"
}

hear() {
    asked=1 again=1
    [ -z "$child" ] || pass_on "$child"
}
trap hear TERM USR1
trap 'again=1' INT  # Ctrl-C reaches the ranks by itself

pass_on() {  # srun ends a job on SIGTERM, and passes SIGUSR1 to its tasks; examples/node.sh takes either
    kill -USR1 "$1"
}

launch() {
    local each_node=() preflight=() more=() status=0
    read -r -a preflight <<<"${PREFLIGHT:-}"
    if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${DRY_RUN:-}" ]; then
        # When one node has ended, the others have two minutes to end as well: they notice a lost rank in seconds. srun
        # gives a task one core unless told, and does not take the job's --cpus-per-task over.
        each_node=(srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 --cpu-bind=none)
        [ -z "${SLURM_CPUS_PER_TASK:-}" ] || each_node+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        read -r -a more <<<"${SRUN_FLAGS:-}"
        each_node+=(${more[@]+"${more[@]}"})
        local first
        read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        export MASTER_ADDR=${MASTER_ADDR:-$first}
        export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}  # jobs that share a node do not meet
    fi
    local node=$PWD/examples/node.sh  # a container may start in another folder
    run ${each_node[@]+"${each_node[@]}"} \
        "$node" tools/preflight.py ${preflight[@]+"${preflight[@]}"} "$@" || status=$?
    if [ "$status" = 0 ] && [ -z "$asked" ]; then
        run ${each_node[@]+"${each_node[@]}"} "$node" pretrain_gpt.py "$@" || status=$?
    fi
    [ -z "$asked" ] || status=$TRY_AGAIN
    if [ "$status" = "$TRY_AGAIN" ] && [ ${#each_node[@]} != 0 ] && [[ " $* " = *" --load "* ]]; then
        echo "launch.sh: job $SLURM_JOB_ID was asked to end; back to the queue, to resume from its newest checkpoint"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}
