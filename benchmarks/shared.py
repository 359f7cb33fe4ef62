"""What the benchmarks have in common: machine, medians, and pictures for any background."""

import contextlib
import os
import platform
import re
import statistics
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


def middle(ratios):
    """Return the median of some ratios and its quartiles."""
    if len(ratios) == 1:
        return dict.fromkeys(("median", "low", "high"), ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


@contextlib.contextmanager
def drawing(path, title, **options):
    """Give axes to draw on, and save them as a picture (SVG) that suits light and dark pages."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(names, GREY) | {"svg.fonttype": "none"}):
        figure, axes = plt.subplots(layout="constrained", **options)
        yield axes
        figure.savefig(path, transparent=True, metadata={"Date": None, "Title": title})
        plt.close(figure)
