"""Show where each rank of a training job is: its node, its process and the line that it runs.

    python slurm/where.py JOB                  # a Slurm job, on all of its nodes
    python slurm/where.py                      # what torchrun has started on this machine
    python slurm/where.py JOB --signal=ABRT    # send a signal to the ranks of this job alone

An arrow marks the ranks that are not where most ranks are. If they hang, the others wait for them
in a collective. Run it twice: in a healthy job the ranks move on. This needs Linux, and py-spy in
the environment of the job (pip install py-spy).
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path

LIBRARY = re.compile(r"/lib(64)?/python3|^<")  # Python's and pip's; all other code is yours
COLUMNS = ("port", "rank", "node", "pid", "your line", "inside")


def processes():
    """Return parent and environment of the Python processes that have a rank, by process ID."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            program = os.path.basename(os.readlink(folder / "exe"))
            text = (folder / "environ").read_text(errors="replace")
            parent = re.search(r"^PPid:\s+(\d+)", (folder / "status").read_text(), re.M)[1]
        except OSError:  # another user's, or it has just ended
            continue
        env = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
        if "RANK" in env and program.startswith("python"):
            found[int(folder.name)] = int(parent), env
    return found


def look(pid):
    """Return the line of your own code that a process runs, and the library's line inside it."""
    command = ["py-spy", "dump", "--json", "--pid", str(pid)]
    spy = subprocess.run(command, check=False, capture_output=True, text=True)
    threads = json.loads(spy.stdout or "[]")
    frames = next((t["frames"] for t in threads if t["os_thread_id"] == pid), None)
    if not frames:
        return spy.stderr.partition("\n")[0] or "not in Python yet", ""
    innermost = frames[0]
    own = next((f for f in frames if not LIBRARY.search(f["filename"])), innermost)
    lines = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in (own, innermost)]
    return lines[0], "" if own is innermost else lines[1]


def ranks_here():
    """Return the environment of each rank by process ID: of this machine or, in a job, of the job.

    A loader worker has the environment of its rank, and is none.
    """
    found = processes()
    job = os.environ.get("SLURM_JOB_ID")
    return {
        pid: env
        for pid, (parent, env) in found.items()
        if parent not in found and job in (None, env.get("SLURM_JOB_ID"))
    }


def rows_here():
    """Return a row for each rank here."""
    node = socket.gethostname()
    return [
        [env.get("MASTER_PORT", ""), int(env["RANK"]), node, pid, *look(pid)]
        for pid, env in ranks_here().items()
    ]


def on_each_node(job, option):
    """Run this file with an option once on each node of a Slurm job; return what it prints."""
    command = ["srun", f"--jobid={job}", "--overlap", sys.executable, __file__, option]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def table(rows):
    """Return the lines of a table, with an arrow at the ranks that are not where most ranks are.

    Of two places with the same number of ranks, the one where ranks wait for others gets no arrow.
    """
    places = [row[-2:] for row in rows]

    def weight(place):
        return places.count(place), bool(re.search("distributed|backward", place[1]))

    most = max(places, key=weight)
    cells = [[*COLUMNS[1:], ""]]
    cells += [[*map(str, row[1:]), "" if row[-2:] == most else "<--"] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", nargs="?", help="a Slurm job; without it, look at this machine")
    parser.add_argument("--signal", help="send it to each rank of the job: ABRT, TERM, ...")
    parser.add_argument("--json", action="store_true", help="print no table")
    args = parser.parse_args()
    if args.signal:
        if args.job:
            on_each_node(args.job, f"--signal={args.signal}")
        elif "SLURM_JOB_ID" in os.environ:
            for pid in ranks_here():
                os.kill(pid, signal.Signals[f"SIG{args.signal}"])
        else:
            parser.error("--signal needs the number of a job")
        sys.exit()
    if not shutil.which("py-spy"):
        sys.exit("py-spy is missing: pip install py-spy")
    if args.job:
        rows = [row for line in on_each_node(args.job, "--json") for row in json.loads(line)]
    else:
        rows = rows_here()
    if args.json:
        print(json.dumps(rows))
    elif not rows:
        sys.exit("no rank was found")
    else:
        for _, job in groupby(sorted(rows), key=itemgetter(0)):
            print(*table(list(job)), sep="\n")
