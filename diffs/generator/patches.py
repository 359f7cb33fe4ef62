"""The recipes and pitfalls: pages in Markdown, each of which is also a patch on a script."""

import re
from dataclasses import dataclass

from hunks import Diff, Problem, compare

NOT_PATCHES = ("README",)


@dataclass
class Kind:
    title: str
    story: str
    limit: int  # how many lines may change
    groups: dict  # {heading: names of the pages, in the order of the index}


KINDS = {
    "recipes": Kind(
        "Recipes: what to do next",
        """\
Each recipe adds one feature (bf16, FSDP2, …) to one of the five scripts, or splits the exercise's
GPT over several ranks. The page is also the patch: type its command at the top of the repository
to write the patched script to a new file and run it. The new file is standalone, so you can copy
it as it is. For a script of your own, copy the lines with `+` by hand.""",
        40,
        {
            "Large models and batches": [
                "fsdp2",
                "sharded_checkpoint",
                "async_checkpoint",
                "accumulation",
                "activation_checkpointing",
            ],
            "Beyond data parallel: a GPT on four ranks": [
                "zero_optimizer",
                "fsdp2_gpt",
                "hybrid_sharding",
                "tensor_parallel",
                "two_dimensional",
                "pipeline",
                "local_sgd",
            ],
            "Precision and speed": [
                "bf16",
                "fp16_scaler",
                "compile",
                "compressed_gradients",
                "profiler",
            ],
            "Data loading": [
                "loader_workers",
                "stateful_loader",
                "streaming",
                "weighted_sampler",
                "uneven_inputs",
                "prepare_once",
            ],
            "Training": [
                "learning_rate",
                "sync_batchnorm",
                "randomness",
                "bitwise_resume",
                "ema",
                "early_stopping",
                "sweep",
            ],
            "Machines": ["any_accelerator", "unequal_gpus"],
            "Contrastive learning, GANs, fine-tuning, export": [
                "contrastive",
                "gan",
                "huggingface",
                "frozen_layers",
                "export",
            ],
            "Logging and metrics": [
                "log_tensorboard",
                "log_wandb",
                "log_mlflow",
                "progress",
                "eval_torchmetrics",
            ],
        },
    ),
    "pitfalls": Kind(
        "Pitfalls: what goes wrong, often without an error",
        """\
Each pitfall breaks one of the five scripts, or a batch file, with a small patch. Most of the broken
scripts still train without an error. The page is the patch: type its command at the
top of the repository to write the broken script to a new file and run it. Tests show the symptom in
the broken script, and not in ours.""",
        14,
        {
            "The job does not start, or starts as several jobs": [
                "fixed_port",
                "without_srun",
                "standalone_on_each_node",
                "localhost_fallback",
                "global_rank_as_device",
            ],
            "A rank hangs or fails": [
                "collective_on_one_rank",
                "rank_0_evaluates_the_wrapper",
                "uneven_batches",
                "unused_parameters",
                "find_unused_without_need",
                "no_record",
                "old_store",
            ],
            "Ranks train on the wrong samples": [
                "no_sampler",
                "shuffle_beside_sampler",
                "rank_seeds_split_data",
                "no_set_epoch",
                "late_set_epoch",
                "persistent_workers",
                "split_differs_by_rank",
                "same_augmentation",
            ],
            "Training gives a worse model, or takes longer": [
                "forward_through_module",
                "edit_on_one_rank",
                "optimizer_of_other_parameters",
                "learning_rate_for_a_larger_batch",
                "accumulation_undivided",
                "accumulation_without_no_sync",
                "eval_never_undone",
            ],
            "The printed numbers are wrong": [
                "prints_on_every_rank",
                "rank_0_loss",
                "padded_evaluation",
                "mean_of_means",
                "batchnorm_of_rank_0",
            ],
            "Checkpoints and resuming": [
                "every_rank_saves",
                "missing_barrier",
                "written_in_place",
                "module_prefix_saved",
                "module_regex",
                "weights_only_false",
                "resume_without_optimizer",
                "lr_overruled",
                "epoch_starts_again",
                "sigterm_with_workers",
            ],
            "The process does not end cleanly": [
                "destroy_missing",
                "late_import",
                "handler_holds_model",
                "os_exit",
            ],
        },
    ),
}
STANDALONE = "torchrun --standalone --nproc-per-node={}"
GPT = "exercise/solution.py"
GPT_LIMIT = 95  # a model in parts is also fed, evaluated, saved and sampled otherwise
ONE_GPU = "With only one GPU, train on the CPU: put `CUDA_VISIBLE_DEVICES=` before `{}`."
BROKEN = "This writes the *broken* script, not the remedy."
TOO_FEW_GPUS = ONE_GPU.replace("only one GPU", "fewer than four GPUs")
TABLE = r"\| What you see \| Why \| What to do \|\n\|---\|---\|---\|\n(?P<{}>(?:\|.+\n)+)\n"
FORM = re.compile(
    r"# (?P<title>.+)\n\n"
    rf"(?:(?P<purpose>(?:[^|\n].*\n)+)\n|{TABLE.format('seen')})"
    r"```bash\n(?P<command>(?s:.+?))\n```\n\n"
    r"(?:This writes the \*broken\* script, .+\n\n)?"  # both written by up_to_date
    r"(?:With (?:only one GPU|fewer than four GPUs), .+\n\n)?"
    r"(?P<why>(?s:.+?))\n\n(?:The patch that breaks it:\n\n)?"
    r"```diff\n--- (?P<old>.+)\n\+\+\+ (?P<new>.+)\n(?P<hunks>@@(?s:.+?))\n```\n\n"
    rf"(?:{TABLE.format('messages')})?"
    r"(?P<advice>\*\*(?:When not|Notice it)\.\*\* (?s:.+?))\n\n"
    r"<details>\n<summary>Tests that show it</summary>\n\n(?P<tests>.+)\n\n</details>\n\n"
    r"Read more: (?P<links>.+)\n"
)


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
    text: str  # the page, with what is generated in it brought up to date

    @property
    def slug(self):
        return f"{self.kind[:-1]}-{self.name.replace('_', '-')}"

    @property
    def path(self):
        """The page, relative to the top of the repository."""
        return f"{self.kind}/{self.name}.md"

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
    def one_gpu(self):
        """What to type with fewer GPUs than the command's two ranks, or four."""
        name, *_ = self.launcher.split()
        said = TOO_FEW_GPUS if self.old == GPT else ONE_GPU
        return "" if name == "sbatch" else said.format(name)

    @property
    def below(self):
        """What the page says below its command, line by line."""
        broken = BROKEN if self.kind == "pitfalls" else ""
        return [line for line in (broken, self.one_gpu) if line]

    @property
    def changed(self):
        return sum(len(hunk.changed) for hunk in self.diff.hunks)


