"""Starts a script as srun does on one node: srun.py NPROC SCRIPT ARGUMENTS."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time


def free_port():
    """Return a port where nothing listens, below those that the system hands out to others."""
    while True:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("localhost", port := random.randint(20_000, 32_000)))
            return str(port)


def environment(nproc):
    """Return what all processes have in common."""
    counts = dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"), nproc)
    counts |= {"SLURM_STEP_NUM_TASKS": nproc, "SLURM_TASKS_PER_NODE": nproc}
    nodes = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), "1")
    names = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURMD_NODENAME")
    nodes |= dict.fromkeys(names, "localhost") | {"SLURM_NODEID": "0"}
    job = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_CPUS_PER_TASK": "1"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    return {**os.environ, **counts, **nodes, **job, **address}


def main(nproc, *command):
    """Start all processes; when one fails, end the others, as with --kill-on-bad-exit."""
    shared, processes = environment(nproc), []
    for rank in map(str, range(int(nproc))):
        env = {**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        processes.append(subprocess.Popen([sys.executable, *command], env=env))
    codes = [None]
    while None in codes:
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
        if any(codes):
            for process in processes:
                process.kill()
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
