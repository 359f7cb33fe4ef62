"""Observes what is printed, written and loaded."""

import logging
import os
import re
import shutil
import sys

from ddp_check.events import Load, Opened, Print, Renamed, Save, ShardedLoad, ShardedSave
from ddp_check.imports import after_import
from ddp_check.observer.base import TASK, ask, harmless, report, script_line, state
from ddp_check.observer.patches import patch, replace
from ddp_check.protocol import is_own

LINE = 200  # characters of a printed line that are kept

# ---------------------------------------------------------------- printed lines


class Printed:
    """A stream that reports each line written to it."""

    def __init__(self, stream):
        self.stream = stream
        self.unfinished = ""  # line

    def write(self, text):
        with harmless:
            *lines, self.unfinished = f"{self.unfinished}{text}".split("\n")
            for line in filter(str.strip, lines):
                report(Print, text=line[:LINE])
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def log(original, self, record):  # a FileHandler is a StreamHandler, too
    if ask(is_own, record.pathname) and not isinstance(self.stream, Printed):
        text = ask(self.format, record)  # logging itself tells what is wrong with a record
        if text:
            report(Print, text=text[:LINE])
    return original(self, record)


replace(logging.StreamHandler, "emit", log)
sys.stdout = Printed(sys.stdout)

# ---------------------------------------------------------------- files


def audit(event, args):
    if event == "open" and isinstance(args[0], str) and re.search("[wax+]", str(args[1] or "")):
        unlink(args[0], args[1])
        path = os.path.realpath(args[0])
        if path.startswith(TASK.place) and script_line():
            report(Opened, path=path, append="a" in args[1])
    elif event == "os.rename" and script_line():
        source, path = (os.path.realpath(os.fsdecode(name)) for name in args[:2])
        report(Renamed, path=path if path.startswith(TASK.place) else None, source=source)


def unlink(path, mode="w"):
    """Replace a link by a file before it is written to, so the user's own file stays unchanged."""
    if os.path.islink(path) and os.path.abspath(path).startswith(TASK.place):
        original = os.path.realpath(path)
        os.unlink(path)
        if "w" not in mode and os.path.isfile(original):
            shutil.copyfile(original, path)


sys.addaudithook(audit)


# ---------------------------------------------------------------- checkpoints


@patch("torch.save")
def save(original, obj, f, *args, **kwargs):
    path = f if isinstance(f, str | os.PathLike) else ask(getattr, f, "name")
    if path is f:
        unlink(f)
    steps = state.steps
    result = original(obj, f, *args, **kwargs)
    if state.in_sharded_save or not script_line():  # a part of another checkpoint
        return result
    path = os.path.realpath(path) if isinstance(path, str | os.PathLike) else None
    keys = ask(prefixed_keys, obj, default=[])
    report(Save, path=path, keys=keys[:3], steps=steps)
    return result


def prefixed_keys(obj):
    """Return the keys of a dictionary, and of those inside it, that begin with module."""
    items = obj.items() if isinstance(obj, dict) else ()
    own = [key for key, _ in items if str(key).startswith("module.")]
    return own + [key for _, value in items for key in prefixed_keys(value)]


@patch("torch.load")
def load(original, *args, **kwargs):
    if script_line(direct=True):
        report(Load, weights_only=kwargs.get("weights_only") in (None, True))
    return original(*args, **kwargs)


def watch_sharded():
    """Observe torch.distributed.checkpoint, which takes seconds to import."""

    @patch("torch.distributed.checkpoint.save")
    def save_sharded(original, *args, **kwargs):
        steps = state.steps
        state.in_sharded_save = True
        try:
            result = original(*args, **kwargs)
        finally:
            state.in_sharded_save = False
        report(ShardedSave, path=checkpoint_path(kwargs), steps=steps, asynchronous=False)
        return result

    @patch("torch.distributed.checkpoint.async_save")
    def save_later(original, *args, **kwargs):
        line, steps, path = script_line(), state.steps, checkpoint_path(kwargs)

        def saved(future):
            if not future.exception():
                report(ShardedSave, line, path=path, steps=steps, asynchronous=True)

        result = original(*args, **kwargs)
        future = ask(lambda: result.upload_completion, default=result)
        ask(lambda: future.add_done_callback(saved))
        return result

    @patch("torch.distributed.checkpoint.load")
    def load_sharded(original, *args, **kwargs):
        report(ShardedLoad, path=checkpoint_path(kwargs))
        return original(*args, **kwargs)


def checkpoint_path(keywords):
    """Return where a checkpoint lies, from the keywords of a call."""
    storage = keywords.get("storage_writer") or keywords.get("storage_reader")
    path = keywords.get("checkpoint_id") or ask(getattr, storage, "path")
    return os.path.realpath(path) if isinstance(path, str | os.PathLike) else None


after_import("torch.distributed.checkpoint", watch_sharded)
