"""Write the shuffled orders of a figure, as PyTorch's DistributedSampler computes them.

python diffs/generator/orders.py
"""

import json
from pathlib import Path

from torch.utils.data.distributed import DistributedSampler

SAMPLES, EPOCHS = 30, 5  # what the figure offers
FILE = Path(__file__).resolve().parents[1] / "figures" / "who-gets-which.json"


def order(samples, epoch):
    """Return the order in which one rank would get all samples, one character per index."""
    indices = DistributedSampler(range(samples), 1, 0)
    indices.set_epoch(epoch)
    return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[index] for index in indices)


def table():
    """Return the orders by the number of samples, from 1, and by the epoch."""
    orders = [
        [order(samples, epoch) for epoch in range(EPOCHS)] for samples in range(1, SAMPLES + 1)
    ]
    found = {"written_by": "diffs/generator/orders.py", "epochs": EPOCHS, "orders": orders}
    return json.dumps(found, separators=(",", ":"))


if __name__ == "__main__":
    FILE.write_text(table() + "\n", encoding="utf-8", newline="\n")
