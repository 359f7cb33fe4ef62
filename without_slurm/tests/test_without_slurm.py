"""The script, the Kubernetes file and the page in without_slurm/."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from clusters import SIMPLE
from machines import LIVE
from support.jobs import kill
from support.scripts import ROOT, edit

SLOW = pytest.mark.slow
FOLDER = ROOT / "without_slurm"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.xdist_group("machines")  # these tests mostly wait

# ---------------------------------------------------------------- two machines, over ssh

LAPTOP = 3  # the machine where the script is started
SSHD_OPTIONS = ["PidFile=none", "UsePAM=no", "PermitRootLogin=yes", "PasswordAuthentication=no"]


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
    every = psutil.process_iter(["cwd", "exe"])
    inside = [process for process in every if process.info["cwd"] == str(folder)]
    return [process for process in inside if "python" in process.info["exe"]]


@SLOW
@pytest.mark.skipif(not SSHD, reason="apt-get install openssh-server openssh-client")
@pytest.mark.parametrize("end", ["Ctrl-C", "a rank is killed", "the shell is killed"])
def test_over_ssh(reached, end):
    """Ctrl-C is SIGTERM for the ranks on both. All end if one fails, or if the shell dies."""
    folder, on_the_laptop = reached
    (folder / "simple.py").write_text(SIMPLE, encoding="utf-8")
    with on_the_laptop("exec bash over_ssh.sh node1,node2 simple.py --checkpoint-path=run") as job:
        job.wait_for(lambda: job.stdout.count("finds 2 ") == 2)
        started = sorted(alive(folder), key=psutil.Process.create_time)
        assert len(started) == 4
        ends = started[-1] if end == "a rank is killed" else job.process
        kill(ends, signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
        assert job.wait(60).returncode in (1, -signal.SIGKILL), job
        assert not psutil.wait_procs(started, timeout=60)[1]
    assert end != "Ctrl-C" or job.stdout.count("told\n") == 2, job


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
    machines.names({"node{}": LIVE, "ddp-ladder-{1}.ddp-ladder": LIVE})
    _, job = manifests()
    [container] = job["spec"]["template"]["spec"]["containers"]
    command = container["command"][-1].replace("--nproc-per-node=4", "--nproc-per-node=1")
    own = f"export JOB_COMPLETION_INDEX=$SLURM_NODEID POD_IP={LIVE}.$((SLURM_NODEID + 1))\n"
    (tmp_path / "04_multinode.py").write_text(SIMPLE, encoding="utf-8")

    def stop(*pods):
        for pod in pods:
            pod.wait_for("^finds 2 ")
        for pod in pods:
            kill(pod.process, signal.SIGTERM)

    for pod in machines.on_both(own + command, tmp_path, code=1, meanwhile=stop):
        assert "told" in pod.stdout


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
    import nbformat

    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # or the kernel does not show what processes print
    calls = [f"mp.start_processes(main, (), 2, start_method='{how}')" for how in ("spawn", "fork")]
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(text) for text in (DEFINED, *calls)]
    nbclient.NotebookClient(book, allow_errors=True, kernel_name="python3").execute()
    printed = [[output.get("text", "") for output in cell.outputs] for cell in book.cells]
    _, spawned, forked = map("".join, printed)
    [shown] = re.findall(r"^```\n(AttributeError: .+)\n```$", PAGE, re.MULTILINE)
    assert shown in spawned
    assert "ran\n" not in spawned
    assert sorted(forked.split("\n")) == ["", "rank 0 ran", "rank 1 ran"]
