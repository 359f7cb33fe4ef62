"""The commands of the page, the script for ssh, and the Kubernetes file."""

import re
import shutil
import signal

import pytest
from clusters import SIMPLE
from machines import LIVE
from support.jobs import Job, kill
from support.results import epochs, same_bits
from support.scripts import LONG, ON_PATH, ROOT, SCRIPT, SMALL, edit

FOLDER = ROOT / "more" / "without_slurm"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
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

SSH = """\
#!/bin/bash
# In place of ssh: like sshd, it runs the command in a shell, which reads what is sent.
shift
exec bash -c "$*"
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "a rank is killed", "the shell is killed"])
def test_over_ssh(tmp_path, end):
    """Ctrl-C is SIGTERM for the ranks on both. All end if one fails, or if the shell dies."""
    shutil.copy(FOLDER / "over_ssh.sh", tmp_path)
    edit(tmp_path / "over_ssh.sh", "nproc=gpu", "nproc=1")
    edit(tmp_path / "over_ssh.sh", "source .venv/bin/activate", "cd .")
    edit(tmp_path / "over_ssh.sh", "GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=lo")
    (tmp_path / "simple.py").write_text(SIMPLE, encoding="utf-8")
    (tmp_path / "ssh").write_text(SSH, encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{ON_PATH['PATH']}"}
    words = ["bash", "over_ssh.sh", "localhost,localhost", "simple.py", "--checkpoint-path=run"]
    with Job(words, tmp_path, env) as job:
        job.wait_for(lambda: job.stdout.count("finds 2 ") == 2)
        ends = job.workers()[1] if end == "a rank is killed" else job.process
        kill(ends, signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
        assert job.wait(60).returncode in (1, -signal.SIGKILL), job
        job.wait_until_gone(60)
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
