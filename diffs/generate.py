"""Write the diffs, the README's walk-through, the page and the notebook; with --check, only say
which are stale.

python diffs/generate.py [--check | --run]
"""

import argparse
import re
import sys
from pathlib import Path

try:
    from hunks import Problem, explained
    from notebook import notebook, run
    from page import page
except ModuleNotFoundError as error:
    sys.exit(f"generate.py: {error}: pip install -r requirements.txt")

HERE = Path(__file__).resolve().parent


def walkthrough(diff):
    """Return a step's story and, to be opened, its hunks with their notes, as Markdown."""
    parts = [diff.story, f"<details>\n<summary>{summary(diff)}</summary>"]
    for number, hunk in enumerate(diff.hunks, start=1):
        parts += [f"#### {number}. {hunk.note.title}", f"```diff\n{hunk.text}\n```"]
        parts += [hunk.note.markdown]
    text = "\n\n".join([*parts, "</details>"])
    return text.replace("](pictures/", "](diffs/pictures/")


def summary(diff):
    count = len(diff.hunks)
    return f"<b>{diff.name}, hunk by hunk</b>: {count} changes, and why each line is there"


def woven(text, diffs):
    """Return the README with the walk-through of each step between its markers."""
    for diff in diffs:
        begin, end = (f"<!-- walk-through {diff.name}: {word} -->" for word in ("begin", "end"))
        pattern = rf"(?<={re.escape(begin)}\n).*?(?={re.escape(end)}\n)"
        inside = f"\n{walkthrough(diff)}\n\n"
        text, found = re.subn(pattern, lambda _, new=inside: new, text, flags=re.DOTALL)
        if found != 1:
            raise Problem(f"README.md: wants one {begin}, and one {end} below it")
    return text


def generate(root=HERE.parent):
    """Return what belongs into each generated file: {path: text}."""
    diffs = explained(root)
    folder, readme = root / "diffs", root / "README.md"
    files = {folder / f"{diff.slug.replace('-', '_')}.diff": diff.text for diff in diffs}
    files[readme] = woven(readme.read_text(encoding="utf-8"), diffs)
    files[folder / "index.html"] = page(root, diffs)
    path = folder / "walkthrough.ipynb"
    files[path] = notebook(path, diffs)
    return files


def main():
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    either.add_argument("--run", action="store_true", help="run the notebook, store what it prints")
    args = parser.parse_args()
    try:
        files = generate()
    except Problem as problem:
        sys.exit(f"{parser.prog}: {problem}")
    stale = [
        (path, text)
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if not args.check:
            path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(HERE.parent)}")
    if args.run:
        run(HERE / "walkthrough.ipynb")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
