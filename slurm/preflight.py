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
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path

COLUMNS = ("names", "network", "port", "GPU", "clock", "folder")
TO_THE_FIRST = ("network", "port", "folder")  # what concerns the connection to the first node
SIZES = (2**10, 2**20, 2**24)  # bytes
SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of an interface
TURNS = 7  # how often each node is paired with another; enough for all pairs of 8 nodes
REPORT = "preflight reports "  # what the line of a task begins with


class Fault(Exception):
    """What is wrong, short enough for a table cell."""


def at_once(checks, seconds):
    """Call functions in parallel; return by name (True, its result) or (False, why it failed).

    A function that hangs (in a name server, a driver, a file system) is abandoned in its thread.
    """
    pool = ThreadPoolExecutor(len(checks))
    started = {name: pool.submit(check) for name, check in checks.items()}
    end, results = time.monotonic() + seconds, {}
    for name, future in started.items():
        try:
            results[name] = True, future.result(max(0, end - time.monotonic()))
        except FutureTimeout:
            results[name] = False, f"not finished after {seconds:g} s"
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            results[name] = False, reason.splitlines()[0][:200]
    return results


# ---------------------------------------------------------------- what each task checks


def address_of(name):
    """Return the address of a name that programs use first."""
    try:
        return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise Fault(f"no address for {name}") from error


def check_names(nodes):
    """Resolve the name of every node and of this host, and each address back to a name.

    With a loopback address, gloo connects a host to itself; under a wrong name, torchrun announces
    it to the others. That an address has no name is no fault.
    """
    for name in dict.fromkeys([*nodes, socket.gethostname()]):
        if (there := address_of(name)).startswith("127.") or there == "::1":
            raise Fault(f"{name} is {there}, a loopback address")
        with contextlib.suppress(OSError):
            back = socket.gethostbyaddr(there)[0]
            others = {node.split(".")[0] for node in nodes} - {name.split(".")[0]}
            if back.split(".")[0] in others or address_of(back) != there:
                raise Fault(f"{name} is {there}, but that is {back}")
    return "ok"


