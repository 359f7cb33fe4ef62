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


BROKEN = "the checker does not understand this run"
RULES = []  # functions that return the verdict on a run


def rule(function):
    """Make a rule of a generator: the first verdict that it yields counts."""

    @functools.wraps(function)
    def judge(run):
        try:
            return next(function(run))
        except Exception as error:  # a report that lacks a line is better than none
            return Verdict(UNSEEN, f"{BROKEN}: {error!r}")

    RULES.append(judge)
    return judge


def differ(values):
    """Return the first two ranks whose values differ, or None."""
    (first, one), *others = values.items()
    return next(((first, rank) for rank, value in others if value != one), None)


def several(number, noun):
    """Return a number of things in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first(values):
    """Return the value of the lowest rank."""
    return next(iter(values.values()), [])


def passes(run):
    """Return the passes over data of each rank, with their batches and steps."""
    found = {}
    for rank, events in run.ranks.items():
        of, fed = {}, []  # those that have given a batch since the last step, the latest last
        for event in events:
            if event["kind"] == "pass":
                of[event["number"]] = {
                    **event,
                    "batches": [],
                    "steps": [],
                    "more": 0,
                    "ended": False,
                }
            elif event.get("number", 0) not in {0, *of}:
                continue
            elif event["kind"] == "batch":
                one = of[event["number"]]
                one["batches"].append(event)
                fed = [other for other in fed if other is not one] + [one]
            elif event["kind"] == "end":
                of[event["number"]]["ended"] = True
            elif event["kind"] == "step" and of:
                fed = [one for one in fed if not one["ended"]] or fed
                (fed[-1] if fed else latest(of))["steps"].append(event)
                for one in fed[:-1]:
                    one["more"] += 1
                fed = []
        found[rank] = list(of.values())
    return found


def latest(of):
    """Return the pass that was stepped with last: it may have fetched its batches ahead."""
    return next((one for one in reversed(of.values()) if one["steps"]), list(of.values())[-1])


def is_training(one):
    """Return whether the batches of this pass were trained on, perhaps beside those of another."""
    return bool(one["steps"]) or one["more"] > 1


def trained(run):
    """Return for each epoch the pass of each rank: [{rank: pass}]."""
    columns = [[one for one in of if one["steps"]] for of in passes(run).values()]
    return [dict(zip(run.ranks, epoch)) for epoch in zip(*columns)]


def samples(one, key="indices"):
    """Return the indices of the samples of a pass, or None if they are not known."""
    if any(batch[key] is None for batch in one["batches"]):
        return None
    return [index for batch in one["batches"] for index in batch[key]]


NETWORK = r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"


@rule
def it_ends(run):
    """the script ends"""
    if run.returncode == 0:
        yield Verdict(PASS, f"after {run.seconds:.0f} s")
    if run.returncode is None and run.idle < run.seconds / 10:
        text = f"still training after {run.seconds:.0f} s: ask it for less, or raise --timeout"
        yield Verdict(UNSEEN, text)
    if run.returncode is None:
        text = f"still running after {run.seconds:.0f} s; {waiting(run)}"
        yield Verdict(FAIL, text, "", "collective-on-one-rank")
    text = f"exit code {run.returncode}: {run.error}"
    if re.search(NETWORK, " ".join(run.errors)):
        text += "; it needs the network: download the data before"
    if run.left_out:
        names = ", ".join(run.left_out)
        text += f"; {names} could be a checkpoint and was left out: give its absolute path"
    yield Verdict(FAIL, text)


def waiting(run):
    """Return where each rank was when the time was over."""
    lines = []
    for rank, stack in run.stacks.items():
        own = [(path, line) for path, line, _ in stack if not LIBRARY.search(path)]
        inside = stack[0][2] if stack else "?"
        at = f"is at {Path(own[0][0]).name}:{own[0][1]}, in {inside}" if own else "has ended"
        lines.append(f"rank {rank} {at}")
    return "; ".join(lines) or "no rank has joined a process group"


@rule
def one_group(run):
    """one process group, destroyed at the end"""
    joined = {rank: events for rank, events in run.of("init").items() if events}
    if not joined and run.returncode == 0:
        text = "no process joined a process group: each trains on its own"
        yield Verdict(FAIL, f"{text}; diffs/README.md shows what to add")
    for rank, events in joined.items():
        if len(events) > 1:
            yield Verdict(FAIL, f"rank {rank} joined {len(events)} times", events[1]["where"])
        port = events[0]["port"]
        if port and re.search(rf"\b{port}\b", run.text):
            text = f"the port is always {port}: two jobs on one node would collide"
            yield Verdict(FAIL, text, events[0]["where"], "fixed-port")
    if run.returncode != 0:
        yield Verdict(UNSEEN, "the script did not come to its end")
    if missing := run.ranks.keys() - joined.keys():
        yield Verdict(FAIL, f"rank {min(missing)} did not join")
    for rank, events in run.of("exit").items():
        if not events:
            text = f"rank {rank} leaves by os._exit: atexit functions are not called"
            yield Verdict(FAIL, text, "", "os-exit")
        if events[0]["open_group"]:
            text = f"rank {rank} did not call destroy_process_group"
            yield Verdict(FAIL, text, "", "destroy-missing")
    yield Verdict(PASS, several(len(joined), "rank"), first(joined)[0]["where"])


@rule
def threads(run):
    """no thread of gloo is left at the exit"""
    joined = {rank: events[0] for rank, events in run.of("init").items() if events}
    if not joined:
        yield Verdict(UNSEEN, "no process joined a process group")
    if run.for_nccl:
        yield Verdict(NONE, "the script is for NCCL")
    if any(step["sharded"] for step in run.all("step")):
        yield Verdict(UNSEEN, "with sharded parameters, PyTorch itself may keep the group")
    for rank, events in run.of("exit").items():
        if not events or not events[0]["threads"]:
            continue
        text = f"rank {rank} has some, and may rarely abort after its work is done"
        if events[0]["nn"] and not joined[rank]["nn"]:
            cure = "import torch.distributed.nn at the top, as DDP and optimizers do it too late"
            yield Verdict(FAIL, f"{text}: {cure}", joined[rank]["where"], "late-import")
        cure = "let nothing hold the DDP model (del model) when destroy_process_group is called"
        yield Verdict(FAIL, f"{text}: {cure}", "", "handler-holds-model")
    if not all(run.of("exit").values()):
        yield Verdict(UNSEEN, "a rank did not come to its end")
    if any(event["open_group"] for event in run.all("exit")):
        yield Verdict(UNSEEN, "the process group was not destroyed")
    yield Verdict(PASS, several(len(joined), "rank"))


def reduced_by_hand(run):
    """Return whether, without DDP, the script itself reduces the gradients in each step."""
    steps, calls = run.of("step"), run.of("collective")
    rows = list(zip(*steps.values()))
    alike = all(len({step["gradients"] for step in row}) == 1 for row in rows)
    return bool(rows) and alike and len(first(calls)) >= len(rows)


@rule
def the_same_model(run):
    """all ranks wrap the same model, and end with the same weights"""
    wraps, steps = run.of("wrap"), run.of("step")
    if any(step["sharded"] for step in run.all("step")):
        yield Verdict(NONE, "the parameters are sharded")
    if not any(steps.values()) and not any(wraps.values()):
        yield Verdict(UNSEEN, "nothing was trained")
    by_hand = not any(wraps.values()) and reduced_by_hand(run)
    if not any(wraps.values()) and not by_hand:
        text = "no model is wrapped in DistributedDataParallel: each rank trains its own"
        yield Verdict(FAIL, text, next((step["where"] for step in run.all("step")), ""))
    if pair := differ({rank: len(of) for rank, of in wraps.items()}):
        counts = " and ".join(f"rank {rank} wraps {len(wraps[rank])}" for rank in pair)
        yield Verdict(FAIL if run.returncode == 0 else UNSEEN, f"{counts} models")
    for what, key in (("parameters", "shapes"), ("weights", "weights")):
        if pair := differ({rank: [w[key] for w in of] for rank, of in wraps.items()}):
            text = f"after DDP(...), the {what} of rank {pair[0]} and {pair[1]} differ"
            yield Verdict(FAIL, text, wraps[pair[0]][0]["where"])
    foreign = next((step for step in run.all("step") if step["foreign"]), None)
    if foreign and not by_hand:
        text = f"the optimizer changes {foreign['foreign']} parameters that are in no wrapped model"
        yield Verdict(FAIL, text, foreign["where"], "optimizer-of-other-parameters")
    for number, row in enumerate(zip(*steps.values()), 1):
        if len({step["weights"] for step in row}) > 1:
            text = f"before step {number}, the weights differ from rank to rank"
            yield Verdict(FAIL, text, row[0]["where"], "edit-on-one-rank")
    final = run.of("final")
    if not all(final.values()):
        yield Verdict(UNSEEN, "the run did not come to its end")
    if pair := differ({rank: [f["weights"] for f in of] for rank, of in final.items()}):
        text = f"at the end, the weights of rank {pair[0]} and {pair[1]} differ: were they edited,"
        yield Verdict(UNSEEN, f"{text} or loaded on one rank only?", "", "edit-on-one-rank")
    where = first(wraps)[0]["where"] if not by_hand else first(steps)[0]["where"]
    yield Verdict(
        PASS, "gradients reduced by hand, bit for bit" if by_hand else "bit for bit", where
    )


@rule
def equal_buffers(run):
    """all ranks evaluate with the same buffers, such as BatchNorm's"""
    seen = {}  # line and step of an evaluation -> checksums
    for event in run.all("evaluated"):
        seen.setdefault((event["where"], event["steps"]), []).append(event["buffers"])
    shared = {key: sums for key, sums in seen.items() if len(sums) > 1}
    if not shared:
        yield Verdict(NONE, "no model with buffers is evaluated by several ranks")
    for (where, _), sums in shared.items():
        if len(set(sums)) > 1:
            yield Verdict(FAIL, "they differ from rank to rank", where, "batchnorm-of-rank-0")
    yield Verdict(PASS, several(len(shared), "evaluation"), next(iter(shared))[0])


