"""The rules by which a run is judged. Each title is the docstring of its function."""

import functools
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from ddp_check.passes import epochs, passes
from ddp_check.protocol import is_own

PASS, FAIL, UNSEEN, NONE = "pass", "FAIL", "not seen", "not applicable"
BROKEN = "the checker does not understand this run"
RULES = []  # functions that return the verdict on a run


@dataclass
class Verdict:
    status: str
    text: str
    where: str = ""  # the line of the script
    pitfall: str = ""  # the name of the page about it


def rule(function):
    """Make a rule of a function that returns the verdict on a run."""

    @functools.wraps(function)
    def judge(run):
        try:
            return function(run)
        except Exception as error:  # a report that lacks a line is better than none
            return Verdict(UNSEEN, f"{BROKEN}: {error!r}")

    RULES.append(judge)
    return judge


def differ(values):
    """Return the first two ranks whose values differ, or None."""
    (rank, value), *others = values.items()
    return next(((rank, other) for other, theirs in others if theirs != value), None)


def counted(number, noun):
    """Return a number of things in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def lowest(values):
    """Return the value of the lowest rank."""
    return next(iter(values.values()), [])


def sharded(run):
    """Return whether parameters are sharded, so that no rank holds the whole model."""
    return any(step["sharded"] for step in run.all("step"))


NETWORK = r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"


@rule
def it_ends(run):
    """the script ends"""
    if run.returncode == 0:
        return Verdict(PASS, f"after {run.seconds:.0f} s")
    if run.returncode is None and run.idle < run.seconds / 10:
        text = f"still training after {run.seconds:.0f} s: ask it for less, or raise --timeout"
        return Verdict(UNSEEN, text)
    if run.returncode is None:
        text = f"still running after {run.seconds:.0f} s; {waiting(run)}"
        return Verdict(FAIL, text, "", "collective_on_one_rank")
    text = f"exit code {run.returncode}: {run.error}"
    if re.search(NETWORK, " ".join(run.errors)):
        text += "; it needs the network: download the data before"
    if run.left_out:
        names = ", ".join(run.left_out)
        text += f"; {names} could be a checkpoint and was left out: give its absolute path"
    return Verdict(FAIL, text)


def waiting(run):
    """Return where each rank was when the time was over."""
    lines = []
    for rank, stack in run.stacks.items():
        own = [(path, line) for path, line, _ in stack if is_own(path)]
        inside = stack[0][2] if stack else "?"
        at = f"is at {Path(own[0][0]).name}:{own[0][1]}, in {inside}" if own else "has ended"
        lines.append(f"rank {rank} {at}")
    return "; ".join(lines) or "no rank has joined a process group"


def joined(run):
    """Return the events of joining a process group, for each rank that has any."""
    return {rank: events for rank, events in run.of("init").items() if events}


@rule
def one_group(run):
    """one process group, destroyed at the end"""
    ranks = joined(run)
    if not ranks and run.returncode == 0:
        text = "no process joined a process group: each trains on its own"
        return Verdict(FAIL, f"{text}; diffs/README.md shows what to add")
    if verdict := joined_badly(run):
        return verdict
    if run.returncode != 0:
        return Verdict(UNSEEN, "the script did not come to its end")
    if missing := run.ranks.keys() - ranks.keys():
        return Verdict(FAIL, f"rank {min(missing)} did not join")
    if verdict := left_badly(run):
        return verdict
    return Verdict(PASS, counted(len(ranks), "rank"), lowest(ranks)[0]["where"])


def joined_badly(run):
    """Return the verdict if a rank joins twice, or at a port that stands in the script, or None."""
    for rank, events in joined(run).items():
        if len(events) > 1:
            return Verdict(FAIL, f"rank {rank} joined {len(events)} times", events[1]["where"])
        port = events[0]["port"]
        if port and re.search(rf"\b{port}\b", run.text):
            text = f"the port is always {port}: two jobs on one node would collide"
            return Verdict(FAIL, text, events[0]["where"], "fixed_port")
    return None


def left_badly(run):
    """Return the verdict if a rank does not destroy the group, or end as Python does, or None."""
    for rank, events in run.of("exit").items():
        if not events:
            text = f"rank {rank} leaves by os._exit: atexit functions are not called"
            return Verdict(FAIL, text, "", "os_exit")
        if events[0]["open_group"]:
            text = f"rank {rank} did not call destroy_process_group"
            return Verdict(FAIL, text, "", "destroy_missing")
    return None


@rule
def no_thread_left(run):
    """no thread of gloo is left at the exit"""
    ranks = joined(run)
    if not ranks:
        return Verdict(UNSEEN, "no process joined a process group")
    if run.for_nccl:
        return Verdict(NONE, "the script is for NCCL")
    if sharded(run):
        return Verdict(UNSEEN, "with sharded parameters, PyTorch itself may keep the group")
    return threads_left(run, ranks)


def threads_left(run, ranks):
    """Return the verdict on the threads that the ranks of a group have when they end."""
    for rank, events in run.of("exit").items():
        if not events or not events[0]["threads"]:
            continue
        text = f"rank {rank} has some, and may rarely abort after its work is done"
        if events[0]["nn"] and not ranks[rank][0]["nn"]:
            cure = "import torch.distributed.nn at the top, as DDP and optimizers do it too late"
            return Verdict(FAIL, f"{text}: {cure}", ranks[rank][0]["where"], "late_import")
        cure = "let nothing hold the DDP model (del model) when destroy_process_group is called"
        return Verdict(FAIL, f"{text}: {cure}", "", "handler_holds_model")
    if not all(run.of("exit").values()):
        return Verdict(UNSEEN, "a rank did not come to its end")
    if any(event["open_group"] for event in run.all("exit")):
        return Verdict(UNSEEN, "the process group was not destroyed")
    return Verdict(PASS, counted(len(ranks), "rank"))


def reduced_by_hand(run):
    """Return whether, without DDP, the script itself reduces the gradients in each step."""
    steps, calls = run.of("step"), run.of("collective")
    rows = list(zip(*steps.values()))
    alike = all(len({step["gradients"] for step in row}) == 1 for row in rows)
    return bool(rows) and alike and len(lowest(calls)) >= len(rows)


@rule
def the_same_model(run):
    """all ranks wrap the same model, and end with the same weights"""
    wraps, steps = run.of("wrap"), run.of("step")
    wrapped = any(wraps.values())
    if sharded(run):
        return Verdict(NONE, "the parameters are sharded")
    if not any(steps.values()) and not wrapped:
        return Verdict(UNSEEN, "nothing was trained")
    if not wrapped and not reduced_by_hand(run):
        text = "no model is wrapped in DistributedDataParallel: each rank trains its own"
        return Verdict(FAIL, text, next((step["where"] for step in run.all("step")), ""))
    if verdict := wrapped_apart(run) or trained_apart(run, wrapped) or ended_apart(run):
        return verdict
    if wrapped:
        return Verdict(PASS, "bit for bit", lowest(wraps)[0]["where"])
    return Verdict(PASS, "gradients reduced by hand, bit for bit", lowest(steps)[0]["where"])


def wrapped_apart(run):
    """Return the verdict if the ranks do not wrap the same models, or None."""
    wraps = run.of("wrap")
    if pair := differ({rank: len(of) for rank, of in wraps.items()}):
        counts = " and ".join(f"rank {rank} wraps {len(wraps[rank])}" for rank in pair)
        return Verdict(FAIL if run.returncode == 0 else UNSEEN, f"{counts} models")
    for what, key in (("parameters", "shapes"), ("weights", "weights")):
        if pair := differ({rank: [wrap[key] for wrap in of] for rank, of in wraps.items()}):
            text = f"after DDP(...), the {what} of rank {pair[0]} and {pair[1]} differ"
            return Verdict(FAIL, text, wraps[pair[0]][0]["where"])
    return None


def trained_apart(run, wrapped):
    """Return the verdict if a step changes what DDP does not hold alike on all ranks, or None."""
    foreign = next((step for step in run.all("step") if step["foreign"]), None)
    if foreign and wrapped:
        text = f"the optimizer changes {foreign['foreign']} parameters that are in no wrapped model"
        return Verdict(FAIL, text, foreign["where"], "optimizer_of_other_parameters")
    for number, row in enumerate(zip(*run.of("step").values()), 1):
        if len({step["weights"] for step in row}) > 1:
            text = f"before step {number}, the weights differ from rank to rank"
            return Verdict(FAIL, text, row[0]["where"], "edit_on_one_rank")
    return None


def ended_apart(run):
    """Return the verdict unless all ranks end with the same weights, or None."""
    final = run.of("final")
    if not all(final.values()):
        return Verdict(UNSEEN, "the run did not come to its end")
    if pair := differ({rank: [event["weights"] for event in of] for rank, of in final.items()}):
        text = f"at the end, the weights of rank {pair[0]} and {pair[1]} differ: were they edited,"
        return Verdict(UNSEEN, f"{text} or loaded on one rank only?", "", "edit_on_one_rank")
    return None


@rule
def equal_buffers(run):
    """all ranks evaluate with the same buffers, such as BatchNorm's"""
    seen = {}  # line and step of an evaluation -> checksums
    for event in run.all("evaluated"):
        seen.setdefault((event["where"], event["steps"]), []).append(event["buffers"])
    shared = {key: sums for key, sums in seen.items() if len(sums) > 1}
    if not shared:
        return Verdict(NONE, "no model with buffers is evaluated by several ranks")
    for (where, _), sums in shared.items():
        if len(set(sums)) > 1:
            return Verdict(FAIL, "they differ from rank to rank", where, "batchnorm_of_rank_0")
    return Verdict(PASS, counted(len(shared), "evaluation"), next(iter(shared))[0])


