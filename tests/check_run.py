"""Runs a script under observation, for check.py."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
STACKS = signal.SIGRTMIN + 5  # as in observer/observe.py
CHECKPOINT = (".pt", ".pth", ".ckpt", ".bin", ".new", ".interrupted")


@dataclass
class Run:
    """What a run of the script has shown."""

    nproc: int
    folder: Path  # of the events
    torchrun: bool = True  # which started the script, else it starts its processes itself
    text: str = ""  # of the script
    returncode: int | None = None  # None: it had to be ended
    seconds: float = 0
    output: str = ""
    ranks: dict = field(default_factory=dict)  # rank -> the events of its process, in order
    stacks: dict = field(default_factory=dict)  # rank -> the lines where it hangs, innermost first

    def of(self, *kinds):
        """Return the events of these kinds for each rank."""
        return {
            rank: [event for event in events if event["kind"] in kinds]
            for rank, events in self.ranks.items()
        }

    def all(self, *kinds):
        return [event for events in self.of(*kinds).values() for event in events]


def launch_command(script, arguments, nproc):
    """Return how the script is started: as it is, if it starts processes, or else by torchrun."""
    text = Path(script).read_text(encoding="utf-8")
    if re.search(r"\bspawn\(|multiprocessing import|start_processes", text):
        return [sys.executable, script, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={nproc}", script, *arguments]


def for_gpus(script):
    """Return whether a script needs GPUs: it uses them, and never asks whether there are any."""
    text = Path(script).read_text(encoding="utf-8")
    uses = re.search(r"nccl|cuda|device_ids|torch\.accelerator|\.to\(\w*rank\)", text)
    return bool(uses) and "is_available" not in text


def link(source, target):
    """Fill a folder with links to what is in another one, but to no checkpoint."""
    for path in source.iterdir():
        if path.suffix not in CHECKPOINT and not path.name.startswith("."):
            (target / path.name).symlink_to(path)


@dataclass
class Plan:
    """How a script is run: each time in a new place, or in one where it has run before."""

    script: str
    arguments: list
    nproc: int
    timeout: float  # seconds
    folder: str

    def run(self, place, nproc=None, **options):
        """Run the script in a place, its calls for GPUs translated if it cannot do without them."""
        folder = Path(self.folder, place)
        if not folder.exists():
            folder.mkdir()
            link(Path.cwd(), folder)
        nproc = nproc or self.nproc
        command = launch_command(os.path.abspath(self.script), self.arguments, nproc)
        translate = for_gpus(self.script)
        run = observe(command, nproc, self.timeout, folder, translate=translate, **options)
        run.torchrun = "torch.distributed.run" in command
        run.text = Path(self.script).read_text(encoding="utf-8")
        return run


def observe(command, nproc, timeout, cwd, during=None, scale=0, translate=False):
    """Run a command under observation and return a Run.

    `during` is called with the process, the folder of the events and the time limit while it runs.
    """
    number = len(list(cwd.parent.glob(f"{cwd.name}.run*")))
    events = cwd.with_name(f"{cwd.name}.run{number}")
    events.mkdir()
    path = os.pathsep.join([str(HERE / "observer"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "DDP_CHECK": str(events)}
    env |= {"DDP_CHECK_CWD": f"{cwd.resolve()}{os.sep}", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"DDP_CHECK_SCALE": str(scale), "DDP_CHECK_NPROC": str(nproc)}
    env |= {"DDP_CHECK_TRANSLATE": "1"} if translate else {}
    env.setdefault("OMP_NUM_THREADS", "1")
    run, start = Run(nproc, events), time.monotonic()
    with open(events / "output", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if during:
                during(process, events, start + timeout)
            run.returncode = process.wait(max(1, start + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.stacks = look(events)
        finally:
            end(process, events)
        run.seconds = time.monotonic() - start
        output.seek(0)
        run.output = output.read()
    run.ranks = {rank: found for rank, (_, found) in ranks(events).items()}
    return run


def ranks(events):
    """Return process ID and events of each process that has joined a process group, by rank."""
    found = {}
    for path in events.glob("*.jsonl"):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # it may still grow
        lines = [json.loads(line) for line in whole.splitlines()]
        joined = next((event for event in lines if event["kind"] == "init"), None)
        if joined:
            found[joined["rank"]] = int(path.stem), lines
    return dict(sorted(found.items()))


def look(events):
    """Return the stack of each process that has joined a process group, by rank."""
    pids = {rank: pid for rank, (pid, _) in ranks(events).items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS)
    time.sleep(1)
    return {
        rank: re.findall(r'File "(.+)", line (\d+) in (\S+)', (events / f"{pid}.stack").read_text())
        for rank, pid in sorted(pids.items())
    }


def end(process, events):
    """Kill the command and all of its descendants, torchrun's workers included."""
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if candidate.environ().get("DDP_CHECK") == str(events):
                candidate.kill()
    process.wait()
