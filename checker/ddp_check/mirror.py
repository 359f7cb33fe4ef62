"""The folder that a script runs in: its files, copied or linked."""

import math
import os
import shutil
from dataclasses import dataclass

# Checkpoints end so, but so may weights and data that a script needs:
CHECKPOINT = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".new", ".interrupted")
CHECKPOINT += (".distcp", ".metadata")
ENVIRONMENTS = {"pyvenv.cfg", "conda-meta"}  # folders of Python's environments have one of these
MAX_DEPTH, MAX_ENTRIES = 9, 1000  # of folders that are copied, not linked
MAX_COPIED = 1 << 28  # bytes of files that are copied for a run; others are linked


@dataclass
class Mirror:
    """Makes new folders with the files of others.

    What is copied is safe from the script, whoever writes to it. The observer replaces a link by a
    copy before Python writes to it, but sees nothing of what a library in C does.
    """

    with_checkpoints: bool
    room: int  # bytes that may still be copied
    left_out: bool = False  # a checkpoint is

    def make(self, target, source, depth=MAX_DEPTH, in_data=False):
        """Make a new folder with the files of another.

        __pycache__     is left out, and so are checkpoints, unless they are wanted or `in_data`
        folders         are made, too, but linked if they are hidden, `is_large`, or very deep
        code            is copied, for Python would import from the folder that a link points to
        other files     are copied while there is room, the smallest first, but linked `in_data`
        hidden files    are linked
        """
        target.mkdir()
        for path in sorted(source.iterdir(), key=size_of):
            new = target / path.name
            is_folder = path.is_dir() and os.access(path, os.R_OK | os.X_OK)
            if path.name == "__pycache__":
                continue
            if path.name.endswith(CHECKPOINT) and not (self.with_checkpoints or in_data):
                self.left_out = True
            elif is_folder and depth and not (path.name.startswith(".") or is_large(path)):
                self.make(new, path, depth - 1, in_data or "data" in path.name)
            elif path.name.startswith(".") or not self.try_to_copy(path, new, in_data):
                new.symlink_to(path)

    def try_to_copy(self, path, new, in_data):
        """Copy a file, unless it is to be linked; return whether it was copied."""
        fits = size_of(path) <= self.room and not in_data
        if not path.is_file() or not (fits or path.suffix == ".py"):
            return False
        try:
            shutil.copy(path, new)
        except OSError:  # it cannot be read
            new.unlink(missing_ok=True)
            return False
        self.room -= size_of(path)
        return True


def size_of(path):
    """Return the size of a file in bytes, infinite for a folder and what cannot be read."""
    return os.path.getsize(path) if os.path.isfile(path) else math.inf


def is_large(folder):
    """Return whether a folder is linked as a whole: it holds very many files, or an environment."""
    if not ENVIRONMENTS.isdisjoint(os.listdir(folder)):
        return True
    entries = (entry for _, folders, files in os.walk(folder) for entry in folders + files)
    others = (entry for entry in entries if not entry.endswith(".py"))
    return any(number >= MAX_ENTRIES for number, _ in enumerate(others))
