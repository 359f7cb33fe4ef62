"""The folder in which a script runs: the user's files, copied or linked."""

import math
import os
import shutil
from dataclasses import dataclass

# Endings of checkpoint files. Weights and data that a script needs may have the same endings:
CHECKPOINT = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".new", ".interrupted")
CHECKPOINT += (".distcp", ".metadata")
ENVIRONMENTS = {"pyvenv.cfg", "conda-meta"}  # a venv or conda environment contains one of these
MAX_DEPTH, MAX_ENTRIES = 9, 5000  # deeper and larger folders are linked, not copied
MAX_COPIED = 1 << 28  # number of bytes that are copied for a run; other files are linked


@dataclass
class Mirror:
    """Makes new folders with the files of existing ones.

    If a file is copied, nothing that the script does can change the user's own file. If it is
    linked, the observer makes a copy before Python writes to it, but cannot see C libraries write.
    In a linked folder, the observer refuses every change.
    """

    with_checkpoints: bool  # whether checkpoints are copied or linked, too
    room: int  # number of bytes that may still be copied
    left_out: bool = False  # whether a checkpoint was left out

    def make(self, target, source, depth=MAX_DEPTH, in_data=False):
        """Make a new folder with the files of another.

        __pycache__     is left out, and so are checkpoints, unless they are wanted or `in_data`
        folders         are made in the same way, or linked if `is_large` or very deep
        code            is copied, because a linked file would import files beside its target
        other files     are copied while there is room, smallest first, or linked if `in_data`
        """
        target.mkdir()
        for path in sorted(source.iterdir(), key=size_of):
            new = target / path.name
            is_folder = path.is_dir() and os.access(path, os.R_OK | os.X_OK)
            if path.name == "__pycache__":
                continue
            if path.name.endswith(CHECKPOINT) and not (self.with_checkpoints or in_data):
                self.left_out = True
            elif is_folder and depth and not is_large(path):
                self.make(new, path, depth - 1, in_data or "data" in path.name)
            elif not self.try_to_copy(path, new, in_data):
                new.symlink_to(path)

    def try_to_copy(self, path, new, in_data):
        """Copy a file, unless it has to be linked; return whether it was copied."""
        fits = size_of(path) <= self.room and not in_data
        if not path.is_file() or not (fits or path.suffix == ".py"):
            return False
        try:
            shutil.copy(path, new)
        except OSError:  # the file cannot be read
            new.unlink(missing_ok=True)
            return False
        self.room -= size_of(path)
        return True


def size_of(path):
    """Return the size of a file in bytes, or infinity for a folder or an unreadable file."""
    return os.path.getsize(path) if os.path.isfile(path) else math.inf


def is_large(folder):
    """Return whether a folder holds very many files, a Python environment, or a Git repository."""
    if folder.name == ".git" or not ENVIRONMENTS.isdisjoint(os.listdir(folder)):
        return True
    entries = (entry for _, folders, files in os.walk(folder) for entry in folders + files)
    others = (entry for entry in entries if not entry.endswith(".py"))
    return any(number >= MAX_ENTRIES for number, _ in enumerate(others))
