"""Observes what is printed, written and loaded."""

import contextlib
import logging
import os
import re
import shutil
import sys

import torch

from ddp_check.events import Load, Opened, Print, Renamed, Save
from ddp_check.observer.base import TASK, reports, say, seen, watch, where
from ddp_check.protocol import is_own


class Printed:
    """A stream that reports each line written to it."""

    def __init__(self, stream):
        self.stream, self.begun = stream, ""

    def write(self, text):
        *lines, self.begun = f"{self.begun}{text}".split("\n")
        for line in filter(str.strip, lines):
            say(Print, text=line[:200])
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def audit(event, args):
    if event == "open" and isinstance(args[0], str) and re.search("[wax+]", str(args[1] or "")):
        unlink(args[0], args[1])
        path = os.path.realpath(args[0])
        if path.startswith(TASK.place) and where():
            say(Opened, path=path, append="a" in args[1])
    elif event == "os.rename" and where():
        source, path = (os.path.realpath(os.fsdecode(name)) for name in args[:2])
        say(Renamed, path=path if path.startswith(TASK.place) else None, source=source)


def unlink(path, mode="w"):
    """Replace a link by a file before it is written to, so the user's own file stays unchanged."""
    if os.path.islink(path) and os.path.abspath(path).startswith(TASK.place):
        original = os.path.realpath(path)
        os.unlink(path)
        if "w" not in mode and os.path.isfile(original):
            shutil.copyfile(original, path)


@watch(logging.StreamHandler, "emit")  # a FileHandler is one, too
def log(do, self, record):
    if is_own(record.pathname) and not isinstance(self.stream, Printed):
        with contextlib.suppress(Exception):  # logging tells what is wrong with a record
            say(Print, text=self.format(record)[:200])
    return do(self, record)


sys.stdout = Printed(sys.stdout)
sys.addaudithook(audit)


@watch(torch, "save")
def save(do, obj, f, *args, **kwargs):
    path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    if path is f:
        unlink(f)
    result = do(obj, f, *args, **kwargs)
    path = os.path.realpath(path) if isinstance(path, str | os.PathLike) else None
    say(Save, path=path, keys=prefixed(obj)[:3], steps=seen.steps)
    return result


def prefixed(obj):
    """Return the keys of a dictionary, and of those inside it, that begin with module."""
    items = obj.items() if isinstance(obj, dict) else ()
    own = [key for key, _ in items if str(key).startswith("module.")]
    return own + [key for _, value in items for key in prefixed(value)]


def loaded(_, kwargs):
    return where(direct=True) and {"weights_only": kwargs.get("weights_only") in (None, True)}


reports(Load, loaded, torch, "load")