def gloo_address():
    """Return the interface that gloo uses on this host, and its address.

    Gloo takes the interface in GLOO_SOCKET_IFNAME, or the one that the host name's address belongs
    to, or else the loopback interface.
    """
    own = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(query, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                own[name] = socket.inet_ntoa(answer[20:24])
    if wanted := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        if wanted not in own:
            raise Fault(f"no address for GLOO_SOCKET_IFNAME={wanted}")
        return wanted, own[wanted]
    with contextlib.suppress(OSError, Fault), socket.socket() as probe:
        probe.bind((address := address_of(socket.gethostname()), 0))  # fails if it is another's
        return next((name for name in own if own[name] == address), ""), address
    return "lo", own["lo"]


def ask(first, port, seconds):
    """Ask the first node, at the port of training, for the time and the address that gloo uses.

    Return how many seconds this clock is ahead, to within half a round trip, and the address.
    """
    trips = []
    try:
        for _ in range(3):
            sent = time.time()
            with socket.create_connection((first, port), seconds) as link:
                there, address = json.loads(link.makefile("r", encoding="utf-8").readline())
            received = time.time()
            trips.append((received - sent, (sent + received) / 2 - there, address))
    except OSError as error:
        raise Fault(f"{first}:{port}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise Fault(f"another program answers at {first}:{port}") from error
    return min(trips)[1:]


def check_network(first, port, seconds):
    """Connect from the address that gloo uses here to the one that it uses on the first node.

    Gloo connects each node to each other one, at ports that the kernel chooses.
    """
    name, own = gloo_address()
    here = f"{name} {own}".strip()
    if own.startswith("127.") and os.environ["SLURM_NNODES"] != "1":
        raise Fault(f"{here} is a loopback address")
    try:
        _, there = ask(first, port, seconds)
    except Fault:
        return "-"  # the port is at fault
    try:
        if there:
            socket.create_connection(there[:2], seconds / 3, (own, 0)).close()
    except OSError as error:
        raise Fault(f"{here} cannot reach {there[0]}") from error
    return here


def check_folder(folder, node, first, seconds):
    """Wait until the first node's folder appears where the checkpoints go; write a file into it."""
    end = time.monotonic() + seconds
    while folder not in os.listdir():  # an NFS client may see it late
        if time.monotonic() > end:
            raise Fault(f"not shared with {first}")
        time.sleep(0.1)
    with open(Path(folder, node), "w", encoding="utf-8") as file:
        os.fsync(file.fileno())
    return "ok"


def check_gpu(local_rank, tasks):
    """Allocate 80 % of the GPU's memory, which fails if a leftover process holds much of it."""
    import torch  # here, so that a host without it is reported

    if not torch.cuda.is_available():
        return "no GPU"
    gpus = torch.cuda.device_count()
    if gpus not in (1, tasks):  # Slurm may show each task only its own
        raise Fault(f"{gpus} GPUs for {tasks} tasks")
    try:
        torch.cuda.set_device(local_rank % gpus)
        size = torch.cuda.mem_get_info()[1] * 8 // 10
        torch.ones(size, dtype=torch.uint8, device="cuda")[-1].item()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise Fault(f"GPU {local_rank}: {str(error).split('. ')[0]}") from error
    return "ok"


def check(port, nodes, folder, seconds):
    """Check this task's part of its node; return the cells."""
    local_rank = int(os.environ["SLURM_LOCALID"])
    node, first = os.environ["SLURMD_NODENAME"], nodes[0]
    tasks = int(os.environ["SLURM_NTASKS"]) // len(nodes)
    checks = {
        "port": lambda: ask(first, port, seconds)[0],  # how far this clock is ahead
        "GPU": lambda: check_gpu(local_rank, tasks),
        "names": lambda: check_names(nodes),
        "network": lambda: check_network(first, port, seconds),
        "folder": lambda: check_folder(folder, node, first, seconds),
    }
    if local_rank:  # the first task of the node checks what they share
        checks = {name: checks[name] for name in ("port", "GPU")}
    return at_once(checks, 1.5 * seconds)


def measure(port, nodes, folder, seconds):
    """Return a cell with the time of all_reduce for each size, and GB/s with each partner node."""
    # Longer than at_once waits: at its own timeout, NCCL would kill the process unreported.
    limit = timedelta(seconds=4 * seconds)
    size, rank = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_PROCID"])
    tasks = size // len(nodes)

    def all_reduce():
        import torch
        import torch.distributed as dist

        if gpus := torch.cuda.device_count():
            torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]) % gpus)
        backend, meet = "nccl" if gpus else "gloo", f"tcp://{nodes[0]}:{port}"
        dist.init_process_group(backend, meet, limit, world_size=size, rank=rank)
        times, pairs = all_reduce_times(SIZES), {}
        own = rank // tasks  # srun fills one node after the other
        for other in partners(nodes[own], nodes, TURNS):
            both = [n * tasks + k for n in sorted((own, nodes.index(other))) for k in range(tasks)]
            group = dist.new_group(both, limit, use_local_synchronization=True)
            (time_of_pair,) = all_reduce_times(SIZES[-1:], group)
            pairs[other] = bus_bandwidth(SIZES[-1], time_of_pair, len(both))
            dist.destroy_process_group(group)  # otherwise buffers pile up
        return {"backend": backend, "times": times, "pairs": pairs}

    return at_once({"all_reduce": all_reduce}, 2 * seconds)


# ---------------------------------------------------------------- measurements of all


def all_reduce_times(sizes, group=None, repeats=5):
    """Return, for each size in bytes, the median seconds of an all_reduce over the group's ranks.

    The tensors are float32, on this process's GPU if there is one. Raises what all_reduce raises.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    times = []
    for size in sizes:
        tensor = torch.zeros(size // 4, device="cuda" if cuda else "cpu")
        seconds = []
        for _ in range(2 + repeats):  # one to connect the ranks, one to align them
            wait()
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            wait()
            seconds.append(time.perf_counter() - start)
        times.append(statistics.median(seconds[2:]))
    return times


def bus_bandwidth(size, seconds, ranks):
    """Return GB/s as nccl-tests counts them, which can be compared with the speed of the links.

    Each rank sends and receives at least 2 (n - 1) / n times the data:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def partners(node, nodes, turns):
    """Return the partner of a node for each turn of a round-robin tournament.

    With an odd number of nodes, each node sits out one turn, which its list omits.
    """
    ring = [*nodes, None] if len(nodes) % 2 else [*nodes]
    found = []
    for _ in range(min(turns, len(ring) - 1)):
        found.append(ring[-1 - ring.index(node)])
        ring.insert(1, ring.pop())
    return [other for other in found if other]


