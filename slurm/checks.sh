# shellcheck shell=bash disable=SC2154  # the batch file sets host, port and checkpoint
# The batch files source these checks. A check ends the job at once, with one line that says why, if
# the job would otherwise hang, or fail later for a reason that is hard to see.

fail() { echo "$1" >&2; exit 1; }

# A job that is submitted from inside an array inherits the array's variables, and would requeue it.
shown=$(scontrol show job --oneliner "$SLURM_JOB_ID")
if [[ -n $SLURM_ARRAY_TASK_ID && $shown == "JobId=$SLURM_JOB_ID JobName="* ]]; then
    fail "submitted from inside an array: use a login node, or see slurm/README.md"
fi
[ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ] || fail "the job has no GPU, ask for some with --gpus-per-node"
[ "$SLURM_CPUS_ON_NODE" -ge "$SLURM_GPUS_ON_NODE" ] ||
    fail "the job has fewer CPUs than GPUs, ask for more with --cpus-per-gpu"

for word in "$@"; do # argparse accepts a shortened option, but the batch file does not see it
    name=${word%%=*}
    [[ $name == --c* && --checkpoint-path == "$name"?* ]] &&
        fail "write --checkpoint-path instead of $name"
done
if [[ " $*" == *" --checkpoint-path"[=\ ]* ]]; then # $checkpoint ends at the first space
    printf '%s\n' "$@" | grep -qxF -e "$checkpoint" -e "--checkpoint-path=$checkpoint" ||
        fail "the path after --checkpoint-path must not contain a space"
    [ -z "$SLURM_ARRAY_TASK_ID" ] ||
        fail "array tasks need a checkpoint each: set checkpoint_dir instead of --checkpoint-path"
fi
# Singleton does not separate the jobs of two users, nor a job from one that was cancelled and is
# still saving. So a job writes its number into a file beside the checkpoint.
if [ -n "$checkpoint" ]; then
    [ -n "$port" ] || [ "$SLURM_NNODES" = 1 ] ||
        fail "steps 1 to 3 run on one node: use slurm/04_multinode.sbatch"
    (set -o noclobber; echo "$SLURM_JOB_ID" > "$checkpoint.owner") 2> /dev/null
    [ -e "$checkpoint.owner" ] || fail "no file can be created beside $checkpoint"
    for file in "$checkpoint.owner" "$checkpoint"; do
        [ ! -e "$file" ] || [ -O "$file" ] ||
            fail "$file belongs to another user: choose another --job-name or checkpoint_dir"
    done
    other=$(< "$checkpoint.owner")
    in_use() {
        [ -n "$other" ] && [ "$other" != "$SLURM_JOB_ID" ] &&
            squeue --noheader --jobs="$other" --states=R,S,CG 2> /dev/null | grep -q .
    }
    # Two minutes, because a job that was cancelled has less time than that to save.
    for _ in {1..24}; do in_use || break; sleep 5; done
    ! in_use || fail "job $other still uses $checkpoint: wait until it has ended, or cancel it"
    echo "$SLURM_JOB_ID" > "$checkpoint.owner"
fi

# If Slurm's daemon on this node dies, srun ends, and Slurm starts the job on another node. The old
# ranks must not go on and write the same checkpoint, but nobody else ends them.
end_ranks() {
    command -v pgrep > /dev/null || return # then nothing shows whether srun has ended
    pgrep --parent $$ --exact srun > /dev/null && return
    for process in /proc/[0-9]*; do
        [ "$process" = "/proc/$$" ] && continue # this shell has them if sbatch was typed in a job
        grep -sqzx "SLURM_JOB_ID=$SLURM_JOB_ID" "$process/environ" &&
            grep -sqz '^SLURM_STEP_ID=' "$process/environ" && kill -KILL "${process#/proc/}"
    done
}
trap end_ranks EXIT

[ -n "$port" ] && [ -n "$host" ] || return 0 # steps 1 to 3 have no port
[[ $shown != *" TimeLimit=00:0"[0-4]:* ]] ||
    fail "--time has to be 5 minutes or more, or SIGTERM comes too early"
getent hosts "$host" > /dev/null || fail "host '$host' cannot be resolved"
if (: < "/dev/tcp/$host/$port") 2> /dev/null; then
    fail "port $port of $host is already in use"
fi
