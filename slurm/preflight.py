"""Check before a long job whether these nodes can train together, and if not, name the bad ones.

preflight.sbatch starts one task per GPU, or one per node without GPUs. Each task checks its node
and reports to task 0 over TCP or, if that fails, through the current folder. If no check fails,
the tasks time all_reduce: over all ranks, and between pairs of nodes.
"""

import argparse
import contextlib
import fcntl
import json
import os
import queue
import shutil
import socket
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

COLUMNS = ("names", "network", "port", "GPU", "clock", "folder")
TO_THE_FIRST = ("network", "port", "folder")  # what concerns the connection to the first node
FINE = ("no GPU", "ok", "-")  # cells without a fault, the most telling first; "-": not checked
SIZES = (2**10, 2**20, 2**24)  # bytes
SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of an interface
TURNS = 7  # how often each node is paired with another; enough for all pairs of 8 nodes


class Fault(Exception):
    """What is wrong, short enough for a table cell."""


def at_once(checks, seconds):
    """Call functions in parallel; return by name what each returned or why it failed.

    A function that hangs (in a name server, a driver, a file system) is abandoned in its thread.
    """
    results = dict.fromkeys(checks, f"not finished after {seconds:g} s")

    def call(name):
        try:
            results[name] = checks[name]()
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            results[name] = reason.splitlines()[0][:200]

    threads = [threading.Thread(target=call, args=[name], daemon=True) for name in checks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return dict(results)


# ---------------------------------------------------------------- checks of each node


def check_names(nodes):
    """Resolve the name of every node and of this host, and each address back to a name.

    If two hosts resolve their own names to loopback addresses, gloo connects each of them to
    itself. torchrun announces its host under the name its address resolves to, so a wrong name is
    a fault. A missing one is not: torchrun then announces the host name.
    """

    def address(name):  # the one that programs use first
        try:
            return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise Fault(f"no address for {name}") from error

    for name in dict.fromkeys([*nodes, socket.gethostname()]):
        if (there := address(name)).startswith("127.") or there == "::1":
            raise Fault(f"{name} is {there}, a loopback address")
        with contextlib.suppress(OSError):
            back = socket.gethostbyaddr(there)[0]
            others = {node.split(".")[0] for node in nodes} - {name.split(".")[0]}
            if back.split(".")[0] in others or address(back) != there:
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
    with contextlib.suppress(OSError):  # the host name has no address
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, *_, (address, *_) in found:
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, 0))  # fails if it is the address of another host
                return next((name for name in own if own[name] == address), ""), address
    return "lo", own["lo"]


def check_folder(folder, node, first, seconds):
    """Write a file where the checkpoints go, and wait until the first node's file appears."""
    folder.mkdir(exist_ok=True)
    with open(folder / node, "w", encoding="utf-8") as file:
        os.fsync(file.fileno())
    end = time.monotonic() + seconds
    while first not in os.listdir(folder):  # an NFS client may see it late
        if time.monotonic() > end:
            raise Fault(f"not shared with {first}")
        time.sleep(0.1)
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


def ask_clock(link, lines):
    """Return how many seconds this clock is ahead of task 0's, to within half a round trip.

    Raises OSError or ValueError if something other than task 0 answers.
    """
    trips = []
    for _ in range(5):
        sent = time.time()
        link.sendall(b"clock\n")
        there, received = float(lines.readline()), time.time()
        trips.append((received - sent, (sent + received) / 2 - there))
    return min(trips)[1]