@rule
def shards(run):
    """in each epoch, the ranks share out the data"""
    found = epochs(run)
    if not found:
        return Verdict(UNSEEN, "no DataLoader was used to train")
    for number, epoch in enumerate(found, 1):
        if bad := share_of(epoch):
            status, text, pitfall = bad
            return Verdict(status, f"epoch {number}: {text}", lowest(epoch).where, pitfall)
    total = len({index for one in found[0].values() for index in one.samples("base")})
    text = f"{counted(len(found), 'epoch')} of {total} samples"
    return Verdict(PASS, text, lowest(found[0]).where)


def share_of(epoch):
    """Return what is wrong with the samples of the ranks in an epoch: status, text, pitfall."""
    if lowest(epoch).iterable:
        content = {rank: [b["content"] for b in of.batches] for rank, of in epoch.items()}
        if len(epoch) > 1 and differ(content) is None:
            return FAIL, "each rank trains on the same batches", "no_sampler"
        return UNSEEN, "an iterable data set gives its samples no index", ""
    seen = {rank: of.samples("base") for rank, of in epoch.items()}
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
    one, ranks = lowest(epoch), len(epoch)
    alike = differ({rank: of.data for rank, of in epoch.items()}) is None
    if differ({rank: of.tensors for rank, of in epoch.items()}) and one.distributed:
        text = "the data sets of the ranks differ: the same index means different samples"
        return FAIL, text, "split_differs_by_rank"
    if not alike:
        return UNSEEN, f"each rank has a data set of its own: {own_data(one.distributed)}", ""
    counts = Counter(index for of in seen.values() for index in of)
    twice = counts.total() - len(counts)
    if ranks > 1 and differ({rank: set(of) for rank, of in seen.items()}) is None:
        return FAIL, f"each rank trains on the same {len(seen[min(seen)])} samples", "no_sampler"
    largest = max((len(batch["indices"]) for batch in one.batches), default=1)
    if twice >= (ranks if one.distributed else ranks * largest):  # more than padding
        return FAIL, f"{twice} samples are seen by several ranks", "rank_seeds_split_data"
    return None


