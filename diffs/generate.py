"""Write the diffs, the walk-through, the page, the notebook and the exercise from their notes.

python diffs/generate.py [--check | --run]
"""

import argparse
import sys
from pathlib import Path

try:
    from hunks import Problem, compare, explained, parse, tie
    from notebook import notebook, run
    from page import page
    from patches import KINDS, patches, symptoms
except ModuleNotFoundError as error:
    sys.exit(f"generate.py: {error}: pip install -r requirements-dev.txt")

HERE = Path(__file__).resolve().parent
BEGIN = """\
# The diffs, hunk by hunk

<!-- Written by generate.py from the scripts and notes.md: edit those. -->

Each script of the ladder differs from the previous one by one lesson. This page goes through the
four diffs in order. Every change comes with the reason for it, the tests that fail without it, and
the place in the documentation where you can read more. To run one of these tests, type
`pytest --everything -k 'NAME'` at the top of the repository.

The same text, in two other forms:

- [`index.html`](index.html) shows both files side by side: download it and open it in a browser.
- [`walkthrough.ipynb`](walkthrough.ipynb) also runs each step: open it in this folder of a clone,
  with the packages of `requirements-dev.txt` installed and any editor for notebooks.

To look at a diff with your own tools, at the top of the repository:

```bash
diff --color -U0 02_multigpu_spawn.py 03_multigpu_torchrun.py
git diff --no-index --color-words 02_multigpu_spawn.py 03_multigpu_torchrun.py
vimdiff 02_multigpu_spawn.py 03_multigpu_torchrun.py
code --diff 02_multigpu_spawn.py 03_multigpu_torchrun.py
```
"""


def table(rows):
    """Return the table of symptoms, as Markdown."""
    lines = ["## Symptoms\n", "| what you see | cause | remedy | more |", "|---|---|---|---|"]
    for *row, patch in rows:
        page = "../recipes/README.md" if patch.kind == "recipes" else ""
        lines.append(f"| {' | '.join(row)} | [{patch.name}]({page}#{patch.slug}) |")
    return "\n".join([*lines, ""])


def contents(patches):
    """Return the list of the recipes, as Markdown."""
    return "".join(f"- [{patch.title}](#{patch.slug})\n" for patch in patches)


def collection(kind, collections):
    """Return the README.md of one kind of patches."""
    parts = [f"# {KINDS[kind].title}\n", "<!-- Written by generate.py: edit the patches. -->\n"]
    parts += [f"{KINDS[kind].story}\n[`index.html`](../index.html) shows all side by side.\n"]
    recipes = kind == "recipes"
    parts += [contents(collections[kind]) if recipes else table(symptoms(collections))]
    return "\n".join([*parts, *map(entry, collections[kind])])


def entry(patch):
    """Return a patch with its note and the command that runs it, as Markdown."""
    file = f"[`{patch.name}.diff`]({patch.name}.diff)"
    old = f"[`{patch.old}`](../../{patch.old})"
    heading = f'<a id="{patch.slug}"></a>\n\n## {patch.title}\n\nPatch: {file}, on {old}\n'
    command = f"```bash\n{patch.command}\n```\n"
    return "\n".join([heading, f"{patch.markdown}\n", command, f"```diff\n{patch.diff.text}```\n"])


def walkthrough(diffs):
    """Return README.md: each step's story, and its hunks with their notes."""
    parts = [BEGIN]
    for diff in diffs:
        slug = diff.slug.replace("-", "_")
        old, new = (f"[`{path.name}`](../{path.name})" for path in (diff.old, diff.new))
        files = f"From {old} to {new}, as a patch: [`{slug}.diff`]({slug}.diff)"
        parts += [f"## {diff.name}: {diff.title}\n", f"{files}\n", f"{diff.story}\n"]
        parts += [f"{hunk.markdown}\n" for hunk in diff.hunks]
    return "\n".join(parts)


def exercise(folder):
    """Return the exercise's README.md: the task, and the hunks of its solution with their notes."""
    text = (folder / "notes.md").read_text(encoding="utf-8")
    diff = compare(folder / "train.py", folder / "solution.py", context=1)  # in short hunks
    *_, (_, _, notes) = parse(text).values()
    tie(diff, notes)
    task, _, _ = text.partition("\n### ")
    title, _, task = task.partition("\n")
    source = "<!-- Written by diffs/generate.py from the scripts and notes.md: edit those. -->"
    return "\n".join([title, "", source, task, *(f"{hunk.markdown}\n" for hunk in diff.hunks)])


def generate(root=HERE.parent):
    """Return the content of each generated file: {path: text}."""
    diffs = explained(root)
    folder = root / "diffs"
    files = {folder / f"{diff.slug.replace('-', '_')}.diff": diff.text for diff in diffs}
    files[folder / "README.md"] = walkthrough(diffs)
    collections = {kind: patches(root, kind) for kind in KINDS}
    for kind, members in collections.items():
        files |= {folder / patch.path: patch.text for patch in members}
        files[folder / kind / "README.md"] = collection(kind, collections)
    files[root / "exercise" / "README.md"] = exercise(root / "exercise")
    files[folder / "index.html"] = page(root, diffs, collections)
    path = folder / "walkthrough.ipynb"
    files[path] = notebook(path, diffs)
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="only name the files that are stale")
    either.add_argument("--run", action="store_true", help="run the notebook and store its outputs")
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
