"""Check before a long job whether these nodes can train together, and if not, name the bad ones.

preflight.sbatch runs this on the first node, with the words that start it once more, as one task
per GPU. Each task checks its node, and prints a line that srun brings back over Slurm's own
connections. If no check fails, the tasks run again to time all_reduce: over all ranks, and between
pairs of nodes.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

COLUMNS = ("tasks", "names", "network", "clock", "folder", "GPU")
SIZE = 2**24  # bytes for all_reduce


def at_once(checks, seconds):
    """Call functions in parallel; return by name (True, its result) or (False, why it failed).

    A function that hangs (in a name server, a driver, a file system) is abandoned in its thread.
    """
    pool = ThreadPoolExecutor(len(checks))
    started = {name: pool.submit(check) for name, check in checks.items()}
    wait(started.values(), seconds)
    results = {}
    for name, future in started.items():
        if not future.done():
            results[name] = False, f"not finished after {seconds:g} s"
        elif error := future.exception():
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            results[name] = False, reason.splitlines()[0][:200]
        else:
            results[name] = True, future.result()
    return results


def address_of(name):
    """Return the address of a name that programs use first."""
    return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]


def check_names(nodes):
    """Resolve the name of every node, and of this host: torchrun tells it to the other nodes."""
    names = [*nodes, socket.gethostname()] if len(nodes) > 1 else []  # one node meets no other
    for name in names:
        try:
            address_of(name)
        except OSError as error:
            raise RuntimeError(f"no address for {name}") from error
    return "ok"


def gloo_address():
    """Return the address of gloo here: of GLOO_SOCKET_IFNAME, of the host name, or loopback."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:  # SIOCGIFADDR of Linux
            answer = fcntl.ioctl(query, 0x8915, name.encode().ljust(40, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((address := address_of(socket.gethostname()), 0))  # fails if it is another's
        return address
    return "127.0.0.1"


def check_network(first, there, port, seconds):
    """Reach the first node by its name, as torchrun does, and then by the addresses of gloo."""
    here = gloo_address()
    if here.startswith("127.") and os.environ["SLURM_NNODES"] != "1":
        raise RuntimeError(f"{here} is a loopback address")
    for host, source in (first, None), (there, (here, 0)):
        try:
            socket.create_connection((host, port), seconds / 3, source).close()
        except OSError as error:
            why = error.strerror or error
            raise RuntimeError(f"{here} cannot reach {host}:{port}, {why}") from error
    return here


def check_folder(folder, first, seconds):
    """Wait until the first node's folder appears where the checkpoints go; write a file into it."""
    end = time.monotonic() + seconds
    while folder not in os.listdir():  # an NFS client may see it late
        if time.monotonic() > end:
            raise RuntimeError(f"not shared with {first}")
        time.sleep(0.1)
    Path(folder, os.environ["SLURM_PROCID"]).write_text("is written", encoding="utf-8")
    return "ok"


def check_gpu(local_rank, tasks):
    """Allocate 80 % of the GPU's memory, which fails if a leftover process holds much of it."""
    if not torch.cuda.is_available():
        return "no GPU"
    gpus = torch.cuda.device_count()
    if gpus not in (1, tasks):  # Slurm may show each task only its own
        raise RuntimeError(f"{gpus} GPUs for {tasks} tasks")
    try:
        torch.cuda.set_device(local_rank % gpus)
        size = torch.cuda.mem_get_info()[1] * 8 // 10
        torch.ones(size, dtype=torch.uint8, device="cuda")[-1].item()
    except RuntimeError as error:
        raise RuntimeError(f"GPU {local_rank}: {str(error).split('. ')[0]}") from error
    return "ok"


def checks(nodes, port, there, folder, seconds):
    """Return the checks of this task, by column."""
    first, tasks = nodes[0], int(os.environ["SLURM_NTASKS"]) // len(nodes)
    return {
        "names": lambda: check_names(nodes),
        "network": lambda: check_network(first, there, port, seconds),
        "folder": lambda: check_folder(folder, first, seconds),
        "GPU": lambda: check_gpu(int(os.environ["SLURM_LOCALID"]), tasks),
    }


def all_reduce_time(group=None):
    """Return the median seconds of an all_reduce over the group's ranks."""
    tensor = torch.zeros(SIZE // 4, device="cuda" if torch.cuda.is_available() else "cpu")
    seconds = []
    for _ in range(7):  # one to connect the ranks, one to align them
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure(nodes, port, there, folder, seconds):
    """Return the times of all_reduce: over all ranks, and with each of up to 7 partner nodes."""
    # Longer than at_once waits: at its own timeout, NCCL would kill the process unreported.
    limit = timedelta(seconds=4 * seconds)
    size, rank = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_PROCID"])
    tasks = size // len(nodes)
    own = rank // tasks  # srun fills one node after the other
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]) % gpus)
    backend, meet = "nccl" if gpus else "gloo", f"tcp://{nodes[0]}:{port}"
    dist.init_process_group(backend, meet, limit, world_size=size, rank=rank)
    times = [all_reduce_time()]
    for turn in range(min(7, len(nodes))):
        other = (turn - own) % len(nodes)  # whose partner in this turn is this node
        if other != own:
            both = [node * tasks + k for node in sorted((own, other)) for k in range(tasks)]
            group = dist.new_group(both, limit, use_local_synchronization=True)
            times.append(all_reduce_time(group))
            dist.destroy_process_group(group)  # otherwise buffers pile up
    return times


# ---------------------------------------------------------------- the verdict of the first node


