"""Observes what is printed, written and loaded."""

import os
import re
import shutil
import sys

import torch

from ddp_check.observer.report import TASK, called_by_script, say, seen, watch, where


class Printed:
    """A stream that reports each line written to it."""

    def __init__(self, stream):
        self.stream, self.begun = stream, ""

    def write(self, text):
        *lines, self.begun = f"{self.begun}{text}".split("\n")
        for line in filter(str.strip, lines):
            say("print", text=line[:200], where=where())
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


sys.stdout = Printed(sys.stdout)


def audit(event, args):
    """Report files that are opened for writing or renamed."""
    if event == "open" and isinstance(args[0], str) and re.search("[wax+]", str(args[1] or "")):
        unlink(args[0], args[1])
        written("open", args[0])
    elif event == "os.rename":
        written("rename", args[1], args[0])


def in_place(path):
    return path.startswith(TASK.place)


def unlink(path, mode="w"):
    """Replace a link by a file before it is written to, so the user's own file stays unchanged."""
    if os.path.islink(path) and in_place(os.path.abspath(path)):
        original = os.path.realpath(path)
        os.unlink(path)
        if "w" not in mode and os.path.isfile(original):
            shutil.copyfile(original, path)


def written(kind, path, source=None):
    """Report a write in the script's folder, or a rename from `source`."""
    path, line = os.path.realpath(os.fsdecode(path)), where()
    if line and (source or in_place(path)):
        source = source and os.path.realpath(os.fsdecode(source))
        say(kind, path=path if in_place(path) else None, source=source, where=line)


sys.addaudithook(audit)


@watch(torch, "save")
def save(do, obj, f, *args, **kwargs):
    keys = list(prefixed(obj))
    if isinstance(f, str | os.PathLike):
        unlink(f)
        say("save", path=os.path.realpath(f), keys=keys[:3], where=where())
    elif keys:
        name = getattr(f, "name", None)
        path = os.path.realpath(name) if isinstance(name, str) else None
        say("save", path=path, keys=keys[:3], where=where())
    result = do(obj, f, *args, **kwargs)
    say("saved", steps=seen.steps)
    return result


def prefixed(obj, prefix="module."):
    """Yield the keys with a prefix, also from nested dictionaries."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            if isinstance(key, str) and key.startswith(prefix):
                yield key
            yield from prefixed(value)


@watch(torch, "load")
def load(do, f, *args, **kwargs):
    only = kwargs.get("weights_only")
    if called_by_script():
        say("load", weights_only=only is None or only, where=where())
    return do(f, *args, **kwargs)
