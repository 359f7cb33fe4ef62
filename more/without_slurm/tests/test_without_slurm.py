"""The commands of the page, the script for ssh, and the Kubernetes file."""

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
from support.results import epochs, same_bits
from support.scripts import LONG, ROOT, SCRIPT, SMALL, edit

FOLDER = ROOT / "more" / "without_slurm"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
VALIDATE = "needs: pip install kubernetes-validate"

pytestmark = pytest.mark.xdist_group("machines")  # these tests mostly wait


@pytest.mark.weekly("one more way to start two nodes, as slurm/tests/test_nodes.py does often")
def test_two_terminals(machines, tmp_path, trained):
    """Type the page's command in a folder on each machine; with a copied file, both resume."""
    (typed,) = set(re.findall(r"^node\d\$ (torchrun .*\\\n.*)$", PAGE, re.MULTILINE))
    folders = [tmp_path / name for name in ("node1", "node2")]
    for folder in folders:
        folder.mkdir()
        shutil.copy(SCRIPT["04"], folder)
    for args, expected in ((("2", *SMALL), [1, 2]), (LONG, [3, 4])):
        one, two = machines.on_both(f"cd $(hostname); {typed} {' '.join(args)}", tmp_path)
        assert (epochs(one), two.stdout) == (expected, "")
        shutil.copy(folders[0] / "checkpoint.pt", folders[1])
    assert same_bits(folders[0] / "checkpoint.pt", trained("03", *LONG))


# ---------------------------------------------------------------- ssh

UNTIL_REACHED = "for n in node1 node2; do until (: < /dev/tcp/$n/22) 2> /dev/null; do :; done; done"


def home(keys, command):
    """Return a command with these keys in place of the user's, on this machine only."""
    own = "$(getent passwd 0 | cut -d: -f6)/.ssh"
    return f"mkdir -p /run/sshd {own}; mount --bind {keys} {own} && {command}"


def alive(folder):
    """Return the Python processes in a folder; sshd gives them an environment of their own."""
    every = psutil.process_iter(["cwd", "exe"])
    inside = [process for process in every if process.info["cwd"] == str(folder)]
    return [process for process in inside if "python" in process.info["exe"]]


@pytest.fixture
def laptop(machines, tmp_path):
    """Return a folder with the script, and a function that types there on a third machine.

    Two machines have an sshd, which lets the third one in. All use the same key.
    """
    keys, folder = tmp_path / "keys", tmp_path / "repository"
    keys.mkdir(mode=0o700)
    folder.mkdir()
    key = keys / "id_ed25519"
    subprocess.run(["ssh-keygen", "-qN", "", "-t", "ed25519", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text(encoding="utf-8")
    (keys / "authorized_keys").write_text(public, encoding="utf-8")
    (keys / "known_hosts").write_text(f"node1,node2 {public}", encoding="utf-8")
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    shutil.copy(FOLDER / "over_ssh.sh", folder)
    edit(folder / "over_ssh.sh", "nproc=gpu", "nproc=1")
    edit(folder / "over_ssh.sh", "activate'\n", "activate && export OMP_NUM_THREADS=1'\n")
    start = f"exec {SSHD} -D -e -f /dev/null -h {key} -o PidFile=none -o PermitRootLogin=yes"
    sshds = [machines.terminal(number, home(keys, start), folder) for number in (1, 2)]
    try:
        typed = f"{UNTIL_REACHED}; exec {{}}"
        yield folder, lambda line: machines.terminal(None, home(keys, typed.format(line)), folder)
    finally:  # sshd has overwritten the environment by which Job knows its processes
        for process in [*alive(folder), *(sshd.process for sshd in sshds)]:
            kill(process)


@pytest.mark.slow
@pytest.mark.skipif(not SSHD, reason="apt-get install openssh-server openssh-client")
@pytest.mark.parametrize("end", ["Ctrl-C", "a rank is killed", "the shell is killed"])
def test_over_ssh(laptop, end):
    """Ctrl-C is SIGTERM for the ranks on both. All end if one fails, or if the shell dies."""
    folder, type_there = laptop
    (folder / "simple.py").write_text(SIMPLE, encoding="utf-8")
    with type_there("bash over_ssh.sh node1,node2 simple.py --checkpoint-path=run") as job:
        job.wait_for(lambda: job.stdout.count("finds 2 ") == 2)
        started = sorted(alive(folder), key=psutil.Process.create_time)
        assert len(started) == 4
        ends = started[-1] if end == "a rank is killed" else job.process
        kill(ends, signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
        assert job.wait(60).returncode in (1, -signal.SIGKILL), job
        assert not psutil.wait_procs(started, timeout=60)[1]
    assert end != "Ctrl-C" or job.stdout.count("told\n") == 2, job


# ---------------------------------------------------------------- Kubernetes


@pytest.fixture
def manifests():
    yaml = pytest.importorskip("yaml", reason=VALIDATE)
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))


def test_kubernetes_accepts_the_file(manifests):
    schemas = pytest.importorskip("kubernetes_validate", reason=VALIDATE)
    for document in manifests:
        schemas.validate(document, "1.33", strict=True)  # unknown fields are errors
    service, job = manifests
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    command, gpus = container["command"][-1], container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"host={name}-0.{pod['subdomain']}\n" in command
    assert f"--nnodes={job['spec']['completions']} --nproc-per-node={gpus} " in command
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert pod["terminationGracePeriodSeconds"] > int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])


@pytest.mark.weekly("the command is torchrun's on two nodes, as slurm's tests run it often")
def test_the_command_of_the_pods(machines, tmp_path, manifests):
    """On two machines that are called as pods are; SIGTERM to a pod's first process arrives."""
    machines.names({"node{}": LIVE, "ddp-ladder-{1}.ddp-ladder": LIVE})
    [container] = manifests[1]["spec"]["template"]["spec"]["containers"]
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
