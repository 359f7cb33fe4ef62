"""Write the shuffled orders of a figure, as PyTorch's DistributedSampler computes them.

python diffs/generator/orders.py
"""

import json
from pathlib import Path

from torch.utils.data.distributed import DistributedSampler

SAMPLES, SEEDS, EPOCHS = 30, 4, 5  # what the figure offers
FILE = Path(__file__).resolve().parents[1] / "figures" / "who-gets-which.json"


def order(samples, seed):
    """Return the order in which one rank would get all samples, one character per index."""
    indices = DistributedSampler(range(samples), 1, 0, seed=seed)
    return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[index] for index in indices)


def table():
    """Return the orders by the number of samples, from 1, and by the seed plus the epoch."""
    sums = range(SEEDS + EPOCHS - 1)
    orders = [[order(samples, seed) for seed in sums] for samples in range(1, SAMPLES + 1)]
    found = {"written_by": "diffs/generator/orders.py", "seeds": SEEDS, "epochs": EPOCHS}
    return json.dumps(found | {"orders": orders}, separators=(",", ":"))


if __name__ == "__main__":
    FILE.write_text(table() + "\n", encoding="utf-8", newline="\n")