@rule
def shards(run):
    """in each epoch, the ranks share out the data"""
    epochs = trained(run)
    if not epochs:
        yield Verdict(UNSEEN, "no DataLoader was used to train")
    for number, epoch in enumerate(epochs, 1):
        bad = share_of(epoch)
        if bad:
            yield Verdict(bad[0], f"epoch {number}: {bad[1]}", first(epoch)["where"], bad[2])
    total = len({index for one in epochs[0].values() for index in samples(one, "base")})
    text = f"{several(len(epochs), 'epoch')} of {total} samples"
    yield Verdict(PASS, text, first(epochs[0])["where"])


def share_of(epoch):
    """Return what is wrong with the samples of the ranks in an epoch: status, text, pitfall."""
    if first(epoch)["iterable"]:
        content = {rank: [b["content"] for b in of["batches"]] for rank, of in epoch.items()}
        if len(epoch) > 1 and differ(content) is None:
            return FAIL, "each rank trains on the same batches", "no-sampler"
        return UNSEEN, "an iterable data set gives its samples no index", ""
    seen = {rank: samples(of, "base") for rank, of in epoch.items()}
    if None in seen.values():
        return UNSEEN, "the sampler gives no integer index", ""
    if any(max(Counter(of).values(), default=1) > 1 for of in seen.values()):
        return UNSEEN, "a rank draws samples with replacement", ""
    return overlap(epoch, seen)


