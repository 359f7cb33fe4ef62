"""The recipes and pitfalls: pages in Markdown, each of which is also a patch on a script."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import dropwhile

from hunks import Diff, Problem, compare, cut_at

KINDS = ("recipes", "pitfalls")
NOT_PATCHES = ("README",)
LIMITS = {"recipes": 40, "pitfalls": 14}  # how many lines may change
GPT = "exercise/solution.py"
GPT_LIMIT = 95  # a model in parts is also fed, evaluated, saved and sampled otherwise
STANDALONE = "torchrun --standalone --nproc-per-node={}"
ONE_GPU = "With one GPU, train on the CPU: put `CUDA_VISIBLE_DEVICES=` before `{}`."
TOO_FEW_GPUS = ONE_GPU.replace("one GPU", "fewer than four GPUs")
BROKEN = "This writes the *broken* script, not the remedy."
BELOW = ("With one GPU", "With fewer than four GPUs", "This writes the *broken*")
BREAKS = "\n\nThe patch that breaks it:"
ROW = r"\]\((\w+)\.md\)"  # in a table of the README.md of a kind
PARTS = {  # of a page, in their order: what stands behind each
    "title": "\n\n",
    "opening": "\n\n```bash\n",  # of a recipe its purpose, of a pitfall the table of its symptoms
    "command": "\n```\n\n",
    "explanation": "\n\n```diff\n",
    "patch": "\n```\n\n",
    "advice": "\n\n<details>\n<summary>Tests that show it</summary>\n\n",
    "tests": "\n\n</details>\n\nRead more: ",
    "links": "",
}


@dataclass
class Patch:
    kind: str
    name: str
    title: str
    purpose: str  # of a recipe, in one sentence
    rows: list  # of the table of symptoms: [(symptom, cause, remedy)]
    command: str  # that writes the patched script and runs it, at the top of the repository
    why: str
    advice: str  # when not to use it, or how to notice it
    tests: list
    links: list  # [(title, address)]
    old: str  # the script it applies to, and the name of the patched one
    new: str
    diff: Diff
    text: str = ""  # the page, with what is generated in it brought up to date

    @property
    def slug(self):
        return f"{self.kind[:-1]}-{self.name.replace('_', '-')}"

    @property
    def path(self):
        """Of the page, from the top of the repository."""
        return f"{self.kind}/{self.name}.md"

    @property
    def index_rows(self):
        """Its rows in the README.md of its kind."""
        link = f"[{self.title}]({self.name}.md)"
        if self.kind == "recipes":
            return f"| {link} | {' '.join(self.purpose.split())} |\n"
        return "".join(f"| {seen} | {link} | {remedy} |\n" for seen, _, remedy in self.rows)

    @property
    def result(self):
        """The patched script."""
        return "\n".join([*self.diff.new_lines, ""])

    @property
    def launcher(self):
        """What runs the patched script."""
        if self.new.endswith(".sbatch"):
            return "sbatch"
        if self.old == GPT:
            return STANDALONE.format(4)
        return "python" if self.old[:2] in ("01", "02") else STANDALONE.format(2)

    @property
    def written_and_run(self):
        """The end of the command, which is the same on each page."""
        start = f"{self.launcher} {self.new}"
        if self.old == GPT:
            start += " 2"  # epochs
        elif self.launcher != "sbatch":
            start += f" --checkpoint-path {self.name}.pt"  # not to resume another run
        patch = folded(f"patch -o {self.new} {self.old} {self.path} &&", f" {self.path}", "    ")
        return f"{patch}\n{folded(f'    {start}', ' --checkpoint-path', '        ')}"

    @property
    def below(self):
        """What the page says below its command: what it writes, and what to type with fewer GPUs
        than the command's ranks."""
        name, *_ = self.launcher.split()
        said = TOO_FEW_GPUS if self.old == GPT else ONE_GPU
        lines = [BROKEN if self.kind == "pitfalls" else ""]
        lines += ["" if name == "sbatch" else said.format(name)]
        return [line for line in lines if line]


def folded(command, before, indent):
    """Return a command in two lines if it is wider than a forge's column."""
    if len(command) <= 95:
        return command
    return command.replace(before, f" \\\n{indent}{before.strip()}")


# ---------------------------------------------------------------- the pages


