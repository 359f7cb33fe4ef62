#!/bin/bash
# A node: a host name, mounts and processes of its own, in the network namespace of its number.
#     node.sh FOLDER NUMBER
set -e
folder=$1 number=$2

if [ $$ != 1 ]; then
    echo $$ > "$folder/node$number.pid"
    ip -n "node$number" link set eth0 up
    exec ip netns exec "node$number" \
        unshare --uts --mount --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi

# From here on, this is process 1 of the node.
mount --bind "$folder/hosts" /etc/hosts
hostname "node$number"
slurmd -D -b &  # -b reports that the node has just booted; otherwise Slurm sees this machine's uptime
while :; do wait -n || sleep 0.2; done  # process 1 has to reap orphans
