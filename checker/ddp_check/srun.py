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


COUNTS = (  # of processes, each with a CPU and a GPU
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "TASKS_PER_NODE"),
    *("STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "CPUS_ON_NODE", "JOB_CPUS_PER_NODE"),
    *("GPUS", "GPUS_ON_NODE", "GPUS_PER_NODE"),
)
ONES = ("NNODES", "JOB_NUM_NODES", "STEP_NUM_NODES", "JOB_ID", "JOBID", "CPUS_PER_TASK")
NODES = ("JOB_NODELIST", "NODELIST", "STEP_NODELIST", "SUBMIT_HOST", "TOPOLOGY_ADDR")


def environment(nproc):
    """Return the environment that all processes share, with what batch scripts export."""
    names = dict.fromkeys(COUNTS, nproc) | dict.fromkeys(ONES, "1")
    names |= dict.fromkeys(NODES, "localhost") | {"LAUNCH_NODE_IPADDR": "127.0.0.1"}
    names |= dict.fromkeys(("NODEID", "STEP_ID", "STEPID"), "0")
    names |= {"JOB_NAME": "ddp_check", "JOB_PARTITION": "debug", "CLUSTER_NAME": "ddp_check"}
    names |= {"SUBMIT_DIR": os.getcwd(), "GTIDS": ",".join(map(str, range(int(nproc))))}
    names |= {"JOB_GPUS": names["GTIDS"], "STEP_GPUS": names["GTIDS"]}
    slurm = {f"SLURM_{name}": value for name, value in names.items()}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": nproc}
    return {**slurm, "SLURMD_NODENAME": "localhost", **address, **os.environ}


def main(nproc, *command):
    """Start all processes; if one fails, kill the others, like --kill-on-bad-exit."""
    shared, processes = environment(nproc), []
    for rank in map(str, range(int(nproc))):
        env = {**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        processes.append(subprocess.Popen([sys.executable, *command], env=env))
    codes = [None]
    while None in codes:
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
        if any(codes):
            return stop(processes, codes)
    return 0


def stop(processes, codes):
    """Say which process failed, as srun does, and kill the others."""
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    print(f"srun: task {rank} ended with exit code {code}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
