"""The rules by which check.py judges a run."""

import functools
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

LIBRARY = re.compile(r"/lib(64)?/python3|/site-packages/|^<|/tests/observer/")
PITFALLS = "diffs/pitfalls/README.md"
PASS, FAIL, UNSEEN, NONE = "pass", "FAIL", "not seen", "not applicable"


@dataclass
class Verdict:
    status: str
    text: str
    where: str = ""
    pitfall: str = ""


RULES = []  # functions that return the verdict on a run


def rule(function):
    """Make a rule of a generator: the first verdict that it yields counts."""

    @functools.wraps(function)
    def judge(run):
        return next(function(run))

    RULES.append(judge)
    return judge


def differ(values):
    """Return the first two ranks whose values differ, or None."""
    (first, one), *others = values.items()
    return next(((first, rank) for rank, value in others if value != one), None)


def passes(run):
    """Return the passes over data of each rank, with their batches and the number of steps."""
    found = {}
    for rank, events in run.ranks.items():
        found[rank] = []
        for event in events:
            if event["kind"] == "pass":
                found[rank].append(
                    {**event, "batches": [], "steps": 0, "drawn": [], "ended": False}
                )
            elif event["kind"] in ("batch", "end"):
                of = next(p for p in found[rank] if p["number"] == event["number"])
                if event["kind"] == "end":
                    of["ended"] = True
                else:
                    of["batches"].append(event["indices"])
            elif event["kind"] == "step" and found[rank]:
                open_passes = [p for p in found[rank] if p["batches"] and not p["ended"]]
                (open_passes or found[rank])[-1]["steps"] += 1
                (open_passes or found[rank])[-1]["drawn"].append(event["random"])
    return found


def trained(run):
    """Return for each epoch the pass of each rank: [{rank: pass}]."""
    columns = [[p for p in of if p["steps"]] for of in passes(run).values()]
    return [dict(zip(run.ranks, epoch)) for epoch in zip(*columns)]


def samples(one):
    """Return the indices of the samples of a pass, or None if they are not known."""
    if any(batch is None for batch in one["batches"]):
        return None
    return [index for batch in one["batches"] for index in batch]


@rule
def it_ends(run):
    """the script ends"""
    if run.returncode == 0:
        yield Verdict(PASS, f"after {run.seconds:.0f} s")
    if run.returncode is None:
        yield Verdict(
            FAIL,
            f"still running after {run.seconds:.0f} s; {waiting(run)}",
            "",
            "collective-on-one-rank",
        )
    errors = re.findall(
        r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception)|[\w.-]+\.py: error): .+)$",
        run.output,
        re.M,
    )
    last = errors[0] if errors else (run.output.strip().splitlines() or ["it printed nothing"])[-1]
    yield Verdict(FAIL, f"exit code {run.returncode}: {last}")


def waiting(run):
    """Return where each rank was when the time was over."""
    lines = []
    for rank, stack in run.stacks.items():
        own = [(path, line) for path, line, _ in stack if not LIBRARY.search(path)]
        inside = stack[0][2] if stack else "?"
        at = f"{Path(own[0][0]).name}:{own[0][1]}" if own else "?"
        lines.append(f"rank {rank} is at {at}, in {inside}")
    return "; ".join(lines) or "no rank has joined a process group"


@rule
def one_group(run):
    """one process group, destroyed at the end"""
    if not run.ranks:
        yield Verdict(FAIL, "no process joined a process group: each trains on its own")
    for rank, events in run.of("init").items():
        if len(events) > 1:
            yield Verdict(FAIL, f"rank {rank} joined {len(events)} times", events[1]["where"])
    for event in run.all("init"):
        if not run.torchrun and event["port"] and event["port"] in run.text:
            text = f"the port is always {event['port']}: two jobs on one node would collide"
            yield Verdict(FAIL, text, event["where"], "fixed-port")
    if run.returncode != 0:
        yield Verdict(UNSEEN, "the script did not come to its end")
    for rank, events in run.of("exit").items():
        if not events:
            text = f"rank {rank} leaves by os._exit: atexit functions are not called"
            yield Verdict(FAIL, text, "", "os-exit")
        if events[0]["open_group"]:
            yield Verdict(
                FAIL, f"rank {rank} did not call destroy_process_group", "", "destroy-missing"
            )
        if events[0]["threads"]:
            text = f"rank {rank} exits with threads of gloo: something still holds the group"
            yield Verdict(FAIL, text, "", "handler-holds-model")
    yield Verdict(PASS, f"{len(run.ranks)} ranks", run.of("init")[0][0]["where"])