def own_data(distributed):
    """Return the question that data which differs from rank to rank leaves open."""
    if distributed:
        return "DistributedSampler wants the same on all; is it random, and not seeded?"
    return "are they parts of one?"


def overlap(epoch, seen):
    """Return what is wrong if ranks have samples in common, as `share_of` does."""
    one, ranks = first(epoch), len(epoch)
    alike = differ({rank: of["data"] for rank, of in epoch.items()}) is None
    if differ({rank: of["tensors"] for rank, of in epoch.items()}) and one["distributed"]:
        text = "the data sets of the ranks differ: the same index means different samples"
        return FAIL, text, "split-differs-by-rank"
    if not alike:
        return UNSEEN, f"each rank has a data set of its own: {own_data(one['distributed'])}", ""
    counts = Counter(index for of in seen.values() for index in of)
    twice = counts.total() - len(counts)
    if ranks > 1 and differ({rank: set(of) for rank, of in seen.items()}) is None:
        return FAIL, f"each rank trains on the same {len(seen[min(seen)])} samples", "no-sampler"
    largest = max((len(batch["indices"]) for batch in one["batches"]), default=1)
    if twice >= (ranks if one["distributed"] else ranks * largest):  # more than padding
        return FAIL, f"{twice} samples are seen by several ranks", "rank-seeds-split-data"
    return None


@rule
def new_order(run):
    """the order changes from epoch to epoch"""
    epochs = {}  # line of the loop -> the passes of the lowest rank
    for epoch in trained(run):
        epochs.setdefault(first(epoch)["where"], []).append(first(epoch))
    if not epochs:
        yield Verdict(UNSEEN, "no DataLoader was used to train")
    where, several = max(epochs.items(), key=lambda item: len(item[1]))
    if len(several) < 2:
        yield Verdict(UNSEEN, "fewer than two epochs: ask the script for more")
    if not several[0]["shuffle"]:
        yield Verdict(UNSEEN, "the sampler does not shuffle: is that meant?", where)
    for at, of in epochs.items():
        orders = [samples(one) for one in of]
        if None in orders or len(orders[0]) < 8:
            yield Verdict(UNSEEN, "the samples have no index, or are few", at)
        for number, (one, next_one) in enumerate(pairwise(orders), 1):
            if one == next_one:
                text = f"epochs {number} and {number + 1} have the same order"
                yield Verdict(FAIL, text, at, "no-set-epoch")
    yield Verdict(PASS, f"{len(several)} orders", where)


