"""Runs a script under observation."""

import contextlib
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

from ddp_check import events
from ddp_check.keeper import signalled
from ddp_check.observed import Run
from ddp_check.protocol import HERE, STACKS, VARIABLE, Task

CHECKPOINT = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".new", ".interrupted")
CONFIG = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".env")
STARTS = r"\bspawn\(|\bstart_processes\(|\bProcess\(\s*target"  # starts its own processes
IMPORT = r"^\s*(?:from|import)\s.+"
SETS = r"""environ\[["'](\w+)["']\]\s*=[^=]"""
ASKS = r"""(?:environ(?:\.get)?|getenv)[\[(]["']((?:LOCAL_)?RANK)["'][\],)]"""
USES_GPUS = r"nccl|cuda|device_ids|torch\.accelerator|\.to\(\w*rank\)"
TORCHRUN = "torch.distributed.run --standalone --nproc-per-node NPROC"
LAUNCHERS = {  # what precedes the script on the command line
    "python": [sys.executable],  # the script starts its own processes
    "srun": [sys.executable, str(HERE / "srun.py"), "NPROC"],
    "torchrun": [sys.executable, "-m", *TORCHRUN.split()],
}


def launcher_of(text):
    if re.search(STARTS, text):
        return "python"
    from_outside = set(re.findall(ASKS, text)) - set(re.findall(SETS, text))
    return "srun" if "SLURM_PROCID" in text and not from_outside else "torchrun"


def local_rank_option(text):
    """Return the option by which a script may learn its local rank, and its line, or ("", 0)."""
    for option in ("--local-rank", "--local_rank"):  # torch.distributed.launch passes the first
        if found := re.search(rf"""add_argument\([^)]*["']{option}["']""", text):
            return option, text[: found.start()].count("\n") + 1
    return "", 0


def with_imports(text, files):
    """Return the text of a script with those of the modules among these files that it imports."""
    left = {name: more for name, more in files.items() if name.endswith(".py")}
    while True:
        words = set(re.findall(r"\w+", " ".join(re.findall(IMPORT, text, re.M))))
        more = [name for name in left if Path(name).stem in words]
        if not more:
            return text
        text += "".join(left.pop(name) for name in more)


def small_files(folder):
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for path in (*folder.glob("*.*"), *folder.glob("*/*.*"))
        if path.suffix in CONFIG and path.is_file() and path.stat().st_size < 1 << 16
    }