@rule
def the_same_model(run):
    """all ranks wrap the same model, and end with the same weights"""
    wraps, steps = run.of("wrap"), run.all("step")
    if any(step["sharded"] for step in steps):
        yield Verdict(NONE, "the parameters are sharded")
    if not any(wraps.values()):
        text = "no model is wrapped in DistributedDataParallel: each rank trains its own"
        yield Verdict(FAIL if steps else UNSEEN, text if steps else "nothing was trained")
    for what, key in (("parameters", "shapes"), ("weights", "weights")):
        if pair := differ({rank: [w[key] for w in of] for rank, of in wraps.items()}):
            text = f"after DDP(...), the {what} of rank {pair[0]} and {pair[1]} differ"
            yield Verdict(FAIL, text, wraps[pair[0]][0]["where"])
    foreign = next((step for step in steps if step["foreign"]), None)
    if foreign:
        text = f"the optimizer changes {foreign['foreign']} parameters that are in no wrapped model"
        yield Verdict(FAIL, text, foreign["where"], "optimizer-of-other-parameters")
    final = run.of("final")
    if not all(final.values()):
        yield Verdict(UNSEEN, "the run did not come to its end")
    if pair := differ({rank: [f["weights"] for f in of] for rank, of in final.items()}):
        text = f"at the end, the weights of rank {pair[0]} and {pair[1]} differ"
        yield Verdict(FAIL, text, steps[-1]["where"] if steps else "", "edit-on-one-rank")
    yield Verdict(PASS, "bit for bit", wraps[0][0]["where"])


@rule
def shards(run):
    """in each epoch, the ranks share out the data"""
    epochs = trained(run)
    if not epochs:
        yield Verdict(UNSEEN, "no DataLoader was used to train")
    if epochs[0][0]["iterable"]:
        yield Verdict(UNSEEN, "an iterable data set gives its samples no index")
    for number, epoch in enumerate(epochs, 1):
        seen = {rank: samples(one) for rank, one in epoch.items()}
        where, total = epoch[0]["where"], epoch[0]["samples"]
        if None in seen.values():
            yield Verdict(UNSEEN, "the sampler gives no integer index")
        if differ({rank: one["data"] for rank, one in epoch.items()}):
            text = "the data sets of the ranks differ: the same index means different samples"
            yield Verdict(FAIL, text, where, "split-differs-by-rank")
        if any(max(Counter(of).values(), default=1) > 1 for of in seen.values()):
            yield Verdict(UNSEEN, "a rank draws samples with replacement")
        counts = Counter(index for of in seen.values() for index in of)
        twice = counts.total() - len(counts)
        if len(seen) > 1 and differ({rank: set(of) for rank, of in seen.items()}) is None:
            text = f"epoch {number}: each rank trains on the same {len(seen[0])} samples"
            yield Verdict(FAIL, text, where, "no-sampler")
        if twice >= len(seen):  # the sampler pads with at most one sample per rank
            text = f"epoch {number}: {twice} samples are seen by several ranks"
            yield Verdict(FAIL, text, where, "rank-seeds-split-data")
        short = total - len(counts)
        whole = all(one["ended"] for one in epoch.values())
        if whole and short >= len(seen) * max(map(len, epoch[0]["batches"])):
            text = f"epoch {number}: {short} of {total} samples are never seen"
            yield Verdict(FAIL, text, where, "rank-seeds-split-data")
    yield Verdict(PASS, f"{len(epochs)} epochs of {total} samples", where)


@rule
def new_order(run):
    """the order changes from epoch to epoch"""
    orders = [samples(epoch[0]) for epoch in trained(run)]
    if len(orders) < 2:
        yield Verdict(UNSEEN, "fewer than two epochs: ask the script for more")
    if None in orders or not orders[0]:
        yield Verdict(UNSEEN, "the samples have no index")
    where = trained(run)[0][0]["where"]
    for number, (one, next_one) in enumerate(pairwise(orders), 1):
        if one == next_one:
            text = f"epochs {number} and {number + 1} have the same order"
            yield Verdict(FAIL, text, where, "no-set-epoch")
    yield Verdict(PASS, f"{len(orders)} orders", where)


