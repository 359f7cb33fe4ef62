"""Runs end cleanly: when the process group is destroyed, no thread of gloo is left."""

import re
import textwrap

import pytest
from support.jobs import finished, run
from support.positions import SIGTERM, at
from support.scripts import NARROW, command, edited, forked

ONE = ("1", *NARROW)
DESTROYED = "    dist.destroy_process_group()\n"
LIST_THREADS = """\
def list_threads(when):
    time.sleep(1)  # Linux lists a thread for a moment after it has ended
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    os.write(1, f"{when}: {' '.join(names).split()}\\n".encode())

import atexit
atexit.register(list_threads, "at exit")
list_threads("after the group")
"""
CHANGE = (DESTROYED, DESTROYED + textwrap.indent(LIST_THREADS, "    "))


def has_no_gloo_thread(job):
    """Check that both ranks have listed their threads twice; return whether none is gloo's."""
    lists = re.findall("^(?:at exit|after the group): (.*)$", job.stdout, re.MULTILINE)
    assert len(lists) == 4
    return all("gloo" not in names for names in lists)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["02", "03", "04", "05"])
def test_no_gloo_thread_is_left_when_the_group_is_destroyed(tmp_path, step):
    """Each step runs with its own launcher, because forked ranks have already imported all modules.

    While a DDP model exists, the group and its threads do, too. If Python freed the model only at
    exit, it would wait for these threads while it holds the lock that they may need.
    """
    job = finished(command(edited(tmp_path, step, CHANGE), *ONE), tmp_path)
    assert has_no_gloo_thread(job), job


def test_told_to_stop_it_does_not_evaluate_and_leaves_no_gloo_thread(tmp_path):
    """On this path through step 5, too, the model is freed before the group is destroyed."""
    job = run(forked(edited(tmp_path, "05", at(0, 5, SIGTERM), CHANGE), *ONE), tmp_path)
    assert "exit codes of the ranks: [1, 1]" in job.stderr
    assert "accuracy" not in job.stdout
    assert has_no_gloo_thread(job), job
