"""What the script of a Job printed and saved."""

import re
from pathlib import Path

import torch


def weights(job_or_path):
    """Return the weights in the checkpoint of a job, or in a file: {name: tensor}."""
    path = job_or_path if isinstance(job_or_path, Path) else job_or_path.cwd / "checkpoint.pt"
    return torch.load(path, map_location="cpu", weights_only=True)["MODEL_STATE"]


def same_bits(a, b):
    """Return whether the weights of two jobs or files are bit-for-bit identical."""
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def accuracy(job):
    """Return (percent, correct, total) from the last line of the output."""
    match = re.fullmatch(r"accuracy ([\d.]+)% \((\d+)/(\d+)\)", job.stdout.splitlines()[-1])
    assert match, job
    return float(match[1]), int(match[2]), int(match[3])


def epochs(job):
    """Return the printed epoch numbers."""
    return [int(number) for number in re.findall(r"^epoch (\d+) ", job.stdout, re.MULTILINE)]


def losses(job):
    """Return the printed losses, as strings."""
    return re.findall(r"^epoch \d+  loss ([\d.]+)  ", job.stdout, re.MULTILINE)


def resumed(job):
    """Return the number of finished epochs at each resume."""
    return [int(n) for n in re.findall(r"^resuming from .* after epoch (\d+)$", job.stdout, re.M)]


def printed_by(job, rank):
    """Return what `scripts.on_each_rank` printed on a rank."""
    return re.findall(f"rank {rank}: (.*)$", job.stdout, re.MULTILINE)  # even behind other text


def shape(text):
    """Return the lines of a text, with # in place of each number."""
    lines = [re.sub(r"[\d,]*\.?\d+", "#", line) for line in text.splitlines()]
    return [re.sub(r" +", " ", line).strip() for line in lines]
