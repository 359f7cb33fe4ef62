"""What the benchmarks have in common: the machine they ran on, and pictures for any background."""

import contextlib
import os
import platform
import re
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import torch

GREY = "#7d7d7d"  # is read on white and on black


def machine():
    """Return what figures depend on: date, hardware, versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "date": date.today().isoformat(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@contextlib.contextmanager
def drawing(path, title, **options):
    """Give axes to draw on, and save them as a picture (SVG) that suits light and dark pages."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(names, GREY) | {"svg.fonttype": "none"}):
        figure, axes = plt.subplots(layout="constrained", **options)
        yield axes
        figure.savefig(path, transparent=True, metadata={"Date": None, "Title": title})
        plt.close(figure)