def folded(command, before, indent):
    """Return a command in two lines if it is wider than a forge's column."""
    if len(command) <= 95:
        return command
    return command.replace(before, f" \\\n{indent}{before.strip()}")


def collect(root, kind):
    """Return all pages of this kind, in the order of the index."""
    named = [name for names in KINDS[kind].groups.values() for name in names]
    for path in sorted((root / kind).glob("*.md")):
        if path.stem not in [*named, *NOT_PATCHES]:
            raise Problem(f"{kind}/{path.name}: in no group of diffs/generator/patches.py")
    pages, problems = [], []
    for name in named:
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
    text = path.read_text(encoding="utf-8")
    match = FORM.fullmatch(text)
    if not match:
        raise Problem(f"{where}: not in the form of the others, which FORM in patches.py describes")
    old, new = root / match["old"], root / match["new"]
    if not old.exists():
        raise Problem(f"{where}: there is no {match['old']} to patch")
    try:
        result = apply(old.read_text(encoding="utf-8").splitlines(), match["hunks"].splitlines())
    except LookupError as error:
        raise Problem(f"{where}: no longer applies to {old.name}: {error}") from error
    diff = compare(old, new, "\n".join([*result, ""]), context=1)  # in short hunks
    patch = Patch(
        kind=path.parent.name,
        name=path.stem,
        title=match["title"],
        purpose=(match["purpose"] or "").strip(),
        rows=cells(match["seen"] or match["messages"] or ""),
        command=match["command"],
        why=match["why"],
        advice=match["advice"],
        tests=re.findall(r"`(test_[^`]+)`", match["tests"]),
        links=re.findall(r"\[([^]]+)\]\((https://[^)]+)\)", match["links"]),
        old=match["old"],
        new=match["new"],
        diff=diff,
        text=text,
    )
    check(patch, where)
    patch.text = up_to_date(patch, match)
    return patch


def up_to_date(patch, match):
    """Return the page with the line numbers of its script, and what it says below its command."""
    hunks = "\n".join(hunk.text for hunk in patch.diff.hunks)
    parts = [patch.text[: match.end("command")], "\n```\n\n"]
    parts += [f"{line}\n\n" for line in patch.below]
    parts += [patch.text[match.start("why") : match.start("hunks")], hunks]
    return "".join([*parts, patch.text[match.end("hunks") :]])


def cells(rows):
    """Return the cells of the rows of a table in Markdown."""
    return [tuple(row.strip("| ").split(" | ")) for row in rows.splitlines()]


def check(patch, where):
    """Raise Problem if something is missing, or too much."""
    limit = GPT_LIMIT if patch.old == GPT else KINDS[patch.kind].limit
    if patch.changed > limit:
        raise Problem(f"{where}: changes {patch.changed} lines, {limit} are allowed")
    if not patch.tests or not patch.links:
        raise Problem(f"{where}: names no {'links' if patch.tests else 'tests'}")
    missing = {"recipes": "purpose", "pitfalls": "rows"}[patch.kind]
    if not getattr(patch, missing):
        what = {"purpose": "does not begin with its purpose", "rows": "has no symptom"}[missing]
        raise Problem(f"{where}: {what}")
    if not patch.command.endswith(patch.written_and_run):
        raise Problem(f"{where}: its command does not end with {patch.written_and_run!r}")


def apply(lines, hunks):
    """Return the lines with the hunks applied, each where its old lines are found.

    If a hunk fits in several places, the one nearest to its line number is taken. If it fits
    nowhere, the LookupError names it.
    """
    result, done = [], 0
    for header, body in split(hunks):
        before = [line[1:] for line in body if line[:1] != "+"]
        after = [line[1:] for line in body if line[:1] != "-"]
        fits = [
            start
            for start in range(done, len(lines) - len(before) + 1)
            if lines[start : start + len(before)] == before
        ]
        if not fits:
            raise LookupError(header)
        number = int(re.search(r"\d+", header)[0]) - 1
        start = min(fits, key=lambda start: abs(start - number))
        result += [*lines[done:start], *after]
        done = start + len(before)
    return [*result, *lines[done:]]


def split(lines):
    """Split the lines of a diff into its hunks: [(header, lines)]."""
    found = []
    for line in lines:
        if line.startswith("@@"):
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found
