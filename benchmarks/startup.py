"""Measure how long step 3 takes to its first step, relative to the shortest program.

    python benchmarks/startup.py

torchrun starts both in turn, they import the same modules, and both end after one training step.
The shortest program wraps a single weight in DDP: no data, no arguments, no checkpoint.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from shared import ROOT, TORCHRUN, cell, machine, middle, positive_int
from tqdm import tqdm

SCRIPT = ROOT / "03_multigpu_torchrun.py"
END, STEP = "os._exit(0)", "        self.optimizer.step()\n"
SHORTEST = f"""
dist.init_process_group()
device = "cpu"
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
model = DDP(nn.Linear(1, 1).to(device))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 1, device=device)).sum().backward()
optimizer.step()
{END}
"""


def programs():
    """Return the texts of both programs."""
    text = SCRIPT.read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert text.count(STEP) == 1
    ended = text.replace(STEP, f"{STEP}        {END}\n")
    return {"03": ended, "shortest": "\n".join([*imports, SHORTEST])}


def seconds(path, processes):
    """Return how long a program takes, from the start of torchrun to its end."""
    start = time.perf_counter()
    words = [TORCHRUN, "--standalone", f"--nproc-per-node={processes}", path]
    subprocess.run(words, cwd=path.parent, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def parse_args():
    style = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **style)
    parser.add_argument("--processes", type=positive_int, default=2, help="world size")
    parser.add_argument("--repeats", type=positive_int, default=10, help="starts of each program")
    return parser.parse_args()


def main():
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.py") for name in programs()}
        for name, text in programs().items():
            paths[name].write_text(text, encoding="utf-8")
        found = {name: [] for name in paths}
        for _ in tqdm(range(args.repeats)):
            for name, path in paths.items():
                found[name].append(seconds(path, args.processes))
    ratio = middle([a / b for a, b in zip(found["03"], found["shortest"], strict=True)])
    print(f"step 3 takes {cell(ratio)} times as long to start as the shortest program")
    record = {"machine": machine(), "options": vars(args), "ratio": ratio, "seconds": found}
    Path("startup.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
