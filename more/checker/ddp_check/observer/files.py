"""Observes what is written and loaded, and keeps the user's own files unchanged."""

import os
import shutil
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_check.events import Load, Save, Written
from ddp_check.observer.base import TASK, ask, callers, harmless, report, script_line, state
from ddp_check.observer.patches import patch
from ddp_check.protocol import PROTECTED

TEMPORARY = f"{os.path.realpath(os.environ['TMPDIR'])}{os.sep}"
SHARDED = "torch/distributed/checkpoint"  # code that saves the parts of a sharded checkpoint
# Names of audit events about a change -> number of their first arguments that are paths:
CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "shutil.rmtree": 1}
AUDITED = {"open", "sqlite3.connect", *CHANGES}  # the only ones handled, as even id() is an event

# ---------------------------------------------------------------- files


def audit(event, args):
    """Protect the user's own files, and report what the script opens and renames."""
    if event not in AUDITED or state.changes_files:
        return
    if event == "open":
        audit_open(*args)
        return
    for path in args[: CHANGES.get(event, 0)]:
        protect(path)
    if event == "sqlite3.connect":
        protect(args[0], opens=True)
    with harmless():
        if event == "os.rename" and script_line():
            old_name, new_name = map(os.path.realpath, map(os.fsdecode, args[:2]))
            path = new_name if new_name.startswith(TASK.folder) else None
            report(Written, path=path, old_name=old_name)


def audit_open(path, mode, flags):
    """Protect a user's file that is opened for writing, and report what the script writes."""
    if isinstance(path, int) or not flags & (os.O_WRONLY | os.O_RDWR):
        return  # it is a descriptor of an open file, or is only read, as imports do all the time
    protect(path, opens=True, truncates=bool(flags & os.O_TRUNC))
    if mode is None:  # the file is opened with os.open(), which libraries use
        return
    with harmless():
        real = os.path.realpath(os.fsdecode(path))
        is_temporary = real.startswith(TEMPORARY)  # libraries keep compiled code there
        is_data = real.startswith((TASK.folder, TEMPORARY))
        is_replaced = not set("ar") & set(mode)  # np.memmap opens with "r+" even to read
        if is_data and is_replaced and script_line(direct=is_temporary):
            report(Written, path=real)


def protect(path, opens=False, truncates=False):
    """Keep the user's own files unchanged when the script is about to change a path.

    A linked file is replaced with a copy before the script opens it. A linked folder has too many
    files for that, so the script gets an error.

    truncates: whether opening the file empties it, so that nothing has to be copied
    """
    linked = None
    with harmless():
        path = os.path.abspath(os.fsdecode(path))
        linked = linked_folder(path)
        if opens and not linked and leads_outside(path):
            replace_link(path, truncates)
    if linked:
        raise PermissionError(f"{PROTECTED} {linked}, which is linked because it is very large")


def linked_folder(path):
    """Return the path or the nearest folder above it that links to a user's folder, or None."""
    links = filter(leads_outside, [path, *map(str, Path(path).parents)])
    return next(filter(os.path.isdir, links), None)


def leads_outside(path):
    """Return whether a path in the script's folder is a link that leads out of it."""
    is_link = path.startswith(TASK.folder) and os.path.islink(path)
    return is_link and not os.path.realpath(path).startswith(TASK.folder)


def replace_link(path, truncates):
    """Replace a link to a file with a copy of the file, or with an empty file."""
    state.changes_files = True
    try:
        new = f"{path}.{os.getpid()}"
        if truncates or not os.path.isfile(path):
            open(new, "w").close()
        else:
            shutil.copyfile(path, new)
        os.replace(new, path)  # os.replace is atomic: other ranks may be using the link
    finally:
        state.changes_files = False


sys.addaudithook(audit)


# ---------------------------------------------------------------- checkpoints


@patch("torch.save")
def save(original, obj, f, *args, **kwargs):
    """Report a file after it has been saved."""
    if isinstance(f, str | os.PathLike):
        protect(f, opens=True, truncates=True)  # PyTorch opens it in C++, without an audit event
    result = original(obj, f, *args, **kwargs)
    # Pickling a storage calls torch.save, which is no call of the script.
    is_storage = isinstance(obj, torch.TypedStorage | torch.UntypedStorage)
    with harmless():
        in_checkpoint = any(SHARDED in code.co_filename for code in callers())
        if script_line() and not (is_storage or in_checkpoint):
            report_save(obj, f)
    return result


def report_save(obj, file):
    """Report that an object was saved to a path or an open file."""
    path = file if isinstance(file, str | os.PathLike) else ask(getattr, file, "name")
    items = ask(items_in, obj, default=[])
    saved = [obj, *(value for _, value in items)]
    # Only the parameters of a wrapped model count: a moving average may rightly have the prefix.
    places = {value.data_ptr() for module in state.wrapped for value in module.parameters()}
    prefixed = [(key, value) for key, value in items if ask(str.startswith, key, "module.")]
    keys = [key for key, value in prefixed if ask(lambda value: value.data_ptr() in places, value)]
    report(
        Save,
        path=os.path.realpath(path) if isinstance(path, str | os.PathLike) else None,
        keys=keys[:3],
        wrapper=any(isinstance(value, DistributedDataParallel) for value in saved),
        steps=state.steps,
    )


def items_in(obj):
    """Return the items of a dictionary and of the dictionaries in it; [] for another object."""
    items = [*obj.items()] if isinstance(obj, dict) else []
    return items + [item for _, value in items for item in items_in(value)]


@patch("torch.load")
def load(original, *args, **kwargs):
    """Report a file that the script itself loads."""
    with harmless():
        if script_line(direct=True):
            report(Load)
    return original(*args, **kwargs)
