"""Starts a script as srun does on one node: srun.py NPROC SCRIPT ARGUMENTS."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time


def free_port():
    """Return a free port below the range that the system hands out to others."""
    while True:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("localhost", port := random.randint(20_000, 32_000)))
            return str(port)


COUNTS = """NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE STEP_NUM_TASKS STEP_TASKS_PER_NODE
    CPUS_ON_NODE JOB_CPUS_PER_NODE GPUS GPUS_ON_NODE GPUS_PER_NODE"""  # one of each for a process
ONES = "NNODES JOB_NUM_NODES STEP_NUM_NODES JOB_ID JOBID CPUS_PER_TASK"
NODES = "JOB_NODELIST NODELIST STEP_NODELIST SUBMIT_HOST TOPOLOGY_ADDR"
ZEROS = "NODEID STEP_ID STEPID"
NAMES = "JOB_NAME CLUSTER_NAME JOB_PARTITION"
RANKS = "GTIDS JOB_GPUS STEP_GPUS"


def environment(nproc):
    """Return the environment that all processes share, with what batch scripts export."""
    ranks = ",".join(map(str, range(int(nproc))))
    groups = {COUNTS: nproc, ONES: "1", NODES: "localhost", ZEROS: "0", NAMES: "ddp_check"}
    groups |= {RANKS: ranks, "LAUNCH_NODE_IPADDR": "127.0.0.1", "SUBMIT_DIR": os.getcwd()}
    slurm = {f"SLURM_{name}": value for of, value in groups.items() for name in of.split()}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": nproc}
    return {**slurm, "SLURMD_NODENAME": "localhost", **address, **os.environ}


def main(nproc, *command):
    """Start all processes; if one fails, kill the others, like --kill-on-bad-exit."""
    shared, processes = environment(nproc), []
    for rank in map(str, range(int(nproc))):
        env = {**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        processes.append(subprocess.Popen([sys.executable, *command], env=env))
    codes = [None]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
    if not any(codes):
        return 0
    for process in processes:
        process.kill()
        process.wait()
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    print(f"srun: task {rank} ended with exit code {code}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