@rule
def new_order(run):
    """the order changes from epoch to epoch"""
    loops = {}  # line of the loop -> the passes of the lowest rank
    for epoch in epochs(run):
        loops.setdefault(lowest(epoch).where, []).append(lowest(epoch))
    if not loops:
        return Verdict(UNSEEN, "no DataLoader was used to train")
    where, most = max(loops.items(), key=lambda item: len(item[1]))
    if len(most) < 2:
        return Verdict(UNSEEN, "fewer than two epochs: ask the script for more")
    if not most[0].shuffle:
        return Verdict(UNSEEN, "the sampler does not shuffle: is that meant?", where)
    for line, of in loops.items():
        orders = [one.samples() for one in of]
        if None in orders or len(orders[0]) < 8:
            return Verdict(UNSEEN, "the samples have no index, or are few", line)
        for number, (order, next_order) in enumerate(pairwise(orders), 1):
            if order == next_order:
                text = f"epochs {number} and {number + 1} have the same order"
                return Verdict(FAIL, text, line, "no_set_epoch")
    return Verdict(PASS, f"{len(most)} orders", where)


@rule
def mean_gradients(run):
    """each step takes the mean gradient of all ranks"""
    steps = run.of("step")
    if not any(steps.values()):
        return Verdict(UNSEEN, "no optimizer took a step")
    if sharded(run):
        return Verdict(NONE, "the gradients are sharded")
    if any(step["closure"] for step in run.all("step")):
        return Verdict(UNSEEN, "a closure computes the gradients")
    if verdict := reduced_apart(run) or reduced_too_often(run) or stepped_apart(run):
        return verdict
    if not any(run.of("wrap").values()) and not reduced_by_hand(run):
        return Verdict(UNSEEN, "nothing reduces them: they are equal by chance")
    fewest = min(map(len, steps.values()))
    return Verdict(PASS, counted(fewest, "step"), run.all("step")[0]["where"])


