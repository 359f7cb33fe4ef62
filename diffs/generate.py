"""Write all generated files: the diffs, their page and notebook, and the tables in the READMEs.

python diffs/generate.py [--check | --run]
"""

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "generator"))

try:
    from hunks import Diff, Problem, annotated_diffs, updated_readme
    from notebook import run, write_book
    from page import render
    from patches import KINDS, collect, index, readme
except ModuleNotFoundError as error:
    sys.exit(f"generate.py: {error}: pip install -r diffs/requirements.txt")

WRITTEN = "Written by diffs/generate.py from the scripts: edit those."


def front_page(root, diff):
    """Return README.md with an up-to-date diff of the scripts in convert/."""
    lines = [line for hunk in diff.hunks for line in hunk.lines[hunk.brief]]
    block = "\n".join([*lines, ""])
    text = (root / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(?<=^```diff\n)(?s:.*?)(?=^```$)", lambda _: block, text, flags=re.MULTILINE)


def generate(root=HERE.parent):
    """Yield the path and the text of each generated file, starting with the front page."""
    diffs = annotated_diffs(root)
    folder = root / "diffs"
    front_diff = Diff(root / "convert" / "train.py", root / "convert" / "train_ddp.py", context=1)
    yield root / "README.md", front_page(root, front_diff)
    for diff in diffs:
        yield folder / f"{diff.slug.replace('-', '_')}.diff", f"{WRITTEN}\n{diff.text}"
    yield folder / "README.md", updated_readme(root, diffs)
    book = folder / "walkthrough.ipynb"
    yield book, write_book(book, diffs)
    exercise = root / "more" / "exercise"
    solution = Diff(exercise / "train.py", exercise / "solution.py")
    yield solution.new.with_suffix(".diff"), f"{WRITTEN}\n{solution.text}"
    pages = [page for kind in KINDS for page in collect(root, kind)]
    yield from ((root / page.path, page.text) for page in pages)
    for kind in KINDS:
        yield root / kind / "README.md", index(readme(root, kind), pages)
    yield folder / "index.html", render(root, front_diff, diffs, pages)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="only name the files that are stale")
    either.add_argument("--run", action="store_true", help="run the notebook and store its outputs")
    args = parser.parse_args()
    stale = False
    try:
        for path, text in generate():
            if path.exists() and path.read_text(encoding="utf-8") == text:
                continue
            stale = True
            if not args.check:
                path.write_text(text, encoding="utf-8", newline="\n")
            print(f"{'stale' if args.check else 'written'}: {path.relative_to(HERE.parent)}")
    except Problem as problem:
        sys.exit(f"{parser.prog}: {problem}")
    if args.run:
        run(HERE / "walkthrough.ipynb")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
