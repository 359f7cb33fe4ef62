"""Asks the server to run a script with this process's folder, environment, input and output.

client.py NPROCS RESTARTS SCRIPT ARGUMENTS
"""

import contextlib
import json
import os
import signal
import socket
import sys

nprocs, restarts, *argv = sys.argv[1:]
request = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}
request |= {"nprocs": int(nprocs), "restarts": int(restarts)}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["DDP_LADDER_SERVER"])
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [data[:1]], [0, 1, 2])
    server.sendall(data[sent:])
    code = int(server.recv(64) or 1)
if code < 0:  # die of the same signal
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
