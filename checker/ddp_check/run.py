"""Runs a script under observation."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from ddp_check import events
from ddp_check.keeper import kill
from ddp_check.protocol import FRAME, HERE, STACKS, VARIABLE, Task, own_frame

CHECKPOINT = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".new", ".interrupted")
CONFIG = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".env")
STARTS = r"\bspawn\(|\bstart_processes\(|\bProcess\(\s*target"  # starts its own processes
SETS = r"""environ\[["'](\w+)["']\]\s*=[^=]"""
ASKS = r"""(?:environ(?:\.get)?|getenv)[\[(]["']((?:LOCAL_)?RANK)["'][\],)]"""
# What torch.distributed.launch passes; before PyTorch 2, with an underscore.
LOCAL_RANK = r"""add_argument\(\s*["'](--local[-_]rank)["'](?:,\s*["'](--local[-_]rank)["'])?"""
USES_GPUS = r"nccl|cuda|device_ids|torch\.accelerator|\.to\(\w*rank\)"
LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu"  # in an error message
ERROR = r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception)(?:: .+)?|[\w.-]+: error: .+))$"
PREFIX = r"\[rank\d+\]: *"  # that PyTorch puts before each line of a traceback
REPORT = r"^(?:[EW]\d{4} .*torch/distributed|srun: task)"  # a launcher's, of a failure
STATUS = (  # of the rank that failed first, as torchrun and srun report it
    r"Root Cause.*\n(?:.*\n)*?\s+rank\s+: (\d+).*\n\s+exitcode\s+: (-?\d+)",
    r"^srun: task (\d+) ended with exit code (-?\d+)",
)
CHAINED = r"\s+(?:\[rank\d+\]:\s*)*(?:During handling of|The above exception was)"