def reduced_apart(run):
    """Return the verdict if the ranks take a step with different gradients, or None."""
    bypass = next(iter(run.all("bypass")), None)
    for number, row in enumerate(zip(*run.of("step").values()), 1):
        where = row[0]["where"]
        if all(step["zero"] for step in row):
            return Verdict(FAIL, f"step {number}: all gradients are zero", where)
        if len({step["gradients"] for step in row}) == 1:
            continue
        text = f"step {number}: the gradients differ from rank to rank"
        if bypass:
            text += f"; the model is called without its wrapper at {bypass['where']}"
            return Verdict(FAIL, text, where, "forward_through_module")
        if not row[0]["synced"]:
            text += "; the last backward() was under no_sync"
        return Verdict(FAIL, text, where)
    return None


def reduced_too_often(run):
    """Return the verdict if a step of several batches reduces the gradients of each, or None."""
    for number, step in enumerate(lowest(run.of("step")), 1):
        if step["reductions"] > 1:
            text = f"step {number}: {step['reductions']} batches all-reduce their gradients"
            return Verdict(FAIL, text, step["where"], "accumulation_without_no_sync")
    return None


def stepped_apart(run):
    """Return the verdict if a rank takes more steps than another, or None."""
    counts = {rank: len(of) for rank, of in run.of("step").items()}
    if run.returncode == 0 and (pair := differ(counts)):
        text = " and ".join(f"rank {rank} takes {counts[rank]}" for rank in pair)
        return Verdict(FAIL, f"{text} steps", run.all("step")[0]["where"], "uneven_batches")
    return None


@rule
def training_mode(run):
    """the model is in training mode in each step"""
    steps = lowest(run.of("step"))
    if not steps:
        return Verdict(UNSEEN, "no optimizer took a step")
    if not any(run.of("wrap").values()):
        return Verdict(UNSEEN, "no model is wrapped in DistributedDataParallel")
    for number, step in enumerate(steps, 1):
        if not step["training"]:
            text = f"step {number} is taken in evaluation mode"
            return Verdict(FAIL, text, step["where"], "eval_never_undone")
    return Verdict(PASS, f"{len(steps)} steps", steps[0]["where"])


