"""Python imports this file at startup; a process then reports what it does with PyTorch."""

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def observe():
    sys.path.insert(0, ROOT)  # only for this import: the script must find its own modules
    importlib.import_module("ddp_check.observer")
    sys.path.remove(ROOT)


class AfterTorch:
    """Starts the observation as soon as the script has imported torch."""

    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), observe())
            return spec


if "DDP_CHECK" in os.environ and "resource_tracker" not in str(sys.orig_argv):
    if "torch" in sys.modules:  # forked by a process that has imported it
        observe()
    else:
        sys.meta_path.insert(0, AfterTorch())