@dataclass
class Run:
    """What was observed in a run of the script."""

    nproc: int
    folder: Path  # of the events
    cwd: Path = Path()
    place: str = ""
    launcher: str = ""
    text: str = ""  # of the script
    others: dict = field(default_factory=dict)  # name of a small file beside it -> its text
    translate: bool = False  # its calls for GPUs were translated for the CPU
    option: str = ""  # that tells it its local rank, if it asks for one, and where it does
    option_where: str = ""
    left_out: list = field(default_factory=list)  # checkpoints that the script missed
    returncode: int | None = None  # None: it was killed after the timeout
    seconds: float = 0
    begun: float = 0  # when it was started
    still: set = field(default_factory=set)  # ranks that used no CPU time when it ran out
    output: str = ""
    ranks: dict = field(default_factory=dict)  # rank -> the events of its process, in order
    stacks: dict = field(default_factory=dict)  # rank -> its frames when it hung, innermost first

    def of(self, *kinds):
        """Return the events of these kinds: {rank: [event]}."""
        return {
            rank: [event for event in found if isinstance(event, kinds)]
            for rank, found in self.ranks.items()
        }

    def all(self, *kinds):
        """Return the events of these kinds from all ranks, as one list."""
        return [event for found in self.of(*kinds).values() for event in found]

    def place_of(self, number):
        """Return the line with this number in a file beside the script, or whether it has one."""
        if re.search(rf"\b{number}\b", self.text):
            return True
        for name, text in self.others.items():
            if match := re.search(rf"\b{number}\b", text):
                return f"{name}:{text[: match.start()].count(chr(10)) + 1}"
        return False

    @property
    def hangs(self):
        """Whether nothing happened for twice as long as ever before, while a rank stood still."""
        times = sorted(event.time for found in self.ranks.values() for event in found)
        gaps = [after - before for before, after in pairwise([self.begun, *times])]
        idle = self.begun + self.seconds - max(times, default=self.begun)
        return self.returncode is None and bool(self.still) and idle > 2 * max(gaps, default=0)

    @property
    def for_nccl(self):
        """Whether the script uses only NCCL, so faults of gloo do not affect it."""
        calls = {event.call for event in self.all(events.Translated)}
        return '"nccl"' in calls or ("nccl" in self.text and "cpu:gloo" not in self.text)

    @property
    def own(self):
        """The output without the launcher's report of a failure."""
        return re.split(REPORT, self.output, maxsplit=1, flags=re.M)[0]

    @property
    def raised(self):
        """The matches of all errors in the output, except those that another one followed."""
        found = list(re.finditer(ERROR, self.own, re.M))
        return [one for one in found if not re.match(CHAINED, self.own[one.end() :])]

    @property
    def errors(self):
        """The last lines of all tracebacks, except those that another exception followed.

        Of a message of several lines, the first; if it ends with a colon, with the next.
        """
        found = []
        for match in self.raised:
            more = re.match(rf"\s*(?:{PREFIX})?\s*(\S.*)", self.own[match.end() :])
            goes_on = more and match[1].endswith(":")
            found.append(f"{match[1]} {more[1]}" if goes_on else match[1])
        return found

    @property
    def traceback(self):
        """The lines of the first error's traceback."""
        if not self.raised:
            return []
        text = self.own[: self.raised[0].end()].replace(f"{self.cwd}{os.sep}", "")
        (prefix,) = re.findall(rf"^(?:{PREFIX})?", text.rpartition("\n")[2])
        lines = [line for line in text.splitlines() if line.startswith(prefix.rstrip())]
        lines = [re.sub(PREFIX, "", line) if prefix else line for line in lines]
        starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
        frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
        start = starts[-1:] or frames[-1:]  # a SyntaxError has only the frame
        return lines[start[0] :] if start else []

    @property
    def error_where(self):
        """The innermost line of the script in the first error's traceback, as "path:line"."""
        return next(filter(None, map(own_frame, reversed(self.traceback))), "")

    @property
    def fails_in_an_import(self):
        """Whether the error is that of a library while the script imports it."""
        frames = [number for number, line in enumerate(self.traceback) if FRAME.match(line)]
        own = [number for number in frames if own_frame(self.traceback[number])]
        if not own or own[-1] == frames[-1]:
            return False
        return bool(re.match(r"\s*(import|from)\s", self.traceback[own[-1] + 1]))

    @property
    def ending(self):
        """How a script that failed has ended, in words."""
        usage = re.findall(r"^usage: .+", self.own, re.M)
        if self.errors:
            return "; ".join([self.errors[0], *usage[:1]])
        rank, code = self.status
        who = f"rank {rank}" if rank is not None else "it"
        if code < 0:
            return f"{who} is killed by {signal.Signals(-code).name}"
        last = self.own.strip().rpartition("\n")[2] or "nothing is printed"
        return f"{who} exits with code {code}: {last}"

    @property
    def status(self):
        """The rank that failed first, if the launcher names it, and its exit code or -signal."""
        for pattern in STATUS:
            if match := re.search(pattern, self.output, re.M):
                return int(match[1]), int(match[2])
        return None, self.returncode

    @property
    def lacks_gpus(self):
        """Whether the script failed because there are no GPUs."""
        if not self.returncode:  # it has not failed
            return False
        bare = self.traceback[1:] if self.ending == "AssertionError" else []  # says what it asserts
        return bool(re.search(LACKS_GPUS, "\n".join([self.ending, *bare[-3:]])))


LAUNCHERS = {  # what precedes the script on the command line
    "python": [sys.executable],  # the script starts its own processes
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
    """Return the launcher that a script with this text needs."""
    if re.search(STARTS, text):
        return "python"
    from_outside = set(re.findall(ASKS, text)) - set(re.findall(SETS, text))
    alone = "SLURM_PROCID" in text and not from_outside
    return "srun" if alone else "torchrun"


def local_rank_option(text):
    """Return the option by which a script may learn its local rank, and its line, or ("", 0)."""
    found = re.search(LOCAL_RANK, text)
    if not found:
        return "", 0
    option = "--local-rank" if "--local-rank" in found.groups() else found[1]
    return option, text[: found.start()].count("\n") + 1


def small_files(folder):
    """Return the texts of the small files in a folder and the folders in it: {name: text}."""
    found = [*folder.glob("*.*"), *folder.glob("*/*.*")]
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for path in found
        if path.suffix in CONFIG and path.is_file() and path.stat().st_size < 1 << 16
    }


