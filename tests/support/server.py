"""Forks ranks from a process that has already imported PyTorch, so no run has to import it again.

Tests call `command`. The command that it returns runs this file as `server.py run ...`, which asks
the server to run a script with the folder, the environment and the output of the command.
`server.py serve` is the server, and one process of pytest starts it for all tests.
"""

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import wait

VARIABLE = "DDP_LADDER_SERVER"  # environment variable with the path of the server's socket
GRACE = 60  # number of seconds that the other ranks have to end after one rank has failed
# A process that has asked CUDA for its GPUs cannot fork processes that use them.
WITHOUT_CUDA = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
FORK = multiprocessing.get_context("fork")


def command(program, *args, nprocs=0, restarts=0):
    """Return a command that runs a script on `nprocs` ranks, or, if `nprocs` is 0, without a group.

    If the script fails, it is started again, at most `restarts` times.
    """
    start()
    return [sys.executable, "-I", __file__, "run", nprocs, restarts, program, *args]


def start():
    """Start the server, unless it is running. It ends when this process does."""
    if VARIABLE in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="server-")
    atexit.register(folder.cleanup)
    os.environ[VARIABLE] = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:  # requests wait until the server is ready
        listener.bind(os.environ[VARIABLE])
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno())],
            env={**os.environ, **WITHOUT_CUDA, "OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C ends the tests, and then the server
        )


def ask(*request):
    """Ask the server to run a script, and exit as the script does."""
    request = json.dumps([request, os.getcwd(), dict(os.environ)])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[VARIABLE])
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        server.sendall(f"{request}\n".encode())
        code = int(server.recv(64) or 1)
    if code < 0:  # a signal has killed the script
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(listener):
    """Fork a process for each request."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die when the tests end
    sys.path[0] = os.path.dirname(os.path.dirname(__file__))  # so that `support` is found
    sys.modules["pandas"] = sys.modules["pyarrow"] = None  # these modules would start a thread
    import sklearn.metrics
    import sklearn.model_selection  # noqa: F401
    import torch._dynamo
    import torch.distributed.nn  # noqa: F401  # before a process group exists, as in the scripts
    from support import jobs  # noqa: F401

    del sys.modules["pandas"], sys.modules["pyarrow"]
    gc.freeze()  # so that forked processes share the memory of the imports
    while True:
        caller, _ = listener.accept()
        FORK.Process(target=answer, args=[caller]).start()
        caller.close()


def answer(caller):
    """Run the script that the caller asks for, and answer with the exit code."""
    for number, fd in enumerate(socket.recv_fds(caller, 1, 3)[1]):
        os.dup2(fd, number)
        os.close(fd)
    (nprocs, restarts, *argv), folder, env = json.loads(caller.makefile("rb").readline())
    os.chdir(folder)
    os.environ.clear()
    os.environ |= env
    for attempt in range(int(restarts) + 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # as torchrun does
        codes = run(argv, int(nprocs), caller)
        if not any(codes):
            break
    if nprocs != "0" and any(codes):
        print(f"exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
        codes = [1]
    caller.send(str(codes[0]).encode())


def run(argv, nprocs, caller):
    """Run a script on forked ranks, and return their exit codes.

    All ranks are killed if the caller ends. If one rank fails, the others are killed after GRACE.
    """
    if nprocs:
        from support.jobs import free_port

        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nprocs))
    each = [(rank, nprocs, argv) for rank in range(max(nprocs, 1))]
    ranks = [FORK.Process(target=be_rank, args=args) for args in each]
    for rank in ranks:
        rank.start()
    while running := [rank for rank in ranks if rank.is_alive()]:
        failed = any(rank.exitcode for rank in ranks)
        ended = wait([caller, *(rank.sentinel for rank in running)], GRACE if failed else None)
        if not ended or caller in ended:
            for rank in running:
                rank.kill()
    return [rank.exitcode for rank in ranks]


def be_rank(rank, nprocs, argv):
    """Run a script in this process, as the interpreter would."""
    import numpy as np
    import torch.multiprocessing as mp

    os.setsid()  # as torchrun does
    if nprocs:
        from support import gpus

        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": str(rank)} if gpus.shared(nprocs) else {}
        mp.spawn = lambda main, args, nprocs: main(rank, os.environ["MASTER_PORT"], *args[1:])
    np.random.seed()  # as a new import would; Python's random reseeds itself after a fork
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(1, folder)
        if os.path.exists(site := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(site)
    try:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:  # as at the end of a program, which multiprocessing skips in a forked process
        threading._shutdown()
        atexit._run_exitfuncs()


if __name__ == "__main__":
    if sys.argv[1] == "run":
        ask(*sys.argv[2:])
    serve(socket.socket(fileno=int(sys.argv[2])))