class Task:
    """One process of the job, and its link to task 0."""

    def __init__(self, args, environ):
        self.seconds = args.timeout
        self.port = args.port
        self.nodes = args.nodes
        self.rank = int(environ["SLURM_PROCID"])
        self.local_rank = int(environ["SLURM_LOCALID"])
        self.tasks = int(environ["SLURM_NTASKS"])
        self.node = environ["SLURMD_NODENAME"]
        life = environ.get("SLURM_RESTART_COUNT", 0)  # a requeued job keeps its ID
        self.folder = Path(f".preflight-{environ['SLURM_JOB_ID']}.{life}")
        self.port_fault = None  # why task 0 cannot listen at the port
        self.link = None  # to task 0, if the port can be reached
        self.offset = None  # seconds that this clock is ahead of task 0's
        self.network = None  # the interface that gloo uses here, and its address
        self.server = None  # where task 0 listens at gloo's address
        self.server_known = threading.Event()

    def connect(self):
        """Connect to task 0 at the port that training uses."""
        first, end = self.nodes[0], time.monotonic() + self.seconds
        while True:
            try:
                left = max(0.1, end - time.monotonic())
                link = socket.create_connection((first, self.port), left)
                link.settimeout(max(1, end - time.monotonic()))
                return link
            except OSError as error:  # task 0 may not have started yet
                if time.monotonic() > end - 0.2:
                    raise Fault(f"{first}:{self.port}: {error.strerror or error}") from error
                time.sleep(0.2)

    def check_port(self):
        """Connect to task 0, and compare clocks."""
        if self.port_fault:
            raise Fault(self.port_fault)
        first, link = self.nodes[0], self.connect()
        self.lines = link.makefile("r", encoding="utf-8")
        try:
            self.offset = ask_clock(link, self.lines)
        except OSError as error:
            raise Fault(f"{first}:{self.port} does not answer") from error
        except ValueError as error:
            raise Fault(f"another program answers at {first}:{self.port}") from error
        self.link = link
        return "ok"

    def check_network(self):
        """Connect from the address that gloo uses here to the one that it uses on the first node.

        Gloo connects each node to each other one, at ports that the kernel chooses.
        """
        try:
            name, own = gloo_address()
            self.network = f"{name} {own}".strip()
            if len(self.nodes) > 1 and own.startswith("127."):
                raise Fault(f"{self.network} is a loopback address")
            if self.rank == 0:
                family = socket.AF_INET6 if ":" in own else socket.AF_INET
                backlog = len(self.nodes)  # it accepts none, so all must fit in the queue
                self.server = socket.create_server((own, 0), family=family, backlog=backlog)
                return "ok"
        finally:
            self.server_known.set()
        try:
            with self.connect() as link, link.makefile("r", encoding="utf-8") as lines:
                link.sendall(b"network\n")
                there = tuple(json.loads(lines.readline()))
        except (Fault, OSError, ValueError, TypeError):
            return "-"  # the port, or the first node's network, is at fault
        try:
            socket.create_connection(there[:2], self.seconds / 3, (own, 0)).close()
        except OSError as error:
            raise Fault(f"{self.network} cannot reach {there[0]}") from error
        return "ok"

    def run(self):
        """Check, report and, if task 0 says so, measure; return the exit code."""
        per_node, first = self.tasks // len(self.nodes), self.nodes[0]
        checks = {"port": self.check_port, "GPU": lambda: check_gpu(self.local_rank, per_node)}
        if self.local_rank == 0:
            checks["names"] = lambda: check_names(self.nodes)
            checks["network"] = self.check_network
            checks["folder"] = lambda: check_folder(self.folder, self.node, first, self.seconds)
        cells = at_once(checks, 1.5 * self.seconds)
        bad = self.complain(cells)
        answer = self.report(cells=cells, offset=self.offset, network=self.network)
        if answer and answer["go"]:
            measure = {"all_reduce": lambda: self.measure(answer["store"], answer["ranks"])}
            result = at_once(measure, 2 * self.seconds)
            failed = isinstance(result["all_reduce"], str)
            bad = failed and self.complain(result)
            answer = self.report(**result)
        return int(bad or answer is None)

    def complain(self, cells):
        """Print this task's faults, since its report may be lost; return whether there are any."""
        bad = [f"{name}: {cell}" for name, cell in cells.items() if cell not in FINE]
        for reason in bad:
            print(f"{self.node}: task {self.rank}: {reason}", file=sys.stderr, flush=True)
        return bool(bad)

    def report(self, **content):
        """Send a report to task 0; return its answer, or None if none came."""
        text = json.dumps({"rank": self.rank, "node": self.node, **content})
        try:
            if self.link:
                self.link.settimeout(3 * self.seconds)
                self.link.sendall(f"{text}\n".encode())
                return json.loads(self.lines.readline())
            new = self.folder / f"{self.rank}.new"
            new.write_text(text, encoding="utf-8")
            new.rename(new.with_suffix(".json"))
        except (OSError, ValueError):
            self.complain({"report": f"no answer from {self.nodes[0]}"})

    def measure(self, port, ranks):
        """Return the seconds of all_reduce for each size, and the GB/s with each partner node."""
        import torch
        import torch.distributed as dist

        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(self.local_rank % gpus)
        # Longer than at_once waits: at its own timeout, NCCL would kill the process unreported.
        limit = timedelta(seconds=4 * self.seconds)
        backend = "nccl" if gpus else "gloo"
        store = dist.TCPStore(self.nodes[0], port, timeout=limit)
        group = {"store": store, "rank": self.rank, "world_size": self.tasks, "timeout": limit}
        dist.init_process_group(backend, **group)
        times = all_reduce_times(SIZES)
        pairs = {}
        for other in partners(self.node, self.nodes, TURNS):
            both = sorted(ranks[self.node] + ranks[other])
            group = dist.new_group(both, limit, use_local_synchronization=True)
            (seconds,) = all_reduce_times(SIZES[-1:], group)
            pairs[other] = bus_bandwidth(SIZES[-1], seconds, len(both))
            dist.destroy_process_group(group)  # otherwise buffers pile up
        return {"backend": backend, "times": times, "pairs": pairs}


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