def slow_nodes(pairs):
    """Return the reason for each slow node, given the GB/s by node and partner.

    A pair is as slow as the slower of its nodes, so a node is judged by its fastest pair.
    """
    best = {node: max(speeds.values()) for node, speeds in pairs.items() if speeds}
    usual = statistics.median(best.values()) if best else 0
    reason = "slow: {:.3f} GB/s in its fastest pair, the median node {:.3f}"
    return {node: [reason.format(own, usual)] for node, own in best.items() if own < usual / 2}


# ---------------------------------------------------------------- the verdict of the first node


def clock_cells(offsets):
    """Return a cell for each node, given how many seconds its clock is ahead of the first node's.

    The median clock counts as right; of two clocks, the first node's does.
    """
    right = statistics.median(offsets.values()) if len(offsets) > 2 else 0
    off = {node: offset - right for node, offset in offsets.items()}
    said = {node: f"{abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for node, by in off.items()}
    return {node: (False, said[node]) if abs(by) > 1 else (True, "ok") for node, by in off.items()}


def node_rows(reports, nodes, tasks):
    """Return a row of cells for each node; some can be judged only by comparison."""
    rows, offsets = {}, {}
    for node in nodes:
        own = [report["cells"] for report in reports if report["node"] == node]
        rows[node] = row = {}
        for name in COLUMNS:
            cells = [cells[name] for cells in own if name in cells] or [(True, "-")]
            row[name] = min(cells, key=lambda cell: (cell[0], cell[1] != "no GPU"))
        if row["port"][0] and own:
            offsets[node] = row["port"][1]
            row["port"] = True, "ok"
        if len(own) < tasks:
            lost = f"{tasks - len(own)} of {tasks} tasks " if own else ""
            row["names"] = False, f"{lost}did not report"
    for node, cell in clock_cells(offsets).items():
        rows[node]["clock"] = cell
    if any(row["GPU"] == (True, "ok") for row in rows.values()):
        for row in rows.values():
            if row["GPU"][1] == "no GPU":
                row["GPU"] = False, "none, others have"
    return rows


def node_faults(rows, first):
    """Return the faults of each bad node. If no other node can reach the first, it is to blame."""
    bad = {}
    for column in COLUMNS:
        faults = {node: row[column][1] for node, row in rows.items() if not row[column][0]}
        all_others = len(faults) > 1 and len(faults) == len(rows) - 1
        if column in TO_THE_FIRST and (first in faults or all_others):
            faults = {first: faults.get(first) or "out of reach of all other nodes"}
        for node, cell in faults.items():
            reason = cell if "did not report" in cell else f"{column}: {cell}"
            bad.setdefault(node, []).append(reason)
    return bad


def print_table(*rows):
    """Print rows of strings in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print(flush=True)


def speed_faults(reports, nodes, tasks):
    """Print the speeds that the tasks report; return the faults of each bad node."""
    cells = {
        node: [r["cells"]["all_reduce"] for r in reports if r["node"] == node] for node in nodes
    }
    if lost := [node for node in nodes if len(cells[node]) < tasks]:
        return {node: ["all_reduce: did not report"] for node in lost}
    worst = {node: min(cells[node], key=lambda cell: cell[0]) for node in nodes}
    if any(not fine for fine, _ in worst.values()):
        return {node: [f"all_reduce: {text}"] for node, (fine, text) in worst.items() if not fine}
    first = worst[nodes[0]][1]
    ranks = len(reports)
    print(f"all_reduce over world size {ranks}, {first['backend']}; GB/s is the bus bandwidth")
    rows = [("KiB", "ms", "GB/s")]
    for size, seconds in zip(SIZES, first["times"], strict=True):
        speed = bus_bandwidth(size, seconds, ranks)
        rows.append((f"{size / 2**10:g}", f"{seconds * 1e3:.3f}", f"{speed:.3f}"))
    print_table(*rows)
    return slow_nodes({node: result["pairs"] for node, (_, result) in worst.items()})


# ---------------------------------------------------------------- the program on the first node


def listen(port, nodes):
    """Tell all who connect to the port of training the time, and where this host's gloo listens."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise Fault(f"cannot listen at {port}: {os.strerror(error.errno)}") from error
    threading.Thread(target=answer, args=[server, nodes], daemon=True).start()
    return server


def answer(server, nodes):
    address = None
    with contextlib.suppress(Fault, OSError):
        _, own = gloo_address()
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        gloo = socket.create_server((own, 0), family=family, backlog=nodes)  # it accepts none
        address = None if own.startswith("127.") else gloo.getsockname()
    with contextlib.suppress(OSError):  # until the server is shut down
        while True:
            link, _ = server.accept()
            with link, contextlib.suppress(OSError):
                link.sendall(f"{json.dumps([time.time(), address])}\n".encode())


def run_tasks(launch, plan, seconds):
    """Start the tasks; return the reports of those that report in time."""
    srun = subprocess.Popen([*launch, json.dumps(plan)], stdout=subprocess.PIPE, text=True)
    reports = []

    def read():
        for line in srun.stdout:
            if line.startswith(REPORT):
                reports.append(json.loads(line.removeprefix(REPORT)))
        srun.wait()  # or the next tasks would have to wait for these

    at_once({"srun": read}, seconds)
    srun.kill()  # it may wait for a node that is gone
    return reports


def judge(launch, seconds):
    """Let the tasks check and measure; print the tables and the verdict, return the exit code."""
    job, life = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", 0)
    port, folder = 20000 + int(job) % 10000, f".preflight-{job}.{life}"
    nodes = subprocess.check_output(["scontrol", "show", "hostnames"], text=True).split()
    tasks = int(os.environ.get("SLURM_GPUS_ON_NODE", 1))
    checks = {"port": lambda: listen(port, len(nodes)), "folder": lambda: os.mkdir(folder)}
    own = at_once(checks, seconds)
    plan = [port, nodes, folder, seconds]
    rows = node_rows(run_tasks([*launch, "check"], plan, 2 * seconds), nodes, tasks)
    rows[nodes[0]].update((name, cell) for name, cell in own.items() if not cell[0])
    cells = [(node, *(row[name][1] for name in COLUMNS)) for node, row in rows.items()]
    print_table(("node", *COLUMNS), *cells)
    bad = node_faults(rows, nodes[0])
    if not bad:
        own["port"][1].shutdown(socket.SHUT_RDWR)  # the ranks need it
        reports = run_tasks([*launch, "measure"], plan, 2.5 * seconds)
        bad = speed_faults(reports, nodes, tasks)
    for node, reasons in bad.items():
        print(f"preflight: {node}: {'; '.join(reasons)}")
    if not bad:
        print("preflight: this allocation can train")
    at_once({"folder": lambda: shutil.rmtree(folder, ignore_errors=True)}, 5)
    return int(bool(bad))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=30, help="seconds to wait for a node")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help="what starts the tasks: srun ...")
    args = parser.parse_args()
    if "SLURM_JOB_ID" not in os.environ or not args.launch:
        parser.error("start it with: sbatch slurm/preflight.sbatch")
    code = 0
    if args.launch[0] in ("check", "measure"):
        what, plan = args.launch
        cells = {"check": check, "measure": measure}[what](*json.loads(plan))
        report = json.dumps({"node": os.environ["SLURMD_NODENAME"], "cells": cells})
        os.write(1, f"{REPORT}{report}\n".encode())  # in one piece
    else:
        code = judge(args.launch, args.timeout)
    sys.stdout.flush()
    os._exit(code)  # does not wait for threads that hang


if __name__ == "__main__":
    main()