def mirror(source, target, depth=3):
    """Copy or link the files of a folder into another; return the checkpoints that were left out.

    What the script writes stays in the new folder, except inside folders of data.
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
            shutil.copy(path, new)  # from a link, Python would import from its target's folder
        else:
            new.symlink_to(path)
    return left_out


@dataclass
class Plan:
    """How a script is run: in a new folder, or in that of an earlier run."""

    script: str  # or the name of a module
    arguments: list
    nproc: int
    timeout: float  # seconds
    launcher: str | None  # None: chosen by the text of the script
    folder: str  # temporary, for all runs
    module: bool = False  # the script is a module, as after python -m
    translate: str = "auto"  # GPU calls: auto, yes or no
    env: dict = field(default_factory=dict)  # more variables
    restart_arguments: list | None = None  # follow the arguments after an interruption

    def __post_init__(self):
        path = module_path(self.script) if self.module else Path(self.script)
        self.path = str(path)
        self.text = path.read_text(encoding="utf-8", errors="replace")
        self.launcher = self.launcher or launcher_of(self.text)
        asked = local_rank_option(self.text) if self.launcher == "torchrun" else ("", 0)
        self.may_need, self.option_line = asked
        self.option = ""  # it is passed only if the script does not do without it
        uses_gpus, asks = re.search(USES_GPUS, self.text), "is_available" in self.text
        self.uses_gpus = bool(uses_gpus)
        at_once = self.translate == "auto" and uses_gpus and not asks
        self.translated = bool(self.translate == "yes" or at_once)
        self.lacking = ""  # how the run without translated calls ended

    @cached_property
    def undisturbed(self):
        """An uninterrupted run, with GPU calls translated if the script fails without GPUs."""
        run = self.run("undisturbed")
        trained = run.all(events.Join, events.Step)
        idle = self.uses_gpus and run.returncode == 0 and not trained
        if self.translate == "auto" and not self.translated and (run.lacks_gpus or idle):
            self.translated = True
            self.lacking = "no training" if idle else run.ending
            run = self.run("translated")
        if self.may_need and needs_its_local_rank(run):
            self.option = self.may_need
            other = self.run("with_option")
            if other.returncode == 0 or len(other.all(events.Step)) > len(run.all(events.Step)):
                return other
            self.option = ""
        return run

    def run(self, place, nproc=None, during=None, arguments=None, **options):
        """Run the script in a folder of this name, which need not exist."""
        folder, nproc = Path(self.folder, place).resolve(), nproc or self.nproc
        left_out = []
        if not folder.exists():
            folder.mkdir()
            left_out = mirror(Path.cwd(), folder)
        words = [str(nproc) if word == "NPROC" else word for word in LAUNCHERS[self.launcher]]
        if self.option:
            words += ["--no-python", "bash", "-c", f'exec "$@" {self.option}="$LOCAL_RANK"', "bash"]
            words.append(sys.executable)
        command = [*words, *self.target(folder), *map(str, arguments or self.arguments)]
        options |= {"translate": self.translated}
        run = observe(command, nproc, self.timeout, folder, during, self.env, **options)
        run.place, run.launcher, run.text = place, self.launcher, self.text
        run.others = small_files(folder)
        run.option, run.option_where = self.option, f"{self.path}:{self.option_line}"
        run.left_out = [name for name in left_out if run.returncode and name in run.ending]
        return run

    def again(self, run, **options):
        """Run the script once more in the folder of an earlier run."""
        arguments = [*self.arguments, *(self.restart_arguments or [])]
        return self.run(run.place, arguments=arguments, **options)

    def target(self, folder):
        """Return the words that name the script in this folder, or the original without a copy."""
        if self.module:
            return ["-m", self.script]
        path = Path(self.script).resolve()
        if not path.is_relative_to(Path.cwd()) or path.suffix in CHECKPOINT:
            return [str(path)]
        return [str(folder / path.relative_to(Path.cwd()))]


def needs_its_local_rank(run):
    """Return whether a run failed early, or all ranks took one GPU."""
    used = {rank: {event.index for event in of} for rank, of in run.of(events.Gpu).items() if of}
    failed = run.returncode != 0 and not run.all(events.Step)
    return failed or (len(used) > 1 and len(set.union(*used.values())) == 1)


def module_path(name):
    """Return the file of a module in the current folder."""
    path = Path(*name.split("."))
    found = [path.with_suffix(".py"), path / "__main__.py"]
    return next((one for one in found if one.is_file()), found[0])


def observe(command, nproc, timeout, cwd, during=None, variables=None, **options):
    """Run a command under observation and return a Run.

    While it runs, `during` is called with the process, the folder of the events and the deadline.
    """
    number = len(list(cwd.parent.glob(f"{cwd.name}.run*")))
    folder = cwd.with_name(f"{cwd.name}.run{number}")
    folder.mkdir()
    task = Task(str(folder), f"{cwd}{os.sep}", nproc, **options)
    start = time.monotonic()
    run = Run(nproc, folder, cwd, translate=task.translate, begun=start)
    with open(folder / "output", "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(task, variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if during:
                during(process, folder, start + timeout)
            run.returncode = process.wait(max(1, start + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.stacks, run.still = look(folder)
        finally:
            kill_all(process, folder)
        run.seconds = time.monotonic() - start
        output.seek(0)
        run.output = output.read()
    run.ranks = {rank: found for rank, (_, found) in reports(folder).items()}
    return run


def environment(task, variables):
    """Return the environment of an observed script, without GPUs or Slurm, with these variables."""
    theirs = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join([str(HERE / "startup"), theirs])
    mine = r"SLURM_|(LOCAL_)?RANK$|WORLD_SIZE$"  # of the job that the checker may run in
    env = {name: value for name, value in os.environ.items() if not re.match(mine, name)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    env |= variables | {VARIABLE: str(task), "PYTHONPATH": path.rstrip(os.pathsep)}
    own = Path(task.events).parent / "tmp"  # so that what a killed run leaves there is removed
    own.mkdir(exist_ok=True)
    return env | {"TMPDIR": str(own)}


def reports(folder):
    """Return the process ID and the events of each rank: {rank: (pid, events)}.

    A process has the rank with which it joined a process group or, before that, the one from its
    launcher. Of several with the same rank, the first that joined counts, else the first started.
    """
    found = {}
    for path in folder.glob("*.jsonl"):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # a line may be incomplete
        lines = [events.read(line) for line in whole.splitlines()]
        joined = next((event for event in lines if isinstance(event, events.Join)), None)
        rank = getattr(joined or next(iter(lines), None), "rank", None)
        if rank is not None:
            order = not joined, lines[0].time
            found.setdefault(int(rank), []).append((order, int(path.stem), lines))
    return {rank: min(of)[1:] for rank, of in sorted(found.items())}


def look(folder):
    """Return the stack of each rank, innermost first, and which ranks use no CPU time.

    A stack is a list of (file, line, function).
    """
    pids = {rank: pid for rank, (pid, _) in reports(folder).items()}
    before = {rank: cpu_time(pid) for rank, pid in pids.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(pid, STACKS)
    time.sleep(1)
    still = {rank for rank, pid in pids.items() if cpu_time(pid) - before[rank] < 0.05}
    frame = r'File "(.+)", line (\d+) in (\S+)'
    return {
        rank: re.findall(frame, (folder / f"{pid}.stack").read_text()) for rank, pid in pids.items()
    }, still


def cpu_time(pid):
    """Return the seconds that a process and its descendants have computed, 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        spent = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in spent)
    return 0


def kill_all(process, folder):
    """Kill the command and all its descendants, including the ranks that torchrun started."""
    kill(folder)
    process.wait()
