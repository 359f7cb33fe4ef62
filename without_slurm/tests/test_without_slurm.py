"""The script, the Kubernetes file and the page in without_slurm/."""

import contextlib
import http.server
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from machines import LIVE
from support.jobs import kill
from support.results import epochs
from support.scripts import ROOT, edit, edited

SLOW = pytest.mark.slow
FOLDER = ROOT / "without_slurm"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.xdist_group("machines")  # these tests mostly wait

# ---------------------------------------------------------------- two machines, over ssh

ARGS = ("2", "--batch-size=179", "--width=4")
LAPTOP = 3  # the machine where the script is started
SSHD_OPTIONS = ["PidFile=none", "UsePAM=no", "PermitRootLogin=yes", "PasswordAuthentication=no"]
HELD = (  # the ranks wait in epoch 2, where they next ask whether to stop, until one is told
    "        for step, (source, targets) in enumerate(self.train_loader):\n",
    """\
        for step, (source, targets) in enumerate(self.train_loader):
            while (self.epochs_run, step) == (1, 10) and not os.path.exists("told"):
                open(f"held-{dist.get_rank()}", "w").close()
                if stop_signals:
                    open("told", "w").close()
                time.sleep(0.05)
""",
)
# Instead of the script: each rank waits until it is told to fail.
WAITS = """\
import os, time
open(f"held-{os.environ['RANK']}", "w").close()
while not os.path.exists(f"fail-{os.environ['RANK']}"):
    time.sleep(0.05)
raise SystemExit(3)
"""


@pytest.fixture
def reached(machines, tmp_path):
    """Two machines with sshd, which a third may enter; the script is in the folder of all."""
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "id_ed25519"):
        subprocess.run(["ssh-keygen", "-qN", "", "-t", "ed25519", "-f", keys / name], check=True)
    shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
    public = " ".join((keys / "host.pub").read_text().split()[:2])
    (keys / "known_hosts").write_text(f"node1,node2 {public}\n", encoding="utf-8")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    shutil.copy(FOLDER / "over_ssh.sh", folder)
    edit(folder / "over_ssh.sh", "nproc=gpu", "nproc=1")
    edit(folder / "over_ssh.sh", "activate'\n", "activate && export OMP_NUM_THREADS=1'\n")
    options = [*SSHD_OPTIONS, f"HostKey={keys}/host", "AuthorizedKeysFile=.ssh/authorized_keys"]
    start = f"exec {SSHD} -D -e -f /dev/null " + " ".join(f"-o {option}" for option in options)
    sshds = [machines.terminal(number, home(keys, start), folder) for number in (1, 2)]
    try:
        sshds[0].wait_for(lambda: all(22 in machines.listening(number) for number in (1, 2)))
        yield folder, lambda words: machines.terminal(LAPTOP, home(keys, words), folder)
    finally:  # sshd has overwritten the environment by which Job knows its processes
        for process in [*alive(folder), *(sshd.process for sshd in sshds)]:
            kill(process)


def home(keys, command):
    """Return a command with these keys in place of the user's, on this machine only."""
    own = "$(getent passwd 0 | cut -d: -f6)/.ssh"
    return f"mkdir -p /run/sshd {own}; mount --bind {keys} {own} && {command}"


def alive(folder):
    """Return the Python processes in a folder; sshd gives them an environment of their own."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder) and "python" in process.exe():
                found.append(process)
    return found


def until_gone(folder, seconds=60):
    end = time.monotonic() + seconds
    while left := alive(folder):
        assert time.monotonic() < end, left
        time.sleep(0.05)


@SLOW
@pytest.mark.skipif(not SSHD, reason="apt-get install openssh-server openssh-client")
def test_over_ssh(reached):
    """Ctrl-C saves and ends both. All end if one fails, or if the shell dies."""
    folder, on_the_laptop = reached
    edited(folder, "04", HELD)
    (folder / "waits.py").write_text(WAITS, encoding="utf-8")
    for end, script in (("Ctrl-C", "04_multinode.py"), ("fail", "waits.py"), ("kill", "waits.py")):
        with on_the_laptop(f"exec bash over_ssh.sh node1,node2 {script} {' '.join(ARGS)}") as job:
            job.wait_for(lambda: len(list(folder.glob("held-*"))) == 2)
            if end == "kill":
                kill(job.process)
            elif end == "fail":
                (folder / "fail-1").touch()
            else:
                job.process.send_signal(signal.SIGINT)
            if end != "kill":
                assert job.wait(60).returncode == 1, job
            until_gone(folder)
        if end == "Ctrl-C":
            assert (epochs(job), "interrupted after" in job.stdout) == ([1], True), job
            assert (folder / "checkpoint.pt.interrupted").exists()
        for path in folder.glob("*-?"):
            path.unlink()


# ---------------------------------------------------------------- spot machines


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata of a spot machine, which is taken back once training is ready for it."""

    ready = None  # a file

    def answer(self, found, text=b""):
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(text)

    def do_PUT(self):
        self.answer(self.path == "/latest/api/token", b"token")

    def do_GET(self):
        known = self.headers["X-aws-ec2-metadata-token"] == "token"
        path = "/latest/meta-data/spot/instance-action"
        self.answer(known and self.path == path and self.ready.exists())