@rule
def gradients(run):
    """each step takes the mean gradient of all ranks"""
    steps = run.of("step")
    if not any(steps.values()):
        yield Verdict(UNSEEN, "no optimizer took a step")
    if any(step["sharded"] for step in run.all("step")):
        yield Verdict(NONE, "the gradients are sharded")
    if any(step["closure"] for step in run.all("step")):
        yield Verdict(UNSEEN, "a closure computes the gradients")
    for number, row in enumerate(zip(*steps.values()), 1):
        if all(step["zero"] for step in row):
            yield Verdict(FAIL, f"step {number}: all gradients are zero", row[0]["where"])
        if len({step["gradients"] for step in row}) > 1:
            text = f"step {number}: the gradients differ from rank to rank"
            bypass = next(iter(run.all("bypass")), None)
            if bypass:
                text += f"; the model is called without its wrapper at {bypass['where']}"
            elif not row[0]["synced"]:
                text += "; the last backward() was under no_sync"
            yield Verdict(FAIL, text, row[0]["where"], "forward-through-module" if bypass else "")
    for number, step in enumerate(first(steps), 1):
        if step["reductions"] > 1:
            text = f"step {number}: {step['reductions']} batches all-reduce their gradients"
            yield Verdict(FAIL, text, step["where"], "accumulation-without-no-sync")
    counts = {rank: len(of) for rank, of in steps.items()}
    if (pair := differ(counts)) and run.returncode == 0:
        text = " and ".join(f"rank {rank} takes {counts[rank]}" for rank in pair)
        yield Verdict(FAIL, f"{text} steps", run.all("step")[0]["where"], "uneven-batches")
    if not any(run.of("wrap").values()) and not reduced_by_hand(run):
        yield Verdict(UNSEEN, "nothing reduces them: they are equal by chance")
    yield Verdict(PASS, several(min(counts.values()), "step"), run.all("step")[0]["where"])


@rule
def training_mode(run):
    """the model is in training mode in each step"""
    steps = first(run.of("step"))
    if not steps:
        yield Verdict(UNSEEN, "no optimizer took a step")
    if not any(run.of("wrap").values()):
        yield Verdict(UNSEEN, "no model is wrapped in DistributedDataParallel")
    for number, step in enumerate(steps, 1):
        if not step["training"]:
            text = f"step {number} is taken in evaluation mode"
            yield Verdict(FAIL, text, step["where"], "eval-never-undone")
    yield Verdict(PASS, f"{len(steps)} steps", steps[0]["where"])


@rule
def randomness(run):
    """ranks draw different random numbers in training"""
    epochs = trained(run)
    if not epochs:
        yield Verdict(UNSEEN, "no DataLoader was used to train")
    for epoch in epochs:
        numbers = {rank: [step["random"] for step in of["steps"]] for rank, of in epoch.items()}
        if len(epoch) > 1 and any(len(set(drawn)) > 1 for drawn in numbers.values()):
            where = first(epoch)["steps"][0]["where"]
            if differ(numbers):
                yield Verdict(PASS, "dropout or augmentation differs from rank to rank", where)
            text = "all ranks have the same dropout or augmentation"
            yield Verdict(FAIL, text, where, "same-augmentation")
    yield Verdict(UNSEEN, "the training process draws none between two steps")


@rule
def progress(run):
    """one rank prints the progress"""
    places = {}  # line of the script -> rank -> what it prints
    for rank, events in run.of("print").items():
        for event in events:
            places.setdefault(event["where"], {}).setdefault(rank, []).append(event["text"])
    if not places:
        yield Verdict(UNSEEN, "nothing is printed")
    labelled = False
    for where, texts in places.items():
        patterns = [{re.sub(r"[\d.,]+", "#", text) for text in of} for of in texts.values()]
        both = sorted(set.intersection(*patterns)) if len(texts) > 1 else []
        labelled |= bool(both) and names_its_rank(texts)
        if both and not names_its_rank(texts):
            text = f'ranks {" and ".join(map(str, texts))} print "{both[0]}"'
            yield Verdict(FAIL, text, where, "prints-on-every-rank")
    if labelled:
        yield Verdict(UNSEEN, "every rank prints, and says which it is: is that meant?")
    yield Verdict(
        PASS, f"{sum(len(of) for texts in places.values() for of in texts.values())} lines"
    )


