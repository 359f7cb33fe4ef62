"""Python imports this file at startup. The process then reports what it does with PyTorch."""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def load(name):
    """Import a module of the checker."""
    sys.path.insert(0, ROOT)  # removed again, because the script must find its own modules
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(ROOT)


def run_hidden():
    """Run the sitecustomize that Python would import without this one, such as a cluster's."""
    paths = [path for path in sys.path if os.path.abspath(path) != HERE]
    spec = importlib.machinery.PathFinder.find_spec(__name__, paths)
    if spec:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def become_slurm_task():
    """Replace what torchrun has set for a rank with what srun would set."""
    env = os.environ
    env["MASTER_ADDR"] = "localhost"
    env["SLURM_PROCID"], env["SLURM_LOCALID"] = env.pop("RANK"), env.pop("LOCAL_RANK")
    for name in [name for name in env if name.startswith("TORCHELASTIC_")]:
        del env[name]


# A process that the script starts itself inherits SLURM_PROCID.
if {"DDP_CHECK_AS_SRUN", "RANK"} <= os.environ.keys() and "SLURM_PROCID" not in os.environ:
    become_slurm_task()
# multiprocessing's resource tracker has nothing to report.
if "DDP_CHECK" in os.environ and "resource_tracker" not in str(sys.orig_argv):
    # If torch has already been imported, for example by a .pth file, observation starts at once.
    load("ddp_check.imports").after_import("torch", lambda: load("ddp_check.observer.start"))
run_hidden()