@rule
def gradients(run):
    """each step takes the mean gradient of all ranks"""
    steps = run.of("step")
    if not any(steps.values()):
        yield Verdict(UNSEEN, "no optimizer took a step")
    if any(step["sharded"] for step in steps[0]):
        yield Verdict(NONE, "the gradients are sharded")
    counts = {rank: len(of) for rank, of in steps.items()}
    for number, row in enumerate(zip(*steps.values()), 1):
        if all(step["zero"] for step in row):
            yield Verdict(FAIL, f"step {number}: all gradients are zero", row[0]["where"])
        if len({step["gradients"] for step in row}) > 1:
            bypass = next(iter(run.all("bypass")), None)
            text = f"step {number}: the gradients differ from rank to rank"
            if bypass:
                text += f"; the model is called without its wrapper at {bypass['where']}"
            elif row[0]["synced"] and not row[0]["synced"][-1]:
                text += "; the last backward() was under no_sync"
            yield Verdict(FAIL, text, row[0]["where"], "forward-through-module")
    for number, step in enumerate(steps[0], 1):
        if sum(step["synced"]) > 1:
            text = f"step {number}: {sum(step['synced'])} batches all-reduce their gradients"
            yield Verdict(FAIL, text, step["where"], "accumulation-without-no-sync")
    if pair := differ(counts):
        text = " and ".join(f"rank {rank} takes {counts[rank]}" for rank in pair)
        yield Verdict(FAIL, f"{text} steps", steps[0][0]["where"], "uneven-batches")
    yield Verdict(PASS, f"{counts[0]} steps", steps[0][0]["where"])


@rule
def training_mode(run):
    """the model is in training mode in each step"""
    steps = run.of("step")
    if not any(steps.values()):
        yield Verdict(UNSEEN, "no optimizer took a step")
    for number, step in enumerate(steps[0], 1):
        if not step["training"]:
            text = f"step {number} is taken in evaluation mode"
            yield Verdict(FAIL, text, step["where"], "eval-never-undone")
    yield Verdict(PASS, f"{len(steps[0])} steps", steps[0][0]["where"])


@rule
def randomness(run):
    """ranks draw different random numbers in training"""
    steps = run.of("step")
    for epoch in trained(run):
        numbers = {rank: of["drawn"] for rank, of in epoch.items()}
        if any(len(set(drawn)) > 1 for drawn in numbers.values()):
            where = steps[0][0]["where"]
            if differ(numbers):
                yield Verdict(PASS, "dropout or augmentation differs from rank to rank", where)
            text = "all ranks have the same dropout or augmentation"
            yield Verdict(FAIL, text, where, "same-augmentation")
    yield Verdict(UNSEEN, "the training process draws none between two steps")


@rule
def progress(run):
    """one rank prints the progress"""
    lines = {
        rank: [(re.sub(r"[\d.,]+", "#", event["text"]), event["where"]) for event in events]
        for rank, events in run.of("print").items()
    }
    if not any(lines.values()):
        yield Verdict(UNSEEN, "nothing is printed")
    for rank, of in lines.items():
        both = set(of) & set(lines[0]) if rank else ()
        if both:
            text, where = sorted(both)[0]
            yield Verdict(FAIL, f'ranks 0 and {rank} print "{text}"', where, "prints-on-every-rank")
    yield Verdict(PASS, f"{sum(map(len, lines.values()))} lines")


@rule
def files(run):
    """one rank writes each file, whole or not at all"""
    writers, saved, renamed = {}, {}, set()
    for rank, events in run.of("open", "save", "rename").items():
        for event in events:
            if event["kind"] == "rename":
                renamed.add(event["source"])
            if event["path"]:
                writers.setdefault(event["path"], {})[rank] = event["where"]
            if event["kind"] == "save" and event["path"]:
                saved[event["path"]] = event["where"]
    if not writers:
        yield Verdict(UNSEEN, "no file is written")
    for path, ranks in writers.items():
        if len(ranks) > 1:
            text = f"ranks {', '.join(map(str, ranks))} write {Path(path).name}"
            yield Verdict(FAIL, text, next(iter(ranks.values())), "every-rank-saves")
    for path, where in saved.items():
        if path not in renamed:
            text = f"{Path(path).name} is written in place: a crash during the save destroys it"
            yield Verdict(FAIL, text, where, "written-in-place")
    yield Verdict(PASS, f"{len(writers)} files", next(iter(saved.values()), ""))


