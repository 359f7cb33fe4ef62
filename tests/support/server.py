"""Forks runs of scripts from a process that has imported PyTorch: most of a short run is imports.

As a program, `server.py SOCKET` serves the requests of client.py until its standard input ends. The
tests import only `command`, which starts one server for all of them.
"""

import atexit
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VARIABLE = "DDP_LADDER_SERVER"  # its socket; tests that run tests share the server


def command(program, *args, nprocs=0, restarts=0):
    """Return a command that runs a script with so many ranks, or for 0 as a program of its own.

    It ends when all processes that the script has forked have ended. "-m" and the name of a module
    may take the script's place. With restarts, the script is started so many times more.
    """
    start()
    return [sys.executable, "-I", HERE / "client.py", nprocs, restarts, program, *args]


@functools.cache
def start():
    """Start the server unless there is one; it ends with this process."""
    if VARIABLE in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="server-")
    address = f"{folder.name}/socket"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, __file__, address],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C ends the tests, which end the server
    )
    assert process.stdout.read(1), "the server did not start"

    @atexit.register
    def stop():
        process.communicate()
        folder.cleanup()

    os.environ[VARIABLE] = address


# ---------------------------------------------------------------- the server


def serve(address):
    """Fork a process for each request."""
    import gc

    import jobs  # noqa: F401  # as a program, this file has its folder on the path
    import sklearn.datasets
    import sklearn.metrics
    import sklearn.model_selection  # noqa: F401
    import torch._dynamo
    import torch.distributed.nn  # noqa: F401  # before a process group exists, as the scripts do

    gc.freeze()  # so that the forked processes share the memory of what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"r")
    while True:
        if 0 in select.select([0, listener], [], [])[0]:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            perform(connection)
        connection.close()


def perform(connection):
    """Do what a request asks for, in a new session, and answer with the exit code."""
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    request = json.loads(data)
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= request["env"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for _ in range(request["restarts"] + 1):
        codes = fork(connection, request["nprocs"], request["argv"])
    code = codes[0] if not request["nprocs"] else int(any(codes))
    if any(codes):
        print(f"exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
    connection.send(str(code).encode())
    os._exit(0)


def fork(connection, nprocs, argv):
    """Fork the ranks, wait for all of them, and return their exit codes."""
    if nprocs:
        from jobs import free_port

        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nprocs))
    running, codes = {}, []
    for rank in range(max(nprocs, 1)):
        if child := os.fork():
            running[os.pidfd_open(child)] = child
            continue
        if nprocs:
            os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        become(argv)
    while running:
        ready, _, _ = select.select([connection, *running], [], [])
        if connection in ready:  # the client has been killed: end all, this process too
            os.killpg(0, signal.SIGKILL)
        for fd in ready:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(running.pop(fd), 0)[1]))
            os.close(fd)
    return codes


def become(argv):
    """Run a script in this process, as the interpreter would."""
    import numpy as np

    np.random.seed()  # as in a process that imports it itself; Python's random does it, too
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (path := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(path))
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])