# ---------------------------------------------------------------- the verdict of task 0


def clock_cells(offsets):
    """Return a cell for each node, given how many seconds its clock is ahead of the first node's.

    The median clock counts as right; of two clocks, the first node's does.
    """
    right = statistics.median(offsets.values()) if len(offsets) > 2 else 0
    cells = {}
    for node, offset in offsets.items():
        by = offset - right
        direction = "ahead" if by > 0 else "behind"
        cells[node] = f"{abs(by):.1f} s {direction}" if abs(by) > 1 else "ok"
    return cells


def worst(cells):
    """Return the first fault among some cells or, if there is none, the most telling cell."""
    faults = [cell for cell in cells if cell not in FINE]
    return faults[0] if faults else next(cell for cell in FINE if cell in cells)


def node_row(reports, tasks):
    """Return a cell for each column, given the reports of a node that should have sent `tasks`."""
    row = {}
    for column in COLUMNS:
        row[column] = worst([report["cells"].get(column, "-") for report in reports] or ["-"])
    if not reports:
        row["names"] = "did not report"
    elif lost := tasks - len(reports):
        row["names"] = f"{lost} of {tasks} tasks did not report"
    return row


def node_rows(reports, nodes, tasks):
    """Return a row of cells for each node; some can be judged only by comparison."""
    rows = {}
    for node in nodes:
        own = [report for report in reports if report["node"] == node]
        rows[node] = node_row(own, tasks // len(nodes))
    offsets = {r["node"]: r["offset"] for r in reports if r["offset"] is not None}
    for node, cell in clock_cells(offsets).items():
        rows[node]["clock"] = cell
    if any(row["GPU"] == "ok" for row in rows.values()):
        for row in rows.values():
            row["GPU"] = row["GPU"].replace("no GPU", "none, others have")
    return rows


def node_faults(rows, first):
    """Return the faults of each bad node. If no other node can reach the first, it is to blame."""
    bad = {}
    for column in COLUMNS:
        faults = {node: row[column] for node, row in rows.items() if row[column] not in FINE}
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


class Collector:
    """The part of task 0 that collects the reports of all tasks, answers them and judges."""

    def __init__(self, task):
        self.task = task
        self.nodes = task.nodes
        self.inbox = queue.SimpleQueue()  # rank and report
        self.links = []  # to the tasks that have reported over TCP
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(("", task.port), family=family, dualstack_ipv6=dual)
            threading.Thread(target=self.listen, args=[server], daemon=True).start()
        except OSError as error:
            task.port_fault = f"cannot listen at {task.port}: {os.strerror(error.errno)}"
        threading.Thread(target=self.watch, daemon=True).start()

    def listen(self, server):
        """Accept connections at the port that training uses."""
        while True:
            threading.Thread(target=self.serve, args=server.accept()[:1], daemon=True).start()

    def serve(self, link):
        """Tell a task the time, and receive its reports."""
        stranger = ValueError, TypeError, LookupError  # what its messages raise here
        with contextlib.suppress(OSError, *stranger):
            for line in link.makefile("r", encoding="utf-8"):
                if line == "clock\n":
                    link.sendall(f"{time.time()}\n".encode())
                elif line == "network\n":
                    self.task.server_known.wait(self.task.seconds / 3)
                    server = self.task.server
                    link.sendall(f"{json.dumps(server and server.getsockname())}\n".encode())
                else:
                    report = json.loads(line)
                    self.links.append(link)
                    self.inbox.put((report["rank"], report))

    def watch(self):
        """Receive the reports of tasks that cannot reach the port through the folder."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                for path in self.task.folder.glob("*.json"):
                    report = json.loads(path.read_text(encoding="utf-8"))
                    self.inbox.put((report["rank"], report))
            time.sleep(0.2)

    def gather(self, seconds):
        """Return the reports by rank, of all tasks or of those that report in time."""
        reports = {}
        end = time.monotonic() + seconds
        while len(reports) < self.task.tasks and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                reports.update([self.inbox.get(timeout=0.2)])
        return reports

    def answer(self, **content):
        """Send the same answer to all tasks that have reported over TCP."""
        for link in set(self.links):
            with contextlib.suppress(OSError):
                link.sendall(f"{json.dumps(content)}\n".encode())

    def run(self):
        """Print the tables and the verdict; return the exit code."""
        reports = self.gather(2 * self.task.seconds).values()
        rows = node_rows(reports, self.nodes, self.task.tasks)
        faults = node_faults(rows, self.nodes[0])
        for report in reports:
            if report["network"] and rows[report["node"]]["network"] == "ok":
                rows[report["node"]]["network"] = report["network"]
        print_table(("node", *COLUMNS), *((node, *rows[node].values()) for node in self.nodes))
        bad = faults or self.measure(reports)
        for node, reasons in bad.items():
            print(f"preflight: {node}: {'; '.join(reasons)}")
        if not bad:
            print("preflight: this allocation can train")
        self.answer(go=False)
        return int(bool(bad))

    def measure(self, reports):
        """Let the tasks time all_reduce, and print it; return the faults of each bad node."""
        from torch.distributed import TCPStore

        limit = timedelta(seconds=self.task.seconds)
        store = TCPStore(self.nodes[0], 0, None, True, limit, wait_for_workers=False)
        ranks = {node: [r["rank"] for r in reports if r["node"] == node] for node in self.nodes}
        self.answer(go=True, store=store.port, ranks=ranks)
        results = self.gather(2.5 * self.task.seconds)
        if lost := [node for node in self.nodes if not results.keys() >= set(ranks[node])]:
            return {node: ["all_reduce: did not report"] for node in lost}
        measured = {}  # by node, as tasks of one group measure the same
        faults = {}
        for _, report in sorted(results.items()):
            node, result = report["node"], report["all_reduce"]
            if isinstance(result, str):
                faults[node] = [f"all_reduce: {result}"]
            else:
                measured[node] = result
        if faults:
            return faults
        print_times(measured[self.nodes[0]], len(results))
        pairs = {node: result["pairs"] for node, result in measured.items()}
        if len(pairs) > 1:
            print_pairs(pairs)
        return slow_nodes(pairs)


def print_times(result, ranks):
    """Print what one rank measured for each size: milliseconds and bus bandwidth."""
    print(f"all_reduce over world size {ranks}, {result['backend']}; GB/s is the bus bandwidth")
    rows = [("KiB", "ms", "GB/s")]
    for size, seconds in zip(SIZES, result["times"], strict=True):
        speed = bus_bandwidth(size, seconds, ranks)
        rows.append((f"{size / 2**10:g}", f"{seconds * 1e3:.3f}", f"{speed:.3f}"))
    print_table(*rows)


def print_pairs(pairs):
    """Print the extremes of what each node measured with its partners."""
    print(f"all_reduce of {SIZES[-1] / 2**10:g} KiB between two nodes, GB/s")
    rows = [("node", "fastest pair", "slowest pair")]
    for node, speeds in pairs.items():
        rows.append((node, f"{max(speeds.values()):.3f}", f"{min(speeds.values()):.3f}"))
    print_table(*rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int, help="the port that training will use")
    parser.add_argument("nodes", nargs="+", help="all nodes of the job; the first runs task 0")
    parser.add_argument("--timeout", type=float, default=30, help="seconds to wait for a node")
    args = parser.parse_args()
    if not 0 < args.timeout < float("inf"):
        parser.error(f"--timeout must be positive, not {args.timeout:g}")
    if "SLURM_PROCID" not in os.environ:
        parser.error("start it with: sbatch slurm/preflight.sbatch")
    task = Task(args, os.environ)
    if task.rank == 0:
        collector = Collector(task)
        threading.Thread(target=task.run, daemon=True).start()
        code = collector.run()
    else:
        code = task.run()
    if task.local_rank == 0 and (task.link or task.rank == 0):  # task 0 has read it
        at_once({"folder": lambda: shutil.rmtree(task.folder, ignore_errors=True)}, 5)
    sys.stdout.flush()
    os._exit(code)  # does not wait for threads that hang


if __name__ == "__main__":
    main()
