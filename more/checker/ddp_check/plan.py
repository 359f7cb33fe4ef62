"""Runs a script under observation."""

import ast
import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from ddp_check import events
from ddp_check.keeper import kept_folder, observed_process, signal_processes
from ddp_check.mirror import MAX_COPIED, Mirror
from ddp_check.protocol import HERE, STACKS, VARIABLE, Task
from ddp_check.reading import read_events
from ddp_check.run import Run, common_training

LOOK_EVERY, HANGS_AFTER = 5, 30  # seconds between looks, and without progress in a hanging script
# These match a script that starts its own ranks; PROCESS may match other processes, too:
SPAWNS = r"(?<![\w.])((torch\.)?\w*(mp|multiprocessing|dist)\.)?(spawn|start_processes)\("
PROCESS = r"\bProcess\(\s*target"
SETS = r"""environ\[["'](\w+)["']\]\s*=[^=]"""
ASKS = r"""(?:environ(?:\.get)?|getenv)[\[(]["']((?:LOCAL_)?RANK)["'][\],)]"""
MAY_BE_SET = r"""["']RANK["'] (?:not )?in os.environ"""  # matches a check for torchrun
SET_BY_TORCHRUN = r"\b(MASTER_ADDR|(LOCAL_)?RANK|WORLD_SIZE)\b"
USES_GPUS = r"nccl|cuda|device_ids|torch\.accelerator|\.to\(\w*rank\)"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=NPROC"]
LAUNCHERS = {  # name -> words that precede the script on the command line
    "python": [sys.executable],  # the script starts its own processes
    "srun": TORCHRUN,  # in each rank, startup/sitecustomize.py then sets what srun sets
    "torchrun": TORCHRUN,
}
SLURM = {  # value -> names of variables that srun sets to it on one node, without SLURM_ in front
    "NPROC": "NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE CPUS_ON_NODE GPUS_ON_NODE",
    "RANKS": "JOB_GPUS STEP_GPUS",
    "1": "NNODES JOB_NUM_NODES JOB_ID JOBID CPUS_PER_TASK",
    "0": "NODEID",
    "localhost": "JOB_NODELIST NODELIST STEP_NODELIST",
    "127.0.0.1": "LAUNCH_NODE_IPADDR",
    "ddp_check": "JOB_NAME JOB_PARTITION",
}


