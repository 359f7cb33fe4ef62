"""Runs a script under observation."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

from ddp_check.protocol import HERE, STACKS, VARIABLE, Task

CHECKPOINT = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".new", ".interrupted")
STARTS = r"\bspawn\(|\bstart_processes\(|\bProcess\(\s*target"  # processes of its own
ASKS_TORCHRUN = r"""(environ(\.get)?|getenv)[\[(]["'](LOCAL_)?RANK["'](\](?!\s*=[^=])|[,)])"""
USES_GPUS = r"nccl|cuda|device_ids|torch\.accelerator|\.to\(\w*rank\)"
LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu"  # in an error
ERROR = r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception)(?:: .+)?|[\w.-]+: error: .+))$"
CHAINED = r"\s+(?:\[rank\d+\]:\s*)*(?:During handling of|The above exception was)"


@dataclass
class Run:
    """What a run of the script has shown."""

    nproc: int
    folder: Path  # of the events
    place: str = ""
    launcher: str = ""
    text: str = ""  # of the script
    left_out: list = field(default_factory=list)  # files that the script did not find
    returncode: int | None = None  # None: it had to be ended
    seconds: float = 0
    idle: float = 0  # seconds since the last batch or step
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

    @property
    def for_nccl(self):
        """Whether the script asks for NCCL alone, so that faults of gloo do not concern it."""
        return "nccl" in self.text and "cpu:gloo" not in self.text

    @property
    def own(self):
        """The output without torchrun's report of a failure."""
        return re.split(r"^[EW]\d{4} .*torch/distributed", self.output, maxsplit=1, flags=re.M)[0]

    @property
    def errors(self):
        """The last lines of all tracebacks, but for those that led to the next one."""
        found = [
            (match[1], self.own[match.end() :]) for match in re.finditer(ERROR, self.own, re.M)
        ]
        return [text for text, rest in found if not re.match(CHAINED, rest)]

    @property
    def error(self):
        """The first error in the output or, if there is none, its last line."""
        # torchrun itself sends 15, SIGTERM, to the other ranks.
        found = self.errors or re.findall(r"Signal (?!15 )\d+ \(\w+\)", self.output)
        usage = re.findall(r"^usage: .+", self.own, re.M)
        last = (self.own.strip() or self.output.strip() or "it printed nothing").splitlines()[-1]
        return "; ".join([*found[:1], *usage[:1]]) if found else last


LAUNCHERS = {  # how the script is started, before its name and arguments
    "python": [sys.executable],  # it starts its processes itself
    "srun": [sys.executable, str(HERE / "srun.py"), "NPROC"],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "NPROC",
    ],
}


def launcher_of(text):
    """Return how a script with this text wants to be started."""
    if re.search(STARTS, text):
        return "python"
    alone = "SLURM_PROCID" in text and not re.search(ASKS_TORCHRUN, text)
    return "srun" if alone else "torchrun"


def mirror(source, target, depth=3):
    """Fill a folder with what another one holds, and return the checkpoints that are left out.

    What the script writes stays in this folder, except below a folder of data.
    """
    left_out = []
    for path in source.iterdir():
        new = target / path.name
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.suffix in CHECKPOINT:
            left_out.append(path.name)
        elif path.is_dir() and depth and "data" not in path.name and os.access(path, os.R_OK):
            new.mkdir()
            left_out += mirror(path, new, depth - 1)
        elif path.suffix == ".py":
            shutil.copy(path, new)  # Python would import from the folder of a link's target
        else:
            new.symlink_to(path)
    return left_out


