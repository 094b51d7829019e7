# Sourced by the scripts beside it: `launch FLAGS…` runs the preflight and then training, with the same flags, on this
# node or, in a SLURM job, on every node of it. What runs on a node is examples/node.sh, which explains the variables.
# After it, `on_nodes` and `on_one` run what a script has to do with the trained model.
#
# PREFLIGHT    more flags for the preflight alone; PREFLIGHT=skip leaves it out
# SRUN_FLAGS   more flags for srun, such as "--container-image=/images/pytorch.sqsh --container-mounts=/data,$PWD"
# RESTARTS     how often a failed job with --load goes back to the queue (3)
#
# A job that is asked to end (SIGTERM or SIGUSR1: preempted, or soon at its time limit) saves a checkpoint. In SLURM it
# then goes back to the queue, if it has --save and --load, to resume from there. The exit status is 75. So does a job
# that lost a host or a rank, RESTARTS times; a host on which a rank failed twice is then left out. A cancelled job stays
# cancelled; a wrong flag, or a link that the preflight finds dead, is not tried again.

set -euo pipefail

USAGE=2 TRY_AGAIN=75  # 75: EX_TEMPFAIL of sysexits.h, with which examples/node.sh ends when it was asked to
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

# flag NAME WORDS…: print the value of a flag, the last one given
flag() {
    local name=$1 value='' before=''
    shift
    for word in "$@"; do
        [ "$before" != "$name" ] || value=$word
        before=$word
    done
    printf '%s' "$value"
}

# requeue WHY: put this job back, unless somebody cancelled it or SLURM itself is already putting it back
requeue() {
    [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T 2>/dev/null)" = RUNNING ] || return 0
    echo "launch.sh: job $SLURM_JOB_ID $1; back to the queue, to resume from its newest checkpoint"
    trap '' TERM  # SLURM now sends it to every process of the job: to scontrol too, before hosts are left out
    scontrol requeue "$SLURM_JOB_ID"
}

# leave_out: keep this job, while it is in the queue, off the hosts on which a rank of it has failed twice
leave_out() {
    local bad
    [ -e "$FAILURES" ] || return 0
    bad=$(sed -n "s/^$SLURM_JOB_ID //p" "$FAILURES" | sort | uniq -d)
    [ -n "$bad" ] && [ "$(wc -l <<<"$bad")" -lt "$SLURM_JOB_NUM_NODES" ] || return 0  # all hosts: it is the program
    scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$(paste -s -d , <<<"$bad")"
    echo "launch.sh: from now on without" $bad
}

# failures: note that this job has failed, and print how often it has by now
failures() {
    mkdir -p "${FAILURES%/*}" && echo "job $SLURM_JOB_ID failed" >>"$FAILURES" && grep -c "^job $SLURM_JOB_ID failed" "$FAILURES"
}

# give_up STATUS PROGRAM: end with this exit status, after putting the job back where another try may help
give_up() {
    local count
    if [ -n "$resumes" ] && [ "$1" = "$TRY_AGAIN" ]; then
        requeue "was asked to end"
    elif [ -n "$resumes" ] && [ "$1" != "$USAGE" ] && [ "$2" = pretrain_gpt.py ] && count=$(failures); then
        if [ "$count" -le "${RESTARTS:-3}" ]; then
            requeue "lost a rank or a host (status $1)"
            leave_out
        else
            echo "launch.sh: job $SLURM_JOB_ID failed $count times, RESTARTS=${RESTARTS:-3}: not tried again (status $1)"
        fi
    fi
    exit "$1"
}

each_node=() only=() resumes=''

# on_nodes PROGRAM FLAGS…: run a program of this checkout under torchrun on all nodes; end this script where it fails
on_nodes() {
    local status=0 node=$PWD/examples/node.sh  # a container may start in another folder
    run ${each_node[@]+"${each_node[@]}"} ${only[@]+"${only[@]}"} "$node" "$@" || status=$?
    [ -z "$asked" ] || status=$TRY_AGAIN
    [ "$status" = 0 ] || give_up "$status" "$1"
}

# on_one PROGRAM FLAGS…: the same with one rank on the first node
on_one() {
    local -x NODES=1 NODE_RANK=0 GPUS=1
    local only=()
    [ ${#each_node[@]} = 0 ] || only=(--nodes=1 --ntasks=1)
    on_nodes "$@"
}

launch() {
    local preflight=() more=() save
    read -r -a preflight <<<"${PREFLIGHT:-}"
    read -r -a more <<<"${SRUN_FLAGS:-}"
    if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${DRY_RUN:-}" ]; then
        save=$(flag --save "$@")
        [ -z "$save" ] || resumes=$(flag --load "$@")
        # --export: some sites' sbatch hands nothing on. When one node has ended, the others have two minutes to end as
        # well: they notice a lost rank in seconds. srun gives a task one core unless told, and does not take the job's
        # --cpus-per-task over.
        each_node=(srun --export=ALL --ntasks-per-node=1 --label --kill-on-bad-exit=0 --wait=120 --cpu-bind=none)
        [ -z "${SLURM_CPUS_PER_TASK:-}" ] || each_node+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        each_node+=(${more[@]+"${more[@]}"})
        each_node+=("--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES")  # however many the job asks for
        export FAILURES=${resumes:+$save/failed_hosts.txt}
    fi
    if [ "${PREFLIGHT:-}" != skip ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
        on_nodes tools/preflight.py ${preflight[@]+"${preflight[@]}"} "$@"
    fi
    on_nodes pretrain_gpt.py "$@"
}