@dataclass
class Plan:
    """How a script is run: in a new folder, or in the folder of an earlier run."""

    script: str  # path of the script, or name of a module
    arguments: list
    nproc: int
    timeout: float  # seconds
    launcher: str | None  # None if it is to be chosen from the text of the script
    folder: str  # temporary folder for all runs
    module: bool = False  # whether the script is a module, as after python -m
    translate: str = "auto"  # whether GPU calls are translated: auto, yes or no
    restart_args: list | None = None  # arguments that are added after an interruption

    def __post_init__(self):
        self.path = module_path(self.script) if self.module else Path(self.script)
        self.text = self.path.read_text(encoding="utf-8", errors="replace")
        self.may_choose_launcher = self.launcher is None
        self.launcher = self.launcher or launcher_of(self.text)
        # `undisturbed` may change these attributes, and the launcher, for all further runs:
        self.translated = self.translate == "yes"
        self.lacking = ""  # how the run without translated calls ended
        self.left_out = False  # whether checkpoints beside the script were not copied
        self.with_checkpoints = False  # whether checkpoints beside the script are copied

    @property
    def restart_arguments(self):
        """The arguments of the script when it is started again."""
        return [*self.arguments, *(self.restart_args or [])]

    @cached_property
    def undisturbed(self):
        """An uninterrupted run. If it fails, it is repeated under torchrun, or with the checkpoint
        files beside the script, which the first run does not get."""
        run = self.first_run("undisturbed")
        if self.may_choose_launcher and self.launcher == "python" and lacks_launcher(run):
            self.launcher = "torchrun"
            run = self.first_run("undisturbed-under-torchrun")
        if run.returncode and self.left_out and not run.all(events.Step):
            self.with_checkpoints = True
            run = self.first_run("undisturbed-with-checkpoints")
        return run

    def first_run(self, name):
        """Run the script. If it fails without GPUs, run it again with its GPU calls translated."""
        run = self.run(name)
        if self.translate != "auto" or self.translated or not self.may_want_gpus(run):
            return run
        self.translated = True
        self.lacking = run.end.text if run.returncode else "no training"
        translated = self.run(f"{name}-translated")
        if translated.returncode and translated.end.text == run.end.text and not run.end.lacks_gpus:
            self.translated, self.lacking = False, ""  # it is the same error, and not about GPUs
            return run
        return translated

    def may_want_gpus(self, run):
        """Return whether a run did not train, perhaps because there are no GPUs."""
        joins_on_gpus_only = not run.joins and "init_process_group" in self.text
        untrained = run.returncode is not None and (joins_on_gpus_only or not run.all(events.Step))
        return run.end.lacks_gpus or bool(untrained and re.search(USES_GPUS, self.text))

    def folder_of(self, name):
        """Return the folder with this name, with the script's files in it."""
        cwd = Path(self.folder, name).resolve()
        if not cwd.exists():
            mirror = Mirror(self.with_checkpoints, MAX_COPIED)
            mirror.make(cwd, Path.cwd())
            self.left_out |= mirror.left_out
        return cwd

    def run(self, name, nproc=None, during=None, arguments=None, **options):
        """Run the script in the folder of this name, and return a Run.

        While the script is running, `during` is called with the process, the folder of the events,
        and the time at which the script will be killed. The options are fields of `Task`.
        """
        cwd, nproc = self.folder_of(name), nproc or self.nproc
        for_events = cwd.with_name(f"{name}.run{len(list(cwd.parent.glob(f'{name}.run*')))}")
        for_events.mkdir()
        task = Task(str(for_events), f"{cwd}{os.sep}", nproc, translate=self.translated, **options)
        command = self.command(nproc, cwd)
        run = Run(nproc, for_events, cwd, self.text, self.translated)
        run.begun = time.monotonic()
        with open(for_events / "output", "wb") as output:
            process = subprocess.Popen(
                [*command, *map(str, arguments or self.arguments)],
                cwd=cwd,
                env=environment(task, self.launcher),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            end = run.begun + self.timeout
            try:
                if during:
                    during(process, for_events, end)
                wait(process, run, end)
            finally:
                kill_all(process, for_events)
        collect(run)
        return run

    def command(self, nproc, cwd):
        """Return the command that starts the script, or its copy in this folder if there is one.

        For example, this is "torchrun … -- train.py" or "python train.py".
        """
        words = [word.replace("NPROC", str(nproc)) for word in LAUNCHERS[self.launcher]]
        # Without "--", torchrun refuses the script's options that begin like several of its own.
        end_of_options = ["--"] if LAUNCHERS[self.launcher] is TORCHRUN else []
        path, here = self.path.resolve(), Path.cwd()
        path = cwd / path.relative_to(here) if path.is_relative_to(here) else path
        option, name = (["-m"], self.script) if self.module else ([], str(path))
        return [*words, *option, *end_of_options, name]


@contextlib.contextmanager
def planned(script, arguments=(), nproc=2, timeout=300, launcher=None, **options):
    """Yield a plan with a temporary folder, which is removed at the end."""
    with kept_folder() as folder:
        yield Plan(script, arguments, nproc, timeout, launcher, folder, **options)


def launcher_of(text):
    """Return the launcher for which a script is written."""
    with contextlib.suppress(SyntaxError):
        text = ast.unparse(ast.parse(text))  # ast.unparse leaves out the comments
    # If the script reads RANK but never sets it, a launcher has to set it.
    needs_torchrun = set(re.findall(ASKS, text)) - set(re.findall(SETS, text))
    needs_torchrun |= set(re.findall(MAY_BE_SET, text))
    if re.search(SPAWNS, text) or (re.search(PROCESS, text) and not needs_torchrun):
        return "python"
    return "srun" if "SLURM_PROCID" in text and not needs_torchrun else "torchrun"


def lacks_launcher(run):
    """Return whether a script has failed because a variable that torchrun sets is missing."""
    return bool(run.returncode and not run.joins and re.search(SET_BY_TORCHRUN, run.end.text))


def module_path(name):
    """Return the file that `python -m` runs for a module."""
    path = Path(*name.split("."))
    main = path / "__main__.py"
    return main if main.is_file() else path.with_suffix(".py")


def environment(task, launcher):
    """Return the environment of an observed script, without GPUs."""
    of_a_job = r"SLURM_|(LOCAL_)?RANK$|WORLD_SIZE$"  # set if the checker itself runs in a job
    env = {name: value for name, value in os.environ.items() if not re.match(of_a_job, name)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if launcher == "srun":
        stand_for = {"NPROC": str(task.nproc), "RANKS": ",".join(map(str, range(task.nproc)))}
        for value, names in SLURM.items():
            env |= {f"SLURM_{name}": stand_for.get(value, value) for name in names.split()}
        # Let each process join the group as if torchrun had not started it:
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DDP_CHECK_AS_SRUN": "1"}
        env["SLURM_SUBMIT_DIR"] = os.getcwd()
    # Runs in the same folder share $TMPDIR, so a script can resume from what it has saved there.
    temporary = Path(f"{task.folder.rstrip(os.sep)}.tmp")
    temporary.mkdir(exist_ok=True)
    python_path = f"{HERE / 'startup'}{os.pathsep}{env.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    of_the_observer = {VARIABLE: str(task), "PYTHONPATH": python_path, "TMPDIR": str(temporary)}
    return {"OMP_NUM_THREADS": "1"} | env | of_the_observer


def wait(process, run, end):
    """Wait until a script ends, hangs or reaches its timeout; store the outcome in the run."""
    written, computed = -1, 0.0  # result of `progress` at the last look; at first, lower than any
    since = run.begun  # time of the last progress
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.returncode = process.wait(min(LOOK_EVERY, max(1, end - time.monotonic())))
            return
        if time.monotonic() >= end:
            break
        written_before, computed_before = written, computed
        written, computed = progress(process, run.folder)
        if written > written_before or computed - computed_before > LOOK_EVERY / 50:
            since = time.monotonic()
        elif time.monotonic() - since > HANGS_AFTER:
            if seems_to_hang(run):
                return
            since = time.monotonic()  # it may be waiting for the network, so look again later
    run.stacks, run.idle_ranks = stacks_and_idle_ranks(run.folder)


def progress(process, folder):
    """Return the size of all events in bytes, and the CPU seconds that all processes have used.

    The process that was started is left out, because torchrun itself polls its ranks all the time.
    """
    files = [path for path in folder.glob("*.jsonl") if path.stem != str(process.pid)]
    computed = [cpu_time(int(path.stem)) for path in files]
    return sum(path.stat().st_size for path in files), sum(computed)


def seems_to_hang(run):
    """Return whether a running script seems to hang."""
    collect(run)
    run.stacks, run.idle_ranks = stacks_and_idle_ranks(run.folder)
    return run.hangs


def collect(run):
    """Store in a run the output and the events that it has produced so far."""
    run.seconds = time.monotonic() - run.begun
    run.output = (run.folder / "output").read_text(encoding="utf-8", errors="replace")
    processes = read_events(run.folder).items()
    run.events_by_rank = {rank: common_training(of_rank) for rank, (_, of_rank) in processes}


def stacks_and_idle_ranks(folder):
    """Return {rank: its stack, as [(file, line, function)]}, and the ranks that use no CPU time."""
    pids = {rank: pid for rank, (pid, _) in read_events(folder).items()}
    before = {rank: cpu_time(pid) for rank, pid in pids.items()}
    for pid in pids.values():
        os.truncate(folder / f"{pid}.stack", 0)  # an earlier look may have filled it
        with contextlib.suppress(psutil.Error):  # the process may have ended
            if process := observed_process(pid, folder):
                process.send_signal(STACKS)
    time.sleep(1)
    idle = {rank for rank, pid in pids.items() if cpu_time(pid) - before[rank] < 0.05}
    texts = {rank: (folder / f"{pid}.stack").read_text() for rank, pid in pids.items()}
    frame = r'File "(.+)", line (\d+) in (\S+)'
    return {rank: re.findall(frame, text) for rank, text in texts.items()}, idle


def cpu_time(pid):
    """Return the CPU seconds of a process and its descendants, or 0 if it has ended."""
    total = 0
    for member in family_of(pid):
        with contextlib.suppress(psutil.Error):
            total += sum(member.cpu_times()[:2])
    return total


def family_of(pid):
    """Return a process and its descendants, or nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def kill_all(process, folder):
    """Kill the command, its descendants and all other processes that report to the folder."""
    for member in family_of(process.pid):
        with contextlib.suppress(psutil.Error):
            member.kill()
    signal_processes(folder, "kill")
    process.wait()
