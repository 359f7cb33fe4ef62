"""Write the generated files: diffs, walk-through, page, notebook, exercise, indexes, table rows.

python diffs/generate.py [--check | --run]
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "generator"))

try:
    from holds import pictures
    from hunks import Problem, compare, explained, parse, tie
    from notebook import run, write_book
    from page import PLACES, render
    from patches import KINDS, collect

    from lookup import sections, weave
except ModuleNotFoundError as error:
    sys.exit(f"generate.py: {error}: pip install -r diffs/requirements.txt")

WRITTEN = "Written by diffs/generate.py from the scripts: edit those."
BEGIN = """\
# The diffs, hunk by hunk

<!-- Written by diffs/generate.py from the scripts and notes.md: edit those. -->

Each script of the ladder differs from the previous one by one lesson. This page goes through the
four diffs in order: first the lines that carry the lesson, then every change with the reason for it
and the place in the documentation where you can read more.

The same text in two other forms:

- `index.html` shows them in colour, with figures to play with, all recipes and pitfalls, and a
  search: in your clone, open `diffs/index.html` in a browser.
- [`walkthrough.ipynb`](walkthrough.ipynb) also runs each step, in Jupyter or on a notebook service,
  with or without GPUs: download this one file and open it there.

To see a diff in your own tools, type one of these at the top of the repository:

```bash
diff --color -U0 02_multigpu_spawn.py 03_multigpu_torchrun.py
git diff --no-index --color-words 02_multigpu_spawn.py 03_multigpu_torchrun.py
vimdiff 02_multigpu_spawn.py 03_multigpu_torchrun.py
code --diff 02_multigpu_spawn.py 03_multigpu_torchrun.py
```
"""
BESIDE = """\
Does your model outgrow DDP? [Which one](../lookup/which.md) says how to split it, by its size and
your GPUs. Three more pages are no patches: [everyday questions](../lookup/questions.md) has short
answers on batch sizes, seeds, loader workers, metrics, inference, debuggers, profiles, sweeps,
large data, CI, …; [frameworks](../lookup/frameworks.md) maps step 5 to Accelerate, Lightning
Fabric, the Hugging Face Trainer and DeepSpeed; [without Slurm](../without_slurm/README.md) is about
ssh, Docker, Kubernetes, Kubeflow, SageMaker, Azure, Vertex AI, cloud machines and notebooks."""
TESTS = """\
## The tests

{}
To run one of them, type `pytest -m "" -k "NAME" {}` at the top of the repository.
"""


def index(kind, collections):
    """Return the README.md of one kind of pages: a line for each, in groups."""
    row = {"recipes": recipe_row, "pitfalls": pitfall_row}[kind]
    head = {
        "recipes": "| recipe | what it is for |\n|---|---|",
        "pitfalls": "| what you see | pitfall | what to do |\n|---|---|---|",
    }[kind]
    source = f"<!-- Written by diffs/generate.py: edit {kind}/*.md. -->"
    more = f"In your clone, `diffs/index.html` shows the {kind} in a browser"
    more += ", with a search for what you see on your screen."
    parts = [f"# {KINDS[kind].title}\n\n{source}\n\n{KINDS[kind].story}\n{more}\n"]
    if kind == "recipes":
        parts += [f"{BESIDE}\n"]
    pages = {patch.name: patch for patch in collections[kind]}
    for group, names in KINDS[kind].groups.items():
        parts += [f"## {group}\n\n{head}", *(row(pages[name]) for name in names), ""]
    said = {
        "recipes": "Each page names the tests that show what it says.",
        "pitfalls": "Each page names the tests that show the symptom in the broken script only.",
    }[kind]
    return "\n".join([*parts, TESTS.format(said, kind)])


def recipe_row(patch):
    return f"| [{patch.title}]({patch.name}.md) | {' '.join(patch.purpose.split())} |"


def pitfall_row(patch):
    return "\n".join(
        f"| {seen} | [{patch.title}]({patch.name}.md) | {remedy} |"
        for seen, _, remedy in patch.rows
    )


def walkthrough(diffs):
    """Return README.md: each step in a few lines, its story, and its hunks with their notes."""
    parts = [BEGIN]
    for diff in diffs:
        slug = diff.slug.replace("-", "_")
        old, new = (f"[`{path.name}`](../{path.name})" for path in (diff.old, diff.new))
        files = f"From {old} to {new}, as a patch: [`{slug}.diff`]({slug}.diff)"
        lesson = diff.short(lambda note: note.slug)
        parts += [f"## {diff.name}: {diff.title}\n", f"{files}\n"]
        parts += [f"{lesson}\n", f"{diff.story}\n", *play(diff.slug)]
        for part in diff.told:
            parts += [f"{part.markdown}\n", *play(f"{diff.slug}-{part.slug}")]
    said = "Each change names the tests that fail if you revert it alone."
    return "\n".join([*parts, TESTS.format(said, "tests slurm")])


def play(place):
    """Return a link to the figure that stands here on the page, if there is one."""
    for name in PLACES.get(place, []):
        yield f"Play with it: in your clone, open `diffs/index.html#fig-{name}` in a browser.\n"


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
    """Yield the path and the text of each generated file, those of the diffs first."""
    diffs = explained(root)
    folder = root / "diffs"
    for diff in diffs:
        yield folder / f"{diff.slug.replace('-', '_')}.diff", f"{WRITTEN}\n{diff.text}"
    yield folder / "README.md", walkthrough(diffs)
    yield from pictures(folder / "pictures").items()
    book = folder / "walkthrough.ipynb"
    yield book, write_book(book, diffs)
    yield root / "exercise" / "README.md", exercise(root / "exercise")
    collections = {kind: collect(root, kind) for kind in KINDS}
    for kind, members in collections.items():
        yield from ((root / patch.path, patch.text) for patch in members)
        yield root / kind / "README.md", index(kind, collections)
    messages = weave(root, collections)
    yield from messages.items()
    page = render(root, diffs, collections, messages, sections(root))
    yield folder / "index.html", page


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