def mirror(source, target, depth=3):
    """Copy or link the files of a folder into a new one; return the checkpoints left out.

    What the script writes stays in the new folder, except inside folders of data.
    """
    target.mkdir()
    left_out = []
    for path in source.iterdir():
        new = target / path.name
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.suffix in CHECKPOINT:
            left_out.append(path.name)
        elif path.is_dir() and depth and "data" not in path.name and os.access(path, os.R_OK):
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
    restart_args: list | None = None  # follow the arguments after an interruption

    def __post_init__(self):
        self.path = module_path(self.script) if self.module else Path(self.script)
        self.text = self.path.read_text(encoding="utf-8", errors="replace")
        self.launcher = self.launcher or launcher_of(self.text)
        asked = local_rank_option(self.text) if self.launcher == "torchrun" else ("", 0)
        self.may_need, self.option_line = asked
        self.option = ""  # it is passed only if the script does not do without it
        files = {**small_files(Path.cwd()), **small_files(self.path.parent)}
        text = with_imports(self.text, files)
        self.uses_gpus = bool(re.search(USES_GPUS, text))
        at_once = self.uses_gpus and "is_available" not in text
        self.translated = self.translate == "yes" or (self.translate == "auto" and at_once)
        self.lacking = ""  # how the run without translated calls ended

    @cached_property
    def undisturbed(self):
        """An uninterrupted run, with GPU calls translated if the script fails without GPUs."""
        run = self.run("undisturbed")
        idle = self.uses_gpus and run.returncode is not None and not run.all(events.Step)
        if self.translate == "auto" and not self.translated and (run.lacks_gpus or idle):
            before, self.translated = run, True
            self.lacking = run.ending if run.returncode else "no training"
            run = self.run("translated")
            if run.returncode and run.ending == before.ending and not before.lacks_gpus:
                run, self.translated, self.lacking = before, False, ""  # it is not about GPUs
        steps, _, _, gpus, _ = progress(run)
        early = run.returncode != 0 and not steps
        if self.may_need and (early or gpus == 1 < self.nproc):
            self.option = self.may_need
            other = self.run("with_option")
            if other.returncode == 0 or progress(other) > progress(run):
                return other
            self.option = ""
        return run

    def run(self, place, nproc=None, during=None, arguments=None, **options):
        """Run the script in a folder of this name, which need not exist, and return a Run.

        Meanwhile, `during` is called with the process, the folder of the events and the deadline.
        """
        cwd, nproc = Path(self.folder, place).resolve(), nproc or self.nproc
        left_out = [] if cwd.exists() else mirror(Path.cwd(), cwd)
        folder = cwd.with_name(f"{place}.run{len(list(cwd.parent.glob(f'{place}.run*')))}")
        folder.mkdir()
        task = Task(str(folder), f"{cwd}{os.sep}", nproc, translate=self.translated, **options)
        run = Run(nproc, folder, cwd, place, self.launcher, self.text, small_files(cwd))
        run.translate, run.begun = self.translated, time.monotonic()
        run.option, run.option_where = self.option, f"{self.path}:{self.option_line}"
        with open(folder / "output", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [*self.command(nproc, cwd), *map(str, arguments or self.arguments)],
                cwd=cwd,
                env=environment(task, self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            end = run.begun + self.timeout
            try:
                if during:
                    during(process, folder, end)
                run.returncode = process.wait(max(1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.stacks, run.still = look(folder)
            finally:
                kill_all(process, folder)
            run.seconds = time.monotonic() - run.begun
            output.seek(0)
            run.output = output.read()
        run.ranks = {rank: found for rank, (_, found) in reports(folder).items()}
        run.left_out = [name for name in left_out if run.returncode and name in run.ending]
        return run

    def again(self, run, **options):
        arguments = [*self.arguments, *(self.restart_args or [])]
        return self.run(run.place, arguments=arguments, **options)

    def command(self, nproc, cwd):
        """Return the words that start the script: its copy in this folder, if there is one."""
        words = [str(nproc) if word == "NPROC" else word for word in LAUNCHERS[self.launcher]]
        if self.option:
            words += ["--no-python", "bash", "-c", f'exec "$@" {self.option}="$LOCAL_RANK"', "bash"]
            words.append(sys.executable)
        if self.module:
            return [*words, "-m", self.script]
        path, here = Path(self.script).resolve(), Path.cwd()
        copied = path.is_relative_to(here) and path.suffix not in CHECKPOINT
        return [*words, str(cwd / path.relative_to(here) if copied else path)]


def progress(run):
    """Return how far a run came: steps, wrapped models, joined ranks, GPUs, and all events."""
    kinds = (events.Step, events.Wrap, events.Join, object)
    steps, wraps, joins, every = (len(run.all(kind)) for kind in kinds)
    return steps, wraps, joins, len({event.index for event in run.all(events.Gpu)}), every


def module_path(name):
    path = Path(*name.split("."))
    found = [path.with_suffix(".py"), path / "__main__.py"]
    return next((one for one in found if one.is_file()), found[0])


def environment(task, variables):
    """Return the environment of an observed script, without GPUs or Slurm, with these variables."""
    theirs = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join([str(HERE / "startup"), theirs])
    mine = r"SLURM_|(LOCAL_)?RANK$|WORLD_SIZE$"  # of the job that the checker may run in
    env = {name: value for name, value in os.environ.items() if not re.match(mine, name)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    own = Path(task.events).parent / "tmp"  # so that what a killed run leaves there is removed
    own.mkdir(exist_ok=True)
    mine = {VARIABLE: str(task), "PYTHONPATH": path.rstrip(os.pathsep), "TMPDIR": str(own)}
    return env | variables | mine


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
    texts = {rank: (folder / f"{pid}.stack").read_text() for rank, pid in pids.items()}
    frame = r'File "(.+)", line (\d+) in (\S+)'
    return {rank: re.findall(frame, text) for rank, text in texts.items()}, still


def cpu_time(pid):
    """Return the seconds that a process and its descendants have computed, 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        spent = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in spent)
    return 0


def kill_all(process, folder):
    """Kill the command and all its descendants, including the ranks that torchrun started."""
    signalled(folder, "kill")
    process.wait()
