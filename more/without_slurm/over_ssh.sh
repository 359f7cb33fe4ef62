#!/bin/bash
# Train on several machines over ssh. Type in the repository, which is in the same folder on each:
#     bash more/without_slurm/over_ssh.sh node1,node2 04_multinode.py [arguments of the script]
# Ctrl-C stops the ranks on all machines; step 4 then saves, and the same command resumes. If one
# machine fails, the others stop, too. If this shell dies, all stop.

# EDIT: the processes per machine; how to activate your Python; and the network interface that
# connects the machines, from `ip -brief address`.
nproc=gpu
activate='source .venv/bin/activate'
export_interface='export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0'

IFS=, read -ra hosts <<< "$1"
shift
port=$((20000 + RANDOM % 10000))
torchrun=(torchrun "--nnodes=${#hosts[@]}" "--nproc-per-node=$nproc" "--rdzv-id=$port"
    --rdzv-backend=c10d "--rdzv-endpoint=${hosts[0]}:$port" "$@")

# What each machine runs. sshd does not end it with the connection, so `cat` waits for the end of
# the input, and then torchrun gets SIGTERM.
there="cd ${PWD@Q} && $activate && $export_interface || exit
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300  # seconds to save
${torchrun[*]@Q} < /dev/null & torchrun=\$!
{ cat; kill \$torchrun; } <&0 &> /dev/null & watch=\$!
wait \$torchrun; status=\$?
kill \$watch 2> /dev/null; exit \$status"

exec {input}<> <(:)  # a pipe; it ends when this shell closes it, or dies
status=0
trap 'status=1; exec {input}>&-' INT TERM HUP
for host in "${hosts[@]}"; do
    # shellcheck disable=SC2029  # expanded here, as it should be
    { ssh "$host" "bash -c ${there@Q}" || kill $$; } < "/dev/fd/$input" {input}>&- &
done
until wait; do :; done  # a signal interrupts it
exit $status