@pytest.mark.skipif(not shutil.which("curl"), reason="needs: apt-get install curl")
def test_a_spot_machine_is_taken_back(tmp_path, monkeypatch):
    monkeypatch.setattr(Metadata, "ready", tmp_path / "ready")
    script = re.search(r"^```bash\n(#!/bin/bash\n# bash spot(?s:.*?))^```$", PAGE, re.M)[1]
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        path = tmp_path / "spot.sh"
        path.write_text(script.replace("169.254.169.254", address).replace("sleep 5", "sleep 0.2"))
        told = (
            f"trap 'echo saved; exit 75' TERM; touch {Metadata.ready}; while :; do sleep 0.1; done"
        )
        job, ended = (
            subprocess.run(["bash", path, *command], check=False, capture_output=True, timeout=300)
            for command in (["bash", "-c", told], ["bash", "-c", "exit 3"])
        )
        server.shutdown()
    assert (job.returncode, job.stdout) == (75, b"saved\n")
    assert ended.returncode == 3


# ---------------------------------------------------------------- Kubernetes


def manifests():
    yaml = pytest.importorskip("yaml", reason="needs: pip install kubernetes-validate")
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))


def test_kubernetes_accepts_the_file():
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="needs: pip install kubernetes-validate"
    )
    service, job = manifests()
    for document in (service, job):
        schemas.validate(document, "1.33", strict=True)  # unknown fields are errors
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    command = container["command"][-1]
    assert f"host={name}-0.{pod['subdomain']}\n" in command
    spec = job["spec"]
    assert f"--nnodes={spec['completions']} " in command
    assert spec["completions"] == spec["parallelism"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']} " in command
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert pod["terminationGracePeriodSeconds"] > int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.weekly("the command is torchrun's on two nodes, as slurm's tests run it often")
def test_the_command_of_the_pods(machines, tmp_path):
    """Two machines are called as pods are; SIGTERM to the first process of one reaches all."""
    hosts = [f"{LIVE}.{n} ddp-ladder-{n - 1}.ddp-ladder node{n}\n" for n in (1, 2)]
    machines.hosts.write_text("127.0.0.1 localhost\n" + "".join(hosts), encoding="utf-8")
    _, job = manifests()
    [container] = job["spec"]["template"]["spec"]["containers"]
    command = container["command"][-1].replace("--nproc-per-node=4", "--nproc-per-node=1")
    command = command.replace("/checkpoints/", "").rstrip() + f" {' '.join(ARGS)}\n"
    edited(tmp_path, "04", HELD)

    one, two = (
        machines.terminal(
            n, command, tmp_path, JOB_COMPLETION_INDEX=str(n - 1), POD_IP=f"{LIVE}.{n}"
        )
        for n in (1, 2)
    )
    with one, two:
        one.wait_for(lambda: len(list(tmp_path.glob("held-*"))) == 2)
        kill(two.process, signal.SIGTERM)
        for pod in (one, two):
            assert pod.wait().returncode == 1, pod
            pod.wait_until_gone()
    assert "interrupted after" in one.stdout
    assert (tmp_path / "checkpoint.pt.interrupted").exists()


# ---------------------------------------------------------------- notebooks

DEFINED = """\
import torch.multiprocessing as mp
def main(rank):
    print(f"rank {rank} ran", flush=True)
"""


@pytest.mark.weekly("starts a notebook's kernel: what PyTorch does there seldom changes")
def test_spawn_and_fork_in_a_notebook(monkeypatch):
    """The page shows the error of a spawned process; a forked one knows the function."""
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # or the kernel does not show what processes print
    calls = [
        f"mp.start_processes(main, nprocs=2, start_method='{how}')" for how in ("spawn", "fork")
    ]
    cells = [nbformat.v4.new_code_cell(text) for text in (DEFINED, *calls)]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, allow_errors=True, kernel_name="python3").execute()
    spawned, forked = (
        "".join(output.get("text", "") for output in cell.outputs) for cell in book.cells[1:]
    )
    [shown] = re.findall(r"^```\n(AttributeError: .+)\n```$", PAGE, re.MULTILINE)
    assert shown in spawned
    assert "ran\n" not in spawned
    assert sorted(forked.split("\n")) == ["", "rank 0 ran", "rank 1 ran"]
