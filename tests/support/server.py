"""Forks ranks from a process that has imported PyTorch, because imports dominate a short run.

Tests import `command`. This file is also a program: without arguments it is the server, and
`server.py run NPROCS RESTARTS SCRIPT ARGUMENTS` asks the server to run a script with the caller's
folder, environment, input and output. A run is killed when its caller ends, or when the tests end.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

VARIABLE = "DDP_LADDER_SERVER"  # path of the server's socket, for every process of the tests
AT_ONCE = "DDP_LADDER_AT_ONCE"  # if set, ranks do not free their modules, which takes 0.6 s
GRACE = 60  # seconds that the other ranks have to end after one has failed
# A process that has asked CUDA for its GPUs cannot fork processes that use them.
WITHOUT_CUDA = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
SET_CHILD_SUBREAPER = 36  # prctl: adopt orphaned descendants

# ---------------------------------------------------------------- the callers


def command(program, *args, nprocs=0, restarts=0):
    """Return a command that runs a script on `nprocs` ranks, or, if `nprocs` is 0, without a group.

    The command exits once all processes that the script started have ended. `program` may be "-m",
    followed by a module's name. A script that fails is restarted up to `restarts` times.
    """
    start()
    return [sys.executable, "-I", __file__, "run", nprocs, restarts, program, *args]


def start():
    """Start the server unless it is running. It ends together with this process."""
    if VARIABLE in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="server-")
    os.environ[VARIABLE] = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, **WITHOUT_CUDA, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # the server ends when this process closes it, or dies
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C ends the tests, which end the server
    )
    assert process.stdout.read(1), "the server did not start"
    atexit.register(folder.cleanup)
    atexit.register(process.communicate)


def ask(nprocs, restarts, *argv):
    """Have the server run a script; exit as the script does."""
    request = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}
    request |= {"nprocs": int(nprocs), "restarts": int(restarts)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[VARIABLE])
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        code = int(server.recv(64) or 1)
    if code < 0:  # die of the same signal
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# ---------------------------------------------------------------- the server


def serve():
    """Fork a process for each request, for as long as the process of the tests is alive."""
    faulthandler.enable()  # a rank that crashes prints its line
    import gc

    sys.modules["pandas"] = sys.modules["pyarrow"] = None  # they would start a thread
    import sklearn.datasets
    import sklearn.metrics
    import sklearn.model_selection  # noqa: F401
    import torch._dynamo
    import torch.distributed.nn  # noqa: F401  # before a process group exists, as in the scripts
    from support import jobs  # noqa: F401

    del sys.modules["pandas"], sys.modules["pyarrow"]
    gc.freeze()  # so forked processes share the memory of the imports
    tests = os.dup(0)  # becomes readable when the process of the tests has ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[VARIABLE])
        listener.listen(64)
        os.write(1, b"r")
        while tests not in select.select([tests, listener], [], [])[0]:
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # so that the CPU time of children counts
                    pass
            if os.fork() == 0:
                listener.close()
                perform(connection, tests)
            connection.close()


def perform(connection, tests):
    """Carry out a request, and answer with the exit code."""
    import ctypes

    for number, fd in enumerate(socket.recv_fds(connection, 1, 3)[1]):
        os.dup2(fd, number)
        os.close(fd)
    request = json.loads(connection.makefile("rb").readline())
    os.setsid()
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= request["env"]
    for attempt in range(request["restarts"] + 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # as torchrun does
        codes = wait(fork(request["nprocs"], request["argv"]), [connection, tests])
        if not any(codes):
            break
    if any(codes) and request["nprocs"]:
        print(f"exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
    connection.send(str(int(any(codes)) if request["nprocs"] else codes[0]).encode())
    os._exit(0)


def fork(nprocs, argv):
    """Fork the ranks and return their process IDs, in order."""
    if nprocs:
        from support import gpus
        from support.jobs import free_port

        shared = gpus.shared(nprocs)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nprocs))
    ranks = []
    for rank in range(max(nprocs, 1)):
        if child := os.fork():
            ranks.append(child)
            continue
        os.setsid()  # as torchrun does
        if nprocs:
            os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": str(rank)} if shared else {}
        become(argv)
    return ranks


def wait(ranks, others):
    """Wait until all descendants have ended, and return the exit codes of the ranks.

    Kill everything if one of `others` becomes readable, and the remaining ranks GRACE seconds after
    one has failed.
    """
    codes, limit = {}, None
    with contextlib.suppress(ChildProcessError):  # all have ended
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in ranks:
                codes[pid] = os.waitstatus_to_exitcode(status)
                limit = limit or (codes[pid] and time.monotonic() + GRACE)
            elif select.select(others, [], [], 0 if pid else 0.02)[0]:
                end()
            elif limit and time.monotonic() > limit:
                for rank in set(ranks) - set(codes):
                    os.kill(rank, 9)
    return [codes[rank] for rank in ranks]


def end():
    """Kill all descendants, and end this process."""
    import psutil

    with contextlib.suppress(ChildProcessError):
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            os.waitpid(-1, 0)
    os._exit(1)


def become(argv):
    """Run a script in this process, as the interpreter would."""
    import numpy as np

    np.random.seed()  # as a fresh import would; Python's random reseeds itself after a fork
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(1, folder)
        if os.path.exists(site := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(site)
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[0] = argv[1:], os.getcwd()
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    if AT_ONCE in os.environ and isinstance(code, int):
        threading._shutdown()  # waits for the script's threads, as Python does
        atexit._run_exitfuncs()
        with contextlib.suppress(ValueError):  # the script may have closed it
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        ask(*sys.argv[2:])
    sys.path[0] = os.path.dirname(os.path.dirname(__file__))  # so that `support` is found
    serve()
