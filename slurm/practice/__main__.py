"""Start a Slurm cluster on this machine, and open a shell on its login node.

sudo python3 slurm/practice. When you leave the shell, nothing is left of the cluster.
"""

import argparse
import contextlib
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.dont_write_bytecode = True  # it would belong to root, in the user's repository

from cluster import SPACES, Cluster, child, missing  # noqa: E402

HERE = Path(__file__).resolve().parent

HELP = """\
Besides Slurm's commands, the shell has five that cause trouble:
  power-off NODE    end everything on a node at once
  power-on NODE     boot it again, after Slurm has marked it down
  pull-cable NODE   cut a node off the network
  plug-in NODE      connect it again
  preempt JOB       take its nodes for ten seconds, for a job of higher priority"""

WELCOME = """\
{version} with {nodes} nodes of {gpus} GPUs each. This shell is on the login node.

Real: Slurm, and for each node a network address, a host name and processes of its own.
Not real: the GPUs, which are only names, so the scripts train on the CPU over gloo. All nodes
share the cores and the file system of this machine, and none of them reaches the internet.

{help}

Jobs run as {user}. Ctrl-D or exit ends the cluster and its jobs, and leaves the files they wrote.
"""


# ---------------------------------------------------------------- trouble


def power_on(cluster, number):
    """Boot a node once Slurm has marked it down: a real machine takes minutes to boot."""
    end = time.monotonic() + 60
    while not (cluster.is_on(number) or cluster.is_down(number) or time.monotonic() > end):
        time.sleep(0.5)
    cluster.switch_on(number)


TROUBLE = {
    "power-off": Cluster.cut_the_power,
    "power-on": power_on,
    "pull-cable": lambda cluster, number: cluster.cable(number, "down"),
    "plug-in": lambda cluster, number: cluster.cable(number, "up"),
}


def serve(cluster):
    """Do what the shell asks for."""
    numbers = {f"node{number}": number for number in range(1, cluster.nodes + 1)}
    while True:
        verb, *names = (cluster.folder / "ask").read_text(encoding="utf-8").split()
        with (
            contextlib.suppress(BrokenPipeError),  # Ctrl-C: the shell no longer listens
            (cluster.folder / "answer").open("w", encoding="utf-8") as answer,
        ):
            if number := numbers.get(" ".join(names)):
                with contextlib.suppress(subprocess.CalledProcessError):  # it has said why
                    TROUBLE[verb](cluster, number)
            else:
                print(f"usage: {verb} NODE, one of {', '.join(numbers)}", file=answer)


# ---------------------------------------------------------------- the shell


def open_shell(cluster, user):
    """Give the user a shell on the login node."""
    for name in ("ask", "answer"):
        os.mkfifo(cluster.folder / name, 0o600)
        os.chown(cluster.folder / name, user.pw_uid, user.pw_gid)
    threading.Thread(target=serve, args=[cluster], daemon=True).start()
    version = cluster.run("sinfo", "--version").strip()
    values = {"nodes": cluster.nodes, "gpus": cluster.gpus, "help": HELP, "user": user.pw_name}
    print(WELCOME.format(version=version, **values), flush=True)
    enter = ["nsenter", *SPACES, "-t", str(child(cluster.outer.pid))]
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
    shell = ["env", f"--chdir={HERE.parents[1]}", f"CLUSTER={cluster.folder}"]
    shell += ["bash", "--rcfile", HERE / "shell.rc", "-i"]
    subprocess.run([*enter, *become, "--reset-env", *shell], check=False)


def main():
    parser = argparse.ArgumentParser(
        prog="slurm/practice",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=HELP,
    )
    number = {"type": int, "choices": range(1, 33), "metavar": "N"}
    parser.add_argument("--nodes", **number, default=2, help="default: 2")
    parser.add_argument("--gpus", **number, default=4, help="per node; default: 4")
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.umask(0o022)  # the user has to read slurm.conf
    user = pwd.getpwuid(int(os.environ.get("SUDO_UID", "0")))
    with tempfile.TemporaryDirectory(prefix="cluster-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        with Cluster(folder, args.nodes, args.gpus) as cluster:
            open_shell(cluster, user)


if __name__ == "__main__":
    main()
