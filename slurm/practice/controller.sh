#!/bin/bash
# Process 1 of the outer namespaces: sets up the network, the controller and the nodes.
#     controller.sh FOLDER NETWORK NODES
set -e
folder=$1 network=$2 nodes=$3

for gpu in /dev/nvidia* /dev/dxg /dev/kfd; do  # hide real GPUs: those of the cluster are only names
    [ ! -c "$gpu" ] || mount --bind /dev/null "$gpu"
done
mount -t tmpfs none /run
mount --bind "$folder/hosts" /etc/hosts
hostname login
ip link set lo up
ip link add bridge0 type bridge
ip address add "$network.254/24" dev bridge0
ip link set bridge0 up
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
    --seed-file="$folder/munged.seed"
slurmctld
for number in $(seq "$nodes"); do
    ip netns add "node$number"
    ip link add "cable$number" type veth peer name eth0 netns "node$number"
    ip link set "cable$number" master bridge0 up
    ip -n "node$number" link set lo up
    ip -n "node$number" address add "$network.$number/24" dev eth0
    bash "$folder/node.sh" "$folder" "$number" &
done
while :; do wait -n || sleep 0.2; done  # process 1 has to reap orphans
