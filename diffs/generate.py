"""Write the diff of each step to the one before; with --check, only say which are stale.

python diffs/generate.py [--check]
"""

import argparse
import difflib
import sys
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent


def ladder(root=HERE.parent):
    """Return the paths of the steps' scripts, in order."""
    return sorted(root.glob("0[1-9]_*.py"))


def unified(old, new):
    """Return the diff between two files as `diff -u` would write it, without dates."""
    texts = (path.read_text(encoding="utf-8").splitlines(keepends=True) for path in (old, new))
    return "".join(difflib.unified_diff(*texts, old.name, new.name))


def generate(root=HERE.parent):
    """Return what belongs into each generated file: {path: text}."""
    steps = ladder(root)
    return {
        root / "diffs" / f"{old.name[:2]}_to_{new.name[:2]}.diff": unified(old, new)
        for old, new in pairwise(steps)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in generate().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if not check:
            path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{'stale' if check else 'written'}: {path.relative_to(HERE.parent)}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