@rule
def keys(run):
    """saved names do not begin with module."""
    saves = run.all("save")
    if not saves:
        yield Verdict(UNSEEN, "nothing is saved with torch.save")
    own = {name for wrap in run.all("wrap") for name, _ in wrap["shapes"]}
    for event in saves:
        bad = [key for key in event["keys"] if key not in own]
        if bad:
            yield Verdict(FAIL, f"a key is {bad[0]}", event["where"], "module-prefix-saved")
    yield Verdict(PASS, f"{len(saves)} saves", saves[0]["where"])


@rule
def loads(run):
    """checkpoints are loaded with weights_only=True"""
    events = run.all("load")
    if not events:
        yield Verdict(UNSEEN, "nothing is loaded: run it again with a checkpoint (--drill kill)")
    for event in events:
        if not event["weights_only"]:
            text = "a file from elsewhere could run code"
            yield Verdict(FAIL, text, event["where"], "weights-only-false")
    yield Verdict(PASS, f"{len(events)} loads", events[0]["where"])


@rule
def evaluation(run):
    """the evaluation sees each sample once"""
    looked = {}  # samples in the data set -> the passes without a step, by rank
    for rank, of in passes(run).items():
        for one in of:
            if one["ended"] and not one["steps"] and one["samples"]:
                looked.setdefault((one["samples"], one["where"]), {}).setdefault(rank, []).append(
                    one
                )
    if not looked:
        yield Verdict(UNSEEN, "no data set was gone through without training")
    for (total, where), ranks in looked.items():
        for row in zip(*ranks.values()):
            seen = [samples(one) for one in row]
            if None in seen:
                yield Verdict(UNSEEN, "the samples have no index", where)
            if len({tuple(one["buffers"]) for one in row}) > 1:
                text = "the ranks evaluate with different buffers, such as BatchNorm's statistics"
                yield Verdict(FAIL, text, where, "batchnorm-of-rank-0")
            if all(sorted(of) == list(range(total)) for of in seen):
                continue  # each of these ranks evaluates all
            counts = Counter(index for of in seen for index in of)
            if counts.total() != total or len(counts) != total:
                text = (
                    f"it counts {counts.total()} samples, of which {len(counts)} differ, of {total}"
                )
                yield Verdict(FAIL, text, where, "padded-evaluation")
            if row[0]["sampler"] == "DistributedSampler":
                text = f"{total} samples divide by {len(row)}, else DistributedSampler would pad"
                yield Verdict(UNSEEN, text, where, "padded-evaluation")
    yield Verdict(PASS, f"{total} samples", where)


@rule
def collectives(run):
    """all ranks call the same collectives in the same order"""
    calls = {
        rank: [(event["name"], event["where"], tuple(event["shapes"])) for event in events]
        for rank, events in run.of("collective").items()
    }
    if not any(calls.values()):
        yield Verdict(UNSEEN, "the script itself calls none")
    together = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(together, 1):
        named = {rank: call and call[0] for rank, call in zip(calls, row)}
        if pair := differ(named):
            said = [
                f"rank {r} calls {row[list(calls).index(r)][:2] if named[r] else 'none'}"
                for r in pair
            ]
            text = f"call {number}: {' and '.join(said)}"
            where = next(call[1] for call in row if call)
            yield Verdict(FAIL, text, where, "collective-on-one-rank")
    yield Verdict(PASS, f"{len(calls[0])} calls")


@rule
def warnings(run):
    """DDP has nothing to complain about"""
    if "find_unused_parameters=True was specified" in run.output:
        text = "find_unused_parameters=True costs time, and every parameter is used"
        yield Verdict(FAIL, text, run.all("wrap")[0]["where"], "find-unused-without-need")
    yield Verdict(PASS, "no warning")


@rule
def printed_loss(run):
    """what is printed was summed over all ranks"""
    events = run.ranks.get(0, [])
    shown = [number for number, event in enumerate(events) if event["kind"] == "print"]
    ended = [number for number, event in enumerate(events) if event["kind"] == "step"]
    for number in shown:
        since = max((n for n in ended if n < number), default=number)
        if any(event["kind"] == "collective" for event in events[since:number]):
            continue
        if since != number:
            text = "no collective before it: is the loss that of rank 0 alone?"
            yield Verdict(UNSEEN, text, events[number]["where"], "rank-0-loss")
    yield Verdict(
        PASS if shown else UNSEEN, "after a collective" if shown else "nothing is printed"
    )


@rule
def beyond(run):
    """what only a reader can see"""
    text = "that losses are divided rightly, sums weighted, files awaited, the learning rate scaled"
    yield Verdict(UNSEEN, f"{text}, and what happens on several nodes: see {PITFALLS}")