@rule
def randomness(run):
    """ranks draw different random numbers in training"""
    found = epochs(run)
    if not found:
        return Verdict(UNSEEN, "no DataLoader was used to train")
    for epoch in found:
        numbers = {rank: [step["random"] for step in of.steps] for rank, of in epoch.items()}
        if len(epoch) > 1 and any(len(set(drawn)) > 1 for drawn in numbers.values()):
            where = lowest(epoch).steps[0]["where"]
            if differ(numbers):
                return Verdict(PASS, "dropout or augmentation differs from rank to rank", where)
            text = "all ranks have the same dropout or augmentation"
            return Verdict(FAIL, text, where, "same_augmentation")
    return Verdict(UNSEEN, "the training process draws none between two steps")


@rule
def progress(run):
    """one rank prints the progress"""
    places = {}  # line of the script -> rank -> what it prints
    for rank, events in run.of("print").items():
        for event in events:
            places.setdefault(event["where"], {}).setdefault(rank, []).append(event["text"])
    if not places:
        return Verdict(UNSEEN, "nothing is printed")
    labelled = False
    for where, texts in places.items():
        patterns = [{re.sub(r"[\d.,]+", "#", text) for text in of} for of in texts.values()]
        common = sorted(set.intersection(*patterns)) if len(texts) > 1 else []
        if common and not names_its_rank(texts):
            text = f'ranks {" and ".join(map(str, texts))} print "{common[0]}"'
            return Verdict(FAIL, text, where, "prints_on_every_rank")
        labelled |= bool(common)
    if labelled:
        return Verdict(UNSEEN, "every rank prints, and says which it is: is that meant?")
    return Verdict(PASS, f"{len(run.all('print'))} lines")


def names_its_rank(texts):
    """Return whether one of the numbers in each line is the rank that prints it."""
    rows = [
        [number == str(rank) for number in re.findall(r"\d+", text)]
        for rank, of in texts.items()
        for text in of
    ]
    return any(all(column) for column in zip(*rows))


@rule
def one_writer(run):
    """one rank writes each file, whole or not at all"""
    writers = {}  # file -> rank -> line of the script
    for rank, events in run.of("open", "save", "rename").items():
        for event in events:
            if event["path"]:
                writers.setdefault(event["path"], {})[rank] = event["where"]
    if not writers:
        return Verdict(UNSEEN, "no file is written")
    for path, lines in writers.items():
        if len(lines) > 1:
            text = f"ranks {', '.join(map(str, lines))} write {Path(path).name}"
            return Verdict(FAIL, text, lowest(lines), "every_rank_saves")
    saved = {event["path"]: event["where"] for event in run.all("save") if event["path"]}
    renamed = {event["source"] for event in run.all("rename")}
    for path, where in saved.items():
        if path not in renamed:
            name = Path(path).name
            text = f"{name} is written in place: a crash during the save leaves half a file"
            return Verdict(FAIL, text, where, "written_in_place")
    return Verdict(PASS, f"{len(writers)} files", next(iter(saved.values()), ""))


@rule
def plain_names(run):
    """saved names do not begin with module."""
    saves = run.all("save")
    if not saves:
        return Verdict(UNSEEN, "nothing is saved with torch.save")
    own = {name for wrap in run.all("wrap") for name, _ in wrap["shapes"]}
    for event in saves:
        prefixed = [key for key in event["keys"] if key not in own]
        if prefixed:
            return Verdict(FAIL, f"a key is {prefixed[0]}", event["where"], "module_prefix_saved")
    return Verdict(PASS, f"{len(saves)} saves", saves[0]["where"])


@rule
def safe_loads(run):
    """checkpoints are loaded with weights_only=True"""
    events = run.all("load")
    if not events:
        return Verdict(UNSEEN, "nothing is loaded: run it again with a checkpoint (--drill kill)")
    for event in events:
        if not event["weights_only"]:
            text = "a file from elsewhere could run code"
            return Verdict(FAIL, text, event["where"], "weights_only_false")
    return Verdict(PASS, f"{len(events)} loads", events[0]["where"])


