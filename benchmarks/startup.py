"""Measure how long step 3 takes until its first step, relative to the shortest DDP program.

    python benchmarks/startup.py

torchrun starts both in turn. They import the same modules, and end after one training step.
The shortest program wraps a single weight in DDP: no data, no arguments, no checkpoint.
"""

import subprocess
import tempfile
import time
from pathlib import Path

from shared import cell, launcher, middle, parser_of, positive_int, text_of, write
from tqdm import tqdm

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
    text = text_of("03", [(STEP, f"{STEP}        {END}\n")])
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    return {"03": text, "shortest": "\n".join([*imports, SHORTEST])}


def seconds(path, processes):
    """Return how long a program takes, from the start of torchrun to its end."""
    start = time.perf_counter()
    words = [*launcher(processes), path]
    subprocess.run(words, cwd=path.parent, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=positive_int, default=2, help="world size")
    parser.add_argument("--repeats", type=positive_int, default=10, help="starts of each program")
    return parser.parse_args()


def main():
    args, texts = parse_args(), programs()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.py") for name in texts}
        for name, text in texts.items():
            paths[name].write_text(text, encoding="utf-8")
        found = {name: [] for name in texts}
        for _ in tqdm(range(args.repeats)):
            for name, path in paths.items():
                found[name].append(seconds(path, args.processes))
    ratio = middle([a / b for a, b in zip(found["03"], found["shortest"], strict=True)])
    print(f"step 3 takes {cell(ratio)} times as long to start as the shortest program")
    write("startup", args, ratio=ratio, seconds=found)


if __name__ == "__main__":
    main()
