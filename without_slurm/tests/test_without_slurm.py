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
from support.jobs import kill, run
from support.scripts import ROOT, edit

SLOW = pytest.mark.slow
FOLDER = ROOT / "without_slurm"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.xdist_group("machines")  # these tests mostly wait

# ---------------------------------------------------------------- two machines, over ssh

LAPTOP = 3  # the machine where the script is started
SSHD_OPTIONS = ["PidFile=none", "UsePAM=no", "PermitRootLogin=yes", "PasswordAuthentication=no"]
# Instead of a step: each rank waits until it gets SIGTERM, or is to fail.
WAITS = """\
import os, signal, time
rank = os.environ["RANK"]
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
open(f"held-{rank}", "w").close()
while not told and not os.path.exists(f"fail-{rank}"):
    time.sleep(0.05)
os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']} told: {told}\\n".encode())
raise SystemExit(75)
"""
BOTH_TOLD = {f"rank {rank} of 2 told: [15]" for rank in (0, 1)}


def wait_until_held(job):
    job.wait_for(lambda: len(list(job.cwd.glob("held-*"))) == 2)


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
    """Ctrl-C is SIGTERM for the ranks on both. All end if one fails, or if the shell dies."""
    folder, on_the_laptop = reached
    (folder / "waits.py").write_text(WAITS, encoding="utf-8")
    for end in ("Ctrl-C", "fail", "kill"):
        with on_the_laptop("exec bash over_ssh.sh node1,node2 waits.py") as job:
            wait_until_held(job)
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
            assert set(job.stdout.splitlines()) >= BOTH_TOLD, job
        for path in folder.glob("*-?"):
            path.unlink()


# ---------------------------------------------------------------- spot machines


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata of a spot machine, which is taken back once training is ready for it."""

    ready = None  # a file

    def do_PUT(self):
        self.send_response(200 if self.path == "/latest/api/token" else 404)
        self.end_headers()
        self.wfile.write(b"token")

    def do_GET(self):
        known = self.headers["X-aws-ec2-metadata-token"] == "token"
        told = self.path == "/latest/meta-data/spot/instance-action" and self.ready.exists()
        self.send_response(200 if known and told else 404)
        self.end_headers()


@pytest.mark.skipif(not shutil.which("curl"), reason="needs: apt-get install curl")
def test_a_spot_machine_is_taken_back(tmp_path, monkeypatch):
    monkeypatch.setattr(Metadata, "ready", tmp_path / "ready")
    script = re.search(r"^```bash\n(#!/bin/bash\n# bash spot(?s:.*?))^```$", PAGE, re.M)[1]
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        path = tmp_path / "spot.sh"
        path.write_text(script.replace("169.254.169.254", address).replace("sleep 5", "sleep 0.2"))
        told = "trap 'echo saved; exit 75' TERM; touch ready; while :; do sleep 0.1; done"
        start = ["bash", "spot.sh", "bash", "-c"]
        job, ended = (run([*start, words], tmp_path) for words in (told, "exit 3"))
        server.shutdown()
    assert (job.returncode, job.stdout) == (75, "saved\n")
    assert ended.returncode == 3


# ---------------------------------------------------------------- Kubernetes


VALIDATE = "needs: pip install kubernetes-validate"


def manifests():
    yaml = pytest.importorskip("yaml", reason=VALIDATE)
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))


def test_kubernetes_accepts_the_file():
    schemas = pytest.importorskip("kubernetes_validate", reason=VALIDATE)
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
    """On two machines that are called as pods are; SIGTERM to a pod's first process arrives."""
    hosts = [f"{LIVE}.{n} ddp-ladder-{n - 1}.ddp-ladder node{n}\n" for n in (1, 2)]
    machines.hosts.write_text("127.0.0.1 localhost\n" + "".join(hosts), encoding="utf-8")
    _, job = manifests()
    [container] = job["spec"]["template"]["spec"]["containers"]
    command = container["command"][-1].replace("--nproc-per-node=4", "--nproc-per-node=1")
    (tmp_path / "04_multinode.py").write_text(WAITS, encoding="utf-8")
    values = [{"JOB_COMPLETION_INDEX": str(n - 1), "POD_IP": f"{LIVE}.{n}"} for n in (1, 2)]
    one, two = (machines.terminal(n, command, tmp_path, **values[n - 1]) for n in (1, 2))
    with one, two:
        wait_until_held(one)
        for pod in (one, two):
            kill(pod.process, signal.SIGTERM)
        for pod in (one, two):
            assert pod.wait().returncode == 1, pod
            pod.wait_until_gone()
    assert {one.stdout.strip(), two.stdout.strip()} == BOTH_TOLD


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
