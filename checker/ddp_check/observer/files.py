"""Observes what is written and loaded, and keeps the user's own files unchanged."""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_check.events import Load, Save, Written
from ddp_check.observer.base import TASK, ask, callers, harmless, report, script_line, state
from ddp_check.observer.patches import patch

CODE = (".py", ".pyc")
TEMPORARY = f"{os.path.realpath(os.environ['TMPDIR'])}{os.sep}"
SHARDED = "torch/distributed/checkpoint"  # calls torch.save for parts of a sharded checkpoint
MAX_WAIT = 10  # seconds to wait for a folder that another rank makes: a drill may kill that rank
# Audit events that change a folder, and how many of their first arguments are paths:
CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "shutil.rmtree": 1}
AUDITED = {"open", "sqlite3.connect", *CHANGES}  # only these, because even id() is an event

# ---------------------------------------------------------------- files


def audit(event, args):
    """Keep the user's own files unchanged, and report what the script opens and renames."""
    if event not in AUDITED or state.changes_files:
        return
    with harmless():
        changed = [os.path.abspath(os.fsdecode(path)) for path in args[: CHANGES.get(event, 0)]]
        for path in changed:
            make_own_folders(path)
        match event:
            case "open":
                audit_open(*args)
            case "sqlite3.connect" if isinstance(args[0], str):
                make_own_file(args[0], truncates=False)
            case "shutil.rmtree" if stands_for_folder(changed[0]):
                os.unlink(changed[0])
                os.mkdir(changed[0])  # an empty folder, because rmtree refuses to remove a link
            case "os.rename" if script_line():
                old_name, new_name = map(os.path.realpath, changed)
                path = new_name if new_name.startswith(TASK.folder) else None
                report(Written, path=path, old_name=old_name)


def audit_open(path, mode, flags):
    """Protect a user's file that is opened for writing, and report what the script writes."""
    if isinstance(path, int):
        return  # a descriptor of an open file
    path, writes = os.fsdecode(path), flags & (os.O_WRONLY | os.O_RDWR)
    if writes:
        make_own_file(path, truncates=bool(flags & os.O_TRUNC))
    if mode is None:  # opened with os.open(), as libraries do
        return
    real = os.path.realpath(path)
    is_temporary = real.startswith(TEMPORARY)  # libraries keep files there, such as compiled code
    is_data = real.startswith((TASK.folder, TEMPORARY)) and not real.endswith(CODE)
    if not (is_data and script_line(direct=is_temporary)):
        return
    if writes and not set("ar") & set(mode):  # np.memmap opens with "r+" even to read
        report(Written, path=real)


def make_own_file(path, truncates=True):
    """Replace a link with a file before it is written to, so the user's own file stays unchanged.

    truncates: opening the file empties it, so nothing has to be copied
    """
    path = os.path.abspath(path)
    make_own_folders(path)
    if not leads_outside(path):
        return
    if os.path.isdir(path):  # as in os.open(folder, O_TMPFILE | …)
        make_own_folder(path)
        return
    with unobserved():
        new = f"{path}.{os.getpid()}"
        if truncates or not os.path.isfile(path):
            open(new, "w").close()
        else:
            shutil.copyfile(path, new)
        os.replace(new, path)  # atomic, because other ranks may use it


def make_own_folders(path):
    """Replace each folder above a path that is a link to a folder of the user's."""
    for folder in reversed(Path(path).parents):
        make_own_folder(str(folder))


def make_own_folder(path):
    """Redirect a link from a folder of the user's to a new folder with links to its entries."""
    if not leads_outside(path):
        return
    own = own_folder_of(path)
    with unobserved():
        try:
            os.mkdir(own)  # this succeeds on one rank; the others wait until it is done
        except FileExistsError:
            end = time.monotonic() + MAX_WAIT
            while leads_outside(path) and time.monotonic() < end:
                time.sleep(0.001)
            return
        for entry in os.scandir(path):
            os.symlink(os.path.realpath(entry.path), os.path.join(own, entry.name))
        os.symlink(os.path.basename(own), f"{own}.link")  # relative: both are in one folder
        os.replace(f"{own}.link", path)  # atomic, because other ranks may read there


def own_folder_of(path):
    """Return the path of the new folder that replaces the user's folder behind a link."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.own")


def stands_for_folder(path):
    """Return whether a path is a link to a folder of the user's, or to the one that replaces it."""
    return leads_outside(path) or os.path.realpath(path) == os.path.realpath(own_folder_of(path))


def leads_outside(path):
    """Return whether a path in the script's folder is a link that leads out of it."""
    is_link = path.startswith(TASK.folder) and os.path.islink(path)
    return is_link and not os.path.realpath(path).startswith(TASK.folder)


@contextlib.contextmanager
def unobserved():
    """Let the observer itself change files."""
    state.changes_files = True
    try:
        yield
    finally:
        state.changes_files = False


sys.addaudithook(audit)


# ---------------------------------------------------------------- checkpoints


@patch("torch.save")
def save(original, obj, f, *args, **kwargs):
    """Report a file after it has been saved."""
    with harmless():
        if isinstance(f, str | os.PathLike):
            make_own_file(f)  # PyTorch opens it in C++, without an audit event
    steps = state.steps
    result = original(obj, f, *args, **kwargs)
    is_storage = isinstance(obj, torch.TypedStorage | torch.UntypedStorage)  # saved by pickle
    with harmless():
        in_checkpoint = any(SHARDED in code.co_filename for code in callers())
        if script_line() and not (is_storage or in_checkpoint):
            report_save(obj, f, steps)
    return result


def report_save(obj, file, steps):
    """Report that an object was saved to a path or an open file."""
    path = file if isinstance(file, str | os.PathLike) else ask(getattr, file, "name")
    items = ask(items_in, obj, default=[])
    saved = [obj, *(value for _, value in items)]
    # Only the parameters of a wrapped model count: in a moving average, the prefix is no fault.
    places = {value.data_ptr() for module in state.wrapped for value in module.parameters()}
    prefixed = [(key, value) for key, value in items if ask(str.startswith, key, "module.")]
    keys = [key for key, value in prefixed if ask(lambda value: value.data_ptr() in places, value)]
    report(
        Save,
        path=os.path.realpath(path) if isinstance(path, str | os.PathLike) else None,
        keys=keys[:3],
        wrapper=any(isinstance(value, DistributedDataParallel) for value in saved),
        steps=steps,
    )


def items_in(obj):
    """Return the items of a dictionary, and of those inside it."""
    items = [*obj.items()] if isinstance(obj, dict) else []
    return items + [item for _, value in items for item in items_in(value)]


@patch("torch.load")
def load(original, *args, **kwargs):
    """Report a file that the script itself loads."""
    with harmless():
        if script_line(direct=True):
            report(Load)
    return original(*args, **kwargs)