@dataclass
class Plan:
    """How a script is run: each time in a new place, or in one where it has run before."""

    script: str
    arguments: list
    nproc: int
    timeout: float  # seconds
    launcher: str | None  # None: what the text of the script asks for
    folder: str  # temporary, for all runs

    def __post_init__(self):
        self.text = Path(self.script).read_text(encoding="utf-8", errors="replace")
        self.launcher = self.launcher or launcher_of(self.text)
        self.uses_gpus = bool(re.search(USES_GPUS, self.text))
        self.translate = self.uses_gpus and "is_available" not in self.text
        self.lacking = ""  # how the script ended when no call was translated

    @cached_property
    def undisturbed(self):
        """A run from start to end, its calls for GPUs translated if it cannot do without them."""
        run = self.run("undisturbed")
        lacks = run.returncode and re.search(LACKS_GPUS, run.error)
        idle = run.returncode == 0 and not run.all("init", "step")
        if self.uses_gpus and not self.translate and (lacks or idle):
            self.translate, self.lacking = True, run.error
            return self.run("translated")
        return run

    def run(self, place, nproc=None, **options):
        """Run the script in a place."""
        folder, nproc = Path(self.folder, place).resolve(), nproc or self.nproc
        left_out = []
        if not folder.exists():
            folder.mkdir()
            left_out = mirror(Path.cwd(), folder)
        words = [str(nproc) if word == "NPROC" else word for word in LAUNCHERS[self.launcher]]
        command = [*words, self.copy(folder), *map(str, self.arguments)]
        run = observe(command, nproc, self.timeout, folder, translate=self.translate, **options)
        run.place, run.launcher, run.text = place, self.launcher, self.text
        run.left_out = [name for name in left_out if run.returncode and name in run.error]
        return run

    def again(self, run):
        """Start the script once more where it has run before."""
        return self.run(run.place)

    def copy(self, folder):
        """Return the path of the script in this folder, or its own if it comes from elsewhere."""
        path = Path(self.script).resolve()
        if not path.is_relative_to(Path.cwd()) or path.suffix in CHECKPOINT:
            return str(path)
        return str(folder / path.relative_to(Path.cwd()))


def observe(command, nproc, timeout, cwd, during=None, scale=0, translate=False):
    """Run a command under observation and return a Run.

    `during` is called with the process, the folder of the events and the time limit while it runs.
    """
    number = len(list(cwd.parent.glob(f"{cwd.name}.run*")))
    events = cwd.with_name(f"{cwd.name}.run{number}")
    events.mkdir()
    task = Task(str(events), f"{cwd}{os.sep}", nproc, scale, translate)
    run, start = Run(nproc, events), time.monotonic()
    with open(events / "output", "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(task),
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
            kill_all(process, events)
        run.seconds = time.monotonic() - start
        output.seek(0)
        run.output = output.read()
    run.ranks = {rank: found for rank, (_, found) in reports(events).items()}
    busy = [event["time"] for event in run.all("batch", "step")]
    run.idle = start + run.seconds - max(busy, default=start)
    return run


def environment(task):
    """Return the environment of a script with this task: observed, without GPUs or Slurm."""
    path = os.pathsep.join([str(HERE / "startup"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {VARIABLE: str(task), "PYTHONPATH": path.rstrip(os.pathsep)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def reports(events):
    """Return process ID and events of each rank.

    A process has the rank with which it joined a process group or, before that, the one that its
    launcher gave it; of several with one rank, the first that joined, or else that started, counts.
    """
    found = {}
    for path in events.glob("*.jsonl"):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # it may still grow
        lines = [json.loads(line) for line in whole.splitlines()]
        joined = next((event for event in lines if event["kind"] == "init"), None)
        rank = (joined or next(iter(lines), {})).get("rank")
        if rank is not None:
            order = not joined, lines[0]["time"]
            found.setdefault(int(rank), []).append((order, int(path.stem), lines))
    return {rank: min(of)[1:] for rank, of in sorted(found.items())}


def look(events):
    """Return the stack of each rank."""
    pids = {rank: pid for rank, (pid, _) in reports(events).items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(pid, STACKS)
    time.sleep(1)
    return {
        rank: re.findall(r'File "(.+)", line (\d+) in (\S+)', (events / f"{pid}.stack").read_text())
        for rank, pid in pids.items()
    }


def processes(events):
    """Return the processes that report to this folder: a command and all of its descendants."""
    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            asked = candidate.environ().get(VARIABLE)
            if asked and json.loads(asked)["events"] == str(events):
                found.append(candidate)
    return found


def kill_all(process, events):
    """Kill the command and all of its descendants, torchrun's workers included."""
    for candidate in processes(events):
        with contextlib.suppress(psutil.NoSuchProcess):
            candidate.kill()
    process.wait()