def readme(root, kind):
    return (root / kind / "README.md").read_text(encoding="utf-8")


def index(text, pages):
    """Return the README.md of a kind with the rows of its tables brought up to date."""
    rows = {page.name: page.index_rows for page in pages}

    def written(table):
        return "".join(rows[name] for name in dict.fromkeys(re.findall(ROW, table[0])))

    return re.sub(rf"(?:^\|.*{ROW}.*\n)+", written, text, flags=re.MULTILINE)


def collect(root, kind):
    """Return all pages of this kind, in the order of their README.md."""
    names = dict.fromkeys(re.findall(ROW, readme(root, kind)))
    pages, problems = [], []
    for path in sorted((root / kind).glob("*.md")):
        if path.stem not in [*names, *NOT_PATCHES]:
            problems.append(f"{kind}/{path.name}: in no table of {kind}/README.md")
    for name in names:
        try:
            pages.append(read(root, root / kind / f"{name}.md"))
        except Problem as problem:
            problems.append(str(problem))
    if problems:
        raise Problem("\n".join(problems))
    return pages


def read(root, path):
    """Return the patch on this page."""
    where = f"{path.parent.name}/{path.name}"
    if not path.exists():
        raise Problem(f"{where}: there is no such page")
    parts = cut_at(path.read_text(encoding="utf-8"), PARTS, where)
    old, new, *_ = (line[4:] for line in parts["patch"].splitlines())  # behind --- and +++
    if not (root / old).exists():
        raise Problem(f"{where}: there is no {old} to patch")
    result = patched(root / old, path)
    paragraphs = parts["explanation"].removesuffix(BREAKS).split("\n\n")
    table, _, advice = parts["advice"].rpartition("|\n\n")
    patch = Patch(
        kind=path.parent.name,
        name=path.stem,
        title=parts["title"].removeprefix("# "),
        purpose="" if parts["opening"].startswith("|") else parts["opening"],
        rows=[*cells(parts["opening"]), *cells(table)],
        command=parts["command"],
        why="\n\n".join(dropwhile(lambda each: each.startswith(BELOW), paragraphs)),
        advice=advice,
        tests=re.findall(r"`(test_[^`]+)`", parts["tests"]),
        links=re.findall(r"\[([^]]+)\]\((https://[^)]+)\)", parts["links"]),
        old=old,
        new=new,
        diff=compare(root / old, root / new, result, context=1),  # in short hunks
    )
    for problem in problems_of(patch):
        raise Problem(f"{where}: {problem}")
    breaks = BREAKS if parts["explanation"].endswith(BREAKS) else ""
    parts["explanation"] = "\n\n".join([*patch.below, patch.why]) + breaks
    hunks = [hunk.text for hunk in patch.diff.hunks]
    parts["patch"] = "\n".join([f"--- {old}", f"+++ {new}", *hunks])
    patch.text = "".join(parts[name] + mark for name, mark in PARTS.items())
    return patch


def cells(text):
    """Return the cells of the rows of a table in Markdown, without its heading."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [tuple(row.strip("| ").split(" | ")) for row in rows[2:]]


def problems_of(patch):
    """Yield what is missing, or too much."""
    limit = GPT_LIMIT if patch.old == GPT else LIMITS[patch.kind]
    changed = sum(len(hunk.changed) for hunk in patch.diff.hunks)
    if changed > limit:
        yield f"changes {changed} lines, {limit} are allowed"
    for name in ("tests", "links", "purpose" if patch.kind == "recipes" else "rows"):
        if not getattr(patch, name):
            yield f"has no {name}"
    if any(re.match("The same(,|$)", cell) for row in patch.rows for cell in row):
        yield "a row says 'The same', and the search shows it alone"
    if not patch.command.endswith(patch.written_and_run):
        yield f"its command does not end with {patch.written_and_run!r}"


def patched(script, page):
    """Return the text of a script to which this page is applied as a patch."""
    words = ["patch", "--fuzz=0", "--force", "--reject-file=-", "--output=-", script, page]
    place = tempfile.gettempdir()  # patch writes a file of its own there, for a moment
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=place)
    if result.returncode:
        said = " ".join(result.stderr.split())
        raise Problem(f"{page.parent.name}/{page.name}: no longer applies to {script.name}: {said}")
    return result.stdout