def node_rows(reports, nodes, tasks, columns):
    """Return a row of cells for each node: of each column, the worst that its tasks report."""
    rows = {}
    for node in nodes:
        own = [report["cells"] for report in reports if report["node"] == node]
        rows[node] = row = {"tasks": (len(own) == tasks, f"{len(own)} of {tasks} reported")}
        for name in columns[1:]:
            row[name] = min([cells[name] for cells in own] or [(True, "-")])  # False is less
    if "ok" in [row["GPU"][1] for row in rows.values() if "GPU" in row]:
        for row in rows.values():
            if row["GPU"][1] == "no GPU":
                row["GPU"] = False, "none, others have"
    return rows


def node_faults(rows, first):
    """Return the faults of each bad node. If all others fail at the first, that is to blame."""
    bad = {}
    for column in rows[first]:
        faults = {node: row[column][1] for node, row in rows.items() if not row[column][0]}
        all_others = len(faults) > 1 and len(faults) == len(rows) - 1
        if column in ("network", "clock", "folder") and (first in faults or all_others):
            others_say = f"all other nodes say {[*faults.values()][-1]}"
            faults = {first: faults.get(first, others_say)}
        for node, fault in faults.items():
            bad.setdefault(node, []).append(f"{column}: {fault}")
    return bad


def slow_nodes(pairs):
    """Return the reason for each slow node, given the seconds of all_reduce in its pairs.

    A pair is as slow as the slower of its nodes, so a node is judged by its fastest pair.
    """
    best = {node: min(times) for node, times in pairs.items() if times}
    usual = statistics.median(best.values()) if best else 0
    reason = f"slow: {{:.3g}} s in its fastest pair, the median node {usual:.3g} s"
    return {node: [reason.format(own)] for node, own in best.items() if own > 2 * usual}


def run_tasks(command, seconds):
    """Start the tasks; return the reports of those that report in time, and judge their clocks."""
    reports = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as srun:
        timer = threading.Timer(2.5 * seconds, srun.kill)  # it may wait for a node that is gone
        timer.start()
        for line in srun.stdout:
            if line.startswith('{"node": '):
                reports.append(json.loads(line))
                late = time.time() - reports[-1]["time"]
                off = f"{abs(late):.1f} s {'behind' if late > 0 else 'ahead'}"
                reports[-1]["cells"]["clock"] = (False, off) if abs(late) > 5 else (True, "ok")
        timer.cancel()
    return reports


def judge(launch, seconds):
    """Let the tasks check and measure; print a table and return the faults of each bad node."""
    job = int(os.environ["SLURM_JOB_ID"])
    port, folder = 20000 + job % 10000, f".preflight-{job}"
    nodes = subprocess.check_output(["scontrol", "show", "hostnames"], text=True).split()
    tasks = int(os.environ.get("SLURM_GPUS_ON_NODE", 1))
    first = {
        "network": lambda: (gloo_address(), dist.TCPStore("localhost", port, is_master=True)),
        "folder": lambda: os.mkdir(folder),
    }
    own = at_once(first, seconds)
    plan = json.dumps([nodes, port, own["network"][1][0], folder, seconds])
    rows = node_rows(run_tasks([*launch, "check", plan], seconds), nodes, tasks, COLUMNS)
    rows[nodes[0]].update((name, cell) for name, cell in own.items() if not cell[0])
    at_once({"folder": lambda: shutil.rmtree(folder, ignore_errors=True)}, 5)
    table = [("node", *COLUMNS)]
    table += [(node, *(cell for _, cell in row.values())) for node, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    print(flush=True)
    if bad := node_faults(rows, nodes[0]):
        return bad
    del own  # with its store, which listens at the port that the ranks need
    reports = run_tasks([*launch, "measure", plan], seconds)
    rows = node_rows(reports, nodes, tasks, ("tasks", "all_reduce"))
    if bad := node_faults(rows, nodes[0]):
        return bad
    times = {node: row["all_reduce"][1] for node, row in rows.items()}
    ranks, (seconds, *_) = len(reports), times[nodes[0]]
    # As nccl-tests counts it: each rank sends and receives at least 2 (n - 1) / n times the data.
    speed = 2 * (ranks - 1) / ranks * SIZE / seconds / 1e9
    took = f"{ranks} ranks: {seconds:.3g} s, bus bandwidth {speed:.3f} GB/s"
    print("all_reduce, 16 MiB,", took if speed else "one rank: nothing to send", end="\n\n")
    return slow_nodes({node: pairs for node, (_, *pairs) in times.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=30, help="seconds to wait for a node")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help="what starts the tasks: srun ...")
    args = parser.parse_args()
    if "SLURM_JOB_ID" not in os.environ or not args.launch:
        parser.error("start it with: sbatch slurm/preflight.sbatch")
    bad = {}
    if args.launch[0] in ("check", "measure"):
        what, plan = args.launch[0], json.loads(args.launch[1])
        todo = checks(*plan) if what == "check" else {"all_reduce": lambda: measure(*plan)}
        cells = at_once(todo, 1.5 * plan[-1])  # run_tasks waits longer: imports take time, too
        report = {"node": os.environ["SLURMD_NODENAME"], "cells": cells, "time": time.time()}
        os.write(1, f"{json.dumps(report)}\n".encode())  # in one piece
    else:
        bad = judge(args.launch, args.timeout)
        for node, reasons in bad.items():
            print(f"preflight: {node}: {'; '.join(reasons)}")
        if not bad:
            print("preflight: this allocation can train")
    sys.stdout.flush()
    os._exit(bool(bad))  # does not wait for threads that hang


if __name__ == "__main__":
    main()