@rule
def evaluation(run):
    """the evaluation sees each sample once"""
    looked = {}  # size of a data set and line -> its passes without a step, by rank
    for rank, of in passes(run).items():
        for one in of:
            if one.ended and one.length and not one.is_training:
                key = one.length, one.where
                looked.setdefault(key, {}).setdefault(rank, []).append(one)
    if not looked:
        return Verdict(UNSEEN, "no DataLoader was gone through without training")
    for (total, where), ranks in looked.items():
        for row in zip(*ranks.values()):
            if bad := missed(row, total, len(run.ranks)):
                return Verdict(*bad, where, "padded_evaluation")
    return Verdict(PASS, f"{total} samples", where)


def missed(row, total, ranks):
    """Return what is wrong with an evaluation, of which each rank did a part: status and text."""
    seen = [one.samples() for one in row]
    if None in seen:
        return UNSEEN, "the samples have no index"
    if all(sorted(of) == list(range(total)) for of in seen):
        return None  # each of these ranks evaluates all
    counts = Counter(index for of in seen for index in of)
    if counts.total() > len(counts):
        text = f"it counts {counts.total()} samples, of which {len(counts)} differ, of {total}"
        return FAIL, text
    if len(counts) < total:
        lost = row[0].drop_last or (row[0].distributed and len(row) < ranks)
        text = f"it sees {len(counts)} of {total} samples"
        return (FAIL, text) if lost else (UNSEEN, f"{text}: is that meant?")
    if row[0].distributed:
        text = f"{total} samples divide by {len(row)}, else DistributedSampler would pad"
        return UNSEEN, text
    return None


@rule
def same_collectives(run):
    """all ranks call the same collectives in the same order"""
    calls = run.of("collective")
    if not any(calls.values()):
        return Verdict(UNSEEN, "the script itself calls none")
    together = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(together, 1):
        events = dict(zip(calls, row))
        if pair := differ({rank: event and event["name"] for rank, event in events.items()}):
            said = " and ".join(f"rank {rank} calls {named(events[rank])}" for rank in pair)
            return Verdict(FAIL, f"call {number}: {said}", "", "collective_on_one_rank")
    return Verdict(PASS, counted(len(lowest(calls)), "call"))


def named(event):
    """Return the name of a collective and the line that calls it; of no event, "none"."""
    return f"{event['name']} ({event['where']})" if event else "none"


@rule
def needed_search(run):
    """find_unused_parameters is set only where it is needed"""
    steps = run.all("step")
    if not any(run.of("wrap").values()) or not steps:
        return Verdict(UNSEEN, "no model is wrapped in DistributedDataParallel and trained")
    said = "find_unused_parameters=True was specified" in run.output
    if said and not any(step["unused"] for step in steps):
        text = "it costs time, and every parameter is used in each step"
        return Verdict(FAIL, text, run.all("wrap")[0]["where"], "find_unused_without_need")
    return Verdict(PASS, "DDP has nothing to complain about")


SUMS = re.compile("reduce|gather")


@rule
def printed_loss(run):
    """what is printed was summed over all ranks"""
    since, summed = None, False  # the collectives since the last step
    for event in lowest(run.ranks):
        if event["kind"] == "step":
            since = []
        elif event["kind"] == "collective" and since is not None:
            since.append(event["name"])
        elif event["kind"] == "print" and since is not None:
            if not any(map(SUMS.search, since)):
                text = "no collective before it: is the loss that of rank 0 alone?"
                return Verdict(UNSEEN, text, event["where"], "rank_0_loss")
            summed = True
    if not summed:
        return Verdict(UNSEEN, "nothing is printed after a step")
    return Verdict(PASS, "after a collective")


@rule
def beyond(run):
    """what only a reader can see"""
    text = "that losses are divided rightly, sums weighted, files awaited, the learning rate scaled"
    return Verdict(UNSEEN, f"{text}, and what happens on several nodes: see pitfalls/README.md")