def names_its_rank(texts):
    """Return whether one of the numbers in each line is the rank that prints it."""
    rows = [
        [number == str(rank) for number in re.findall(r"\d+", text)]
        for rank, of in texts.items()
        for text in of
    ]
    return any(all(column) for column in zip(*rows))


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
            text = (
                f"{Path(path).name} is written in place: a crash during the save leaves half a file"
            )
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
    looked = {}  # size of a data set and line -> its passes without a step, by rank
    for rank, of in passes(run).items():
        for one in of:
            if one["ended"] and one["samples"] and not is_training(one):
                key = one["samples"], one["where"]
                looked.setdefault(key, {}).setdefault(rank, []).append(one)
    if not looked:
        yield Verdict(UNSEEN, "no DataLoader was gone through without training")
    for (total, where), ranks in looked.items():
        for row in zip(*ranks.values()):
            if bad := missed(row, total, len(run.ranks)):
                yield Verdict(bad[0], bad[1], where, "padded-evaluation")
    yield Verdict(PASS, f"{total} samples", where)


def missed(row, total, ranks):
    """Return what is wrong with an evaluation, of which each rank did a part: status and text."""
    seen = [samples(one) for one in row]
    if None in seen:
        return UNSEEN, "the samples have no index"
    if all(sorted(of) == list(range(total)) for of in seen):
        return None  # each of these ranks evaluates all
    counts = Counter(index for of in seen for index in of)
    if counts.total() > len(counts):
        text = f"it counts {counts.total()} samples, of which {len(counts)} differ, of {total}"
        return FAIL, text
    if len(counts) < total:
        lost = row[0]["drop_last"] or (row[0]["distributed"] and len(row) < ranks)
        text = f"it sees {len(counts)} of {total} samples"
        return (FAIL, text) if lost else (UNSEEN, f"{text}: is that meant?")
    if row[0]["distributed"]:
        text = f"{total} samples divide by {len(row)}, else DistributedSampler would pad"
        return UNSEEN, text
    return None


@rule
def collectives(run):
    """all ranks call the same collectives in the same order"""
    calls = {
        rank: [(event["name"], event["where"]) for event in events]
        for rank, events in run.of("collective").items()
    }
    if not any(calls.values()):
        yield Verdict(UNSEEN, "the script itself calls none")
    together = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(together, 1):
        named = {rank: call and call[0] for rank, call in zip(calls, row)}
        if pair := differ(named):
            at = dict(zip(calls, row))
            said = [
                f"rank {r} calls {f'{at[r][0]} ({at[r][1]})' if at[r] else 'none'}" for r in pair
            ]
            text = f"call {number}: {' and '.join(said)}"
            yield Verdict(FAIL, text, "", "collective-on-one-rank")
    yield Verdict(PASS, several(len(first(calls)), "call"))


@rule
def warnings(run):
    """find_unused_parameters is set only where it is needed"""
    steps = run.all("step")
    if not any(run.of("wrap").values()) or not steps:
        yield Verdict(UNSEEN, "no model is wrapped in DistributedDataParallel and trained")
    said = "find_unused_parameters=True was specified" in run.output
    if said and not any(step["unused"] for step in steps):
        text = "it costs time, and every parameter is used in each step"
        yield Verdict(FAIL, text, run.all("wrap")[0]["where"], "find-unused-without-need")
    yield Verdict(PASS, "DDP has nothing to complain about")


SUMS = re.compile("reduce|gather")


@rule
def printed_loss(run):
    """what is printed was summed over all ranks"""
    since, summed = None, False  # the collectives since the last step
    for event in first(run.ranks):
        if event["kind"] == "step":
            since = []
        elif event["kind"] == "collective" and since is not None:
            since.append(event["name"])
        elif event["kind"] == "print" and since is not None:
            if not any(map(SUMS.search, since)):
                text = "no collective before it: is the loss that of rank 0 alone?"
                yield Verdict(UNSEEN, text, event["where"], "rank-0-loss")
            summed = True
    if not summed:
        yield Verdict(UNSEEN, "nothing is printed after a step")
    yield Verdict(PASS, "after a collective")


@rule
def beyond(run):
    """what only a reader can see"""
    text = "that losses are divided rightly, sums weighted, files awaited, the learning rate scaled"
    yield Verdict(UNSEEN, f"{text}, and what happens on several nodes: see {PITFALLS}")
