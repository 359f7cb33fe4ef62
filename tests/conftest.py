"""Runs of the steps under their own launchers. All tests share them: each takes 20 s of a core."""

import signal
import textwrap

import pytest
import torch
from support import server
from support.jobs import RESTARTS, Job, finished, free_port
from support.once import once
from support.positions import GATE, KILLED, ON_RANK_1, at, wait_at_the_gate
from support.scripts import FOUR_EPOCHS, SCRIPT, TORCHRUN, command, digest, edited, on_each_rank

TRAINED = "    trainer.train(args.total_epochs, args.save_every)\n"
EVALUATES = "    model.eval()\n"
TWO_CORES = "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"


@pytest.fixture(autouse=True)
def forked_ranks_end_at_once(request, monkeypatch):
    """Forked ranks do not free their modules at exit, except in the tests of endings."""
    if request.module.__name__ != "test_ending":
        monkeypatch.setenv(server.AT_ONCE, "1")


@pytest.fixture(scope="session")
def spawned():
    """Run step 2 with mp.spawn, on two cores; each rank says how many threads it uses.

    It also says a checksum of its weights, and when it evaluates.
    """

    def make(cwd):
        says = on_each_rank("torch.get_num_threads()") + on_each_rank(digest("model.parameters()"))
        changes = [
            ("import torch\n", f"{TWO_CORES}import torch\n"),
            (TRAINED, TRAINED + textwrap.indent(says, "    ")),
            (EVALUATES, EVALUATES + textwrap.indent(on_each_rank("'evaluates'"), "    ")),
        ]
        script = edited(cwd, "02", *changes)
        return finished(command(script, *FOUR_EPOCHS), cwd, {"OMP_NUM_THREADS": None})

    return once(("spawned", SCRIPT["02"].read_text(encoding="utf-8")), make)


@pytest.fixture(scope="session")
def killed():
    """Run step 3 with torchrun, which restarts it after rank 1 was killed in the second epoch."""

    def make(cwd):
        script = edited(cwd, "03", at(1, 20, KILLED, ON_RANK_1))
        start = command(script, *FOUR_EPOCHS, torchrun=("--max-restarts=1",))
        return finished(start, cwd, RESTARTS)

    return once(("killed", SCRIPT["03"].read_text(encoding="utf-8")), make)


@pytest.fixture(scope="session")
def told_to_stop():
    """Run step 4 with torchrun and loader workers; torchrun is told to stop in the third epoch.

    Return the Result, and the checkpoint that was left.
    """

    def make(cwd):
        script = edited(cwd, "04", at(2, 15, GATE))
        with Job(command(script, *FOUR_EPOCHS, "--num-workers=1"), cwd) as job:
            wait_at_the_gate(job)
            job.process.send_signal(signal.SIGTERM)
            result = job.result()
        assert (cwd / "checkpoint.pt.interrupted").exists(), result
        return result, torch.load(cwd / "checkpoint.pt", weights_only=True)

    return once(("told to stop", SCRIPT["04"].read_text(encoding="utf-8")), make)


@pytest.fixture(scope="session")
def two_nodes():
    """Return a function that runs step 4 on two nodes, and returns the Result of each.

    A node is a torchrun, called its agent, in a folder of its own. The agents find each other over
    c10d at one address, and share only the checkpoint.
    """

    def run(nproc_per_node):
        def make(cwd):
            words = [TORCHRUN, "--nnodes=2", f"--nproc-per-node={nproc_per_node}"]
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
            words += [SCRIPT["04"], *FOUR_EPOCHS, f"--checkpoint-path={cwd / 'checkpoint.pt'}"]
            folders = [cwd / "node0", cwd / "node1"]
            for folder in folders:
                folder.mkdir()
            with Job(words, folders[0]) as zero, Job(words, folders[1]) as one:
                return [zero.result(), one.result()]

        return once(("nodes", SCRIPT["04"].read_text(encoding="utf-8"), nproc_per_node), make)

    return run
