"""The rules that a run is judged by. A rule's docstring is its title in the report."""

import functools
import re
import signal
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from ddp_check.passes import epochs, passes
from ddp_check.protocol import is_own, own_frame

PASS, UNSEEN, NONE = "pass", "not seen", "not applicable"
WRONG = "wrong"  # the result is wrong, or the run fails
FRAGILE = "fragile"  # it works until something else goes wrong
SLOW = "slow"  # it is right, and costs time
UNSURE = "unsure"  # something was seen that may be wrong, and the checker cannot decide
BROKEN = "the checker does not understand this run"
RULES = []  # functions that return the verdict on a run


@dataclass
class Verdict:
    """What a rule or a drill says about a run."""

    status: str
    text: str
    where: str = ""  # the line of the script
    pitfall: str = ""  # the page that explains it
    details: tuple = ()  # lines to show beneath it


def rule(function):
    """Register a function that returns the verdict on a run as a rule."""

    @functools.wraps(function)
    def judge(run):
        try:
            return function(run)
        except Exception as error:  # a rule that breaks must not cost the whole report
            return Verdict(UNSEEN, f"{BROKEN}: {error!r}")

    RULES.append(judge)
    return judge


def differ(values):
    """Return the lowest rank and the first rank whose value differs from its own, or None."""
    (rank, value), *others = values.items()
    return next(((rank, other) for other, theirs in others if theirs != value), None)


def short(where):
    """Return a line of the script without its folder."""
    return where.rpartition("/")[2]


def counted(number, noun):
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def lowest(values):
    """Return the value of the lowest rank, or an empty list if there are no ranks."""
    return next(iter(values.values()), [])


def sharded(run):
    """Return whether the parameters are sharded, so no rank holds the full model."""
    return any(step["sharded"] for step in run.all("step"))


def step_rows(run):
    """Return the steps that all ranks took: a tuple of their events for each.

    Without the last one if the run failed: whether a rank reports the step of the failure, or is
    killed before, is a matter of chance.
    """
    rows = list(zip(*run.of("step").values()))
    return rows[:-1] if run.returncode else rows


NETWORK = (
    r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"
    r"|(FileNotFoundError|OSError): .*https?://"
)
DROP_THE_MODEL = "drop every reference to the DDP model (del model) before destroy_process_group"
LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu|accelerator|ddp_check/observer|Tensor-likes"


@rule
def it_ends(run):
    """the script ends"""
    if run.returncode == 0 and run.option:
        return started_by_option(run)
    if run.returncode == 0:
        return Verdict(PASS, f"after {run.seconds:.0f} s")
    if run.returncode is None and run.idle < run.seconds / 10:
        text = f"still training after {run.seconds:.0f} s: shorten the run, or raise --timeout"
        return Verdict(UNSURE, text)
    if run.returncode is None:
        text = f"still running after {run.seconds:.0f} s; {waiting(run)}"
        if joined(run) and all(run.of("destroy").values()):
            text += f". All ranks have left the process group. To rule out a race: {DROP_THE_MODEL}"
            return Verdict(WRONG, text, "", "handler_holds_model")
        return Verdict(WRONG, text, "", "collective_on_one_rank" if joined(run) else "")
    return failure(run)


def started_by_option(run):
    """Return the verdict on a script that takes its local rank from its command line."""
    text = "it needs {}, which {} passes: read LOCAL_RANK from the environment instead"
    if run.option == "--local-rank":
        only = "torch.distributed.launch, but not torchrun,"
        return Verdict(FRAGILE, text.format(run.option, only), run.option_where)
    text = text.format(run.option, "no launcher of PyTorch 2")
    return Verdict(WRONG, text, run.option_where)


def aborted_at_exit(run):
    """Return the verdict if a rank was aborted when all its work was done, or None."""
    rank, code = run.status
    if code != -signal.SIGABRT or not run.of("exit").get(rank):
        return None
    text = f"after {run.seconds:.0f} s; rank {rank} was aborted after its last line, a rare race"
    if by_framework(run):
        return Verdict(PASS, f"{text} in PyTorch")
    return Verdict(FRAGILE, f"{text} of gloo's threads", "", "late_import")


def failure(run):
    """Return the verdict on a run that failed: the fault may not be the script's."""
    if verdict := aborted_at_exit(run):
        return verdict
    text, where, details = run.ending, run.error_where, tuple(run.traceback)
    if re.search(NETWORK, " ".join([*run.errors, *details])):
        text += "; it needs the network: download the data first"
        return Verdict(UNSURE, text, where, "", details)
    if text.startswith("ModuleNotFoundError") or run.fails_in_an_import:
        text += "; run the checker in the environment of the script"
        return Verdict(UNSURE, text, where, "", details)
    if run.translate and re.search(LACKS_GPUS, " ".join([run.ending, *telling(details[-6:])])):
        text = f"the checker cannot translate this for the CPU: {text}"
        return Verdict(UNSURE, text, where, "", details)
    if run.left_out:
        names = ", ".join(run.left_out)
        text += f"; {names} could be a checkpoint and was left out: give its absolute path"
    return Verdict(WRONG, text, where, "", details)


def telling(details):
    """Return a traceback's lines without names of the script's files, and calls passed on."""
    passed_on = "in __torch_function__"  # by the observer, as any call of PyTorch
    return [line for line in details if not own_frame(line) and not line.endswith(passed_on)]


def waiting(run):
    """Return where each rank was when the time ran out."""
    lines = []
    for rank, stack in run.stacks.items():
        own = [(path, line) for path, line, _ in stack if is_own(path)]
        inside = stack[0][2] if stack else "?"
        at = f"is at {Path(own[0][0]).name}:{own[0][1]}, in {inside}" if own else "has ended"
        lines.append(f"rank {rank} {at}")
    return "; ".join(lines) or "no rank has joined a process group"


def joined(run):
    """Return the `init` events of each rank that joined a process group."""
    return {rank: events for rank, events in run.of("init").items() if events}


@rule
def one_group(run):
    """one process group, destroyed at the end"""
    ranks = joined(run)
    if not ranks and run.returncode == 0:
        return alone(run)
    if verdict := foreign_address(run) or fixed_port(run):
        return verdict
    if run.returncode != 0:
        return Verdict(UNSEEN, "the script did not finish")
    if missing := run.ranks.keys() - ranks.keys():
        return Verdict(WRONG, f"rank {min(missing)} did not join")
    if verdict := left_badly(run):
        return verdict
    return Verdict(PASS, counted(len(ranks), "rank"), lowest(ranks)[0]["where"])


def alone(run):
    """Return the verdict on a run in which no process joined a process group."""
    if run.all("step"):
        text = "no process joined a process group: each trains on its own"
        return Verdict(WRONG, f"{text}; diffs/README.md shows what to add")
    last = (run.own.strip() or "nothing is printed").splitlines()[-1]
    return Verdict(UNSURE, f"no process joined a process group or trained: {last}")


def foreign_address(run):
    """Return the verdict if the ranks are told to meet on another machine, or None."""
    for event in run.all("foreign"):
        text = f"the ranks meet at {event['host']}, not this machine (changed for this run)"
        return Verdict(FRAGILE, f"{text}: let the launcher set MASTER_ADDR", event["where"])
    return None


def fixed_port(run):
    """Return the verdict if the port is hardcoded, or None."""
    for events in joined(run).values():
        port = events[0]["port"]
        if port and re.search(rf"\b{port}\b", run.text):
            text = f"the port is always {port}: two jobs on one node would collide"
            return Verdict(FRAGILE, text, events[0]["where"], "fixed_port")
    return None


def by_framework(run):
    """Return whether a library joined the process group, so leaving it is not the script's task."""
    return not all(event["own"] for event in run.all("init"))


def left_badly(run):
    """Return the verdict if a rank skips destroy_process_group or Python's normal exit, or None."""
    for rank, events in run.of("exit").items():
        if not events:
            text = f"rank {rank} ends with os._exit: atexit functions are not called"
            return Verdict(FRAGILE, text, "", "os_exit")
        if events[0]["open_group"] and not by_framework(run):
            text = f"rank {rank} did not call destroy_process_group"
            return Verdict(FRAGILE, text, joined(run)[rank][0]["where"], "destroy_missing")
    return None


@rule
def no_thread_left(run):
    """no gloo thread is left at exit"""
    ranks = joined(run)
    if not ranks:
        return Verdict(UNSEEN, "no process joined a process group")
    if run.for_nccl or "get_default_backend_for_device" in run.text:
        return Verdict(NONE, "the script is for NCCL")
    if by_framework(run):
        return Verdict(NONE, "a library joined the process group")
    if sharded(run):
        return Verdict(UNSEEN, "with sharded parameters, PyTorch itself may keep the group alive")
    return threads_left(run, ranks)


def threads_left(run, ranks):
    """Return the verdict on the gloo threads that the ranks still have at exit."""
    for rank, events in run.of("exit").items():
        if not events or not events[0]["threads"]:
            continue
        text = f"rank {rank} has some, and in rare cases aborts after its work is done"
        if events[0]["nn"] and not ranks[rank][0]["nn"]:
            cure = "import torch.distributed.nn at the top: DDP and optimizers import it too late"
            return Verdict(FRAGILE, f"{text}: {cure}", ranks[rank][0]["where"], "late_import")
        return Verdict(FRAGILE, f"{text}: {DROP_THE_MODEL}", "", "handler_holds_model")
    if not all(run.of("exit").values()):
        return Verdict(UNSEEN, "a rank did not finish")
    if any(event["open_group"] for event in run.all("exit")):
        return Verdict(UNSEEN, "the process group was not destroyed")
    return Verdict(PASS, counted(len(ranks), "rank"))


def reduced_by_hand(run):
    """Return whether the script reduces the gradients itself, without DDP, in each step."""
    rows, calls = step_rows(run), run.of("collective")
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
        return Verdict(WRONG, text, next((step["where"] for step in run.all("step")), ""))
    if verdict := wrapped_apart(run) or trained_apart(run, wrapped) or ended_apart(run):
        return verdict
    if wrapped:
        return Verdict(PASS, "bit for bit", lowest(wraps)[0]["where"])
    return Verdict(PASS, "gradients reduced by hand, bit for bit", lowest(steps)[0]["where"])


def wrapped_apart(run):
    """Return the verdict if the ranks wrap different models, or None."""
    wraps = run.of("wrap")
    if pair := differ({rank: len(of) for rank, of in wraps.items()}):
        counts = " and ".join(f"rank {rank} wraps {len(wraps[rank])}" for rank in pair)
        return Verdict(WRONG if run.returncode == 0 else UNSEEN, f"{counts} models")
    for what, key in (("parameters", "shapes"), ("weights", "weights")):
        if pair := differ({rank: [wrap[key] for wrap in of] for rank, of in wraps.items()}):
            text = f"after DDP(...), the {what} of ranks {pair[0]} and {pair[1]} differ"
            return Verdict(WRONG, text, wraps[pair[0]][0]["where"])
    return None


def trained_apart(run, wrapped):
    """Return the verdict if training makes the weights of the ranks diverge, or may, or None."""
    foreign = next((step for step in run.all("step") if step["foreign"]), None)
    if foreign and wrapped:
        text = f"the optimizer changes {foreign['foreign']} parameters that are in no wrapped model"
        return Verdict(WRONG, text, foreign["where"], "optimizer_of_other_parameters")
    for number, row in enumerate(step_rows(run), 1):
        if len({step["weights"] for step in row}) > 1:
            text = f"before step {number}, the weights differ from rank to rank"
            return Verdict(WRONG, text, row[0]["where"], "edit_on_one_rank")
    return None


def ended_apart(run):
    """Return the verdict if the final weights of the ranks differ or are missing, or None."""
    final = run.of("final")
    if run.returncode != 0 or not all(final.values()):
        return Verdict(UNSEEN, "the run did not finish")
    if pair := differ({rank: [event["weights"] for event in of] for rank, of in final.items()}):
        text = f"at the end, the weights of ranks {pair[0]} and {pair[1]} differ: were they edited,"
        return Verdict(UNSURE, f"{text} or loaded on one rank only?", "", "edit_on_one_rank")
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
            return Verdict(WRONG, "they differ from rank to rank", where, "batchnorm_of_rank_0")
    return Verdict(PASS, counted(len(shared), "evaluation"), next(iter(shared))[0])


@rule
def shards(run):
    """the ranks share out the data"""
    if where := same_inputs(run):
        return Verdict(
            WRONG, "in each step, all ranks train on the same batch", where, "no_sampler"
        )
    found = epochs(run)
    if not found:
        return shared_inputs(run)
    for number, epoch in enumerate(found, 1):
        if bad := share_of(epoch):
            status, text, pitfall = bad
            return Verdict(status, f"epoch {number}: {text}", lowest(epoch).where, pitfall)
    total = len({index for one in found[0].values() for index in one.samples("base")})
    text = f"{counted(len(found), 'epoch')} of {total} samples"
    return Verdict(PASS, text, lowest(found[0]).where)


def entering(run):
    """Return the steps of all ranks for which it is known what entered the model."""
    return [row for row in step_rows(run) if len(row) > 1 and any(step["inputs"] for step in row)]


def same_inputs(run):
    """Return the line of a step if the same batches enter the model on all ranks, or None."""
    rows = entering(run)
    if any(step["meshes"] > 1 for row in rows for step in row):
        return None  # ranks that share a model's layers have to have the same
    if not rows or any(len({str(step["inputs"]) for step in row}) > 1 for row in rows):
        return None
    return rows[0][0]["where"]


def shared_inputs(run):
    """Return the verdict on training without a DataLoader."""
    rows = entering(run)
    if not rows:
        return Verdict(UNSEEN, "no DataLoader was used to train, nor a wrapped model")
    if any(step["meshes"] > 1 for row in rows for step in row):
        return Verdict(UNSEEN, "some ranks share a model, and have to have the same batches")
    for number, row in enumerate(rows, 1):
        if len({str(step["inputs"]) for step in row}) == 1:
            text = f"in {number} of {len(rows)} steps, all ranks train on the same batch"
            return Verdict(UNSURE, text, row[0]["where"], "no_sampler")
    text = f"in {counted(len(rows), 'step')}, the ranks train on different batches"
    return Verdict(PASS, text, rows[0][0]["where"])


def share_of(epoch):
    """Return what is wrong with the samples of an epoch: (status, text, pitfall), or None."""
    if lowest(epoch).iterable:
        content = {rank: [b["content"] for b in of.batches] for rank, of in epoch.items()}
        if len(epoch) > 1 and differ(content) is None:
            return WRONG, "each rank trains on the same batches", "no_sampler"
        return UNSEEN, "the samples of an iterable data set have no index", ""
    seen = {rank: of.samples("base") for rank, of in epoch.items()}
    if None in seen.values():
        return UNSEEN, "the sampler does not return integer indices", ""
    if any(max(Counter(of).values(), default=1) > 1 for of in seen.values()):
        return UNSEEN, "a rank draws samples with replacement", ""
    return overlap(epoch, seen)


def own_data(distributed):
    """Return what to ask about data that differs between ranks."""
    if distributed:
        return "DistributedSampler needs the same on all; is it random and unseeded?"
    return "are they parts of a larger one?"


def overlap(epoch, seen):
    """Return what is wrong if ranks share samples, as `share_of` does, or None."""
    one, ranks = lowest(epoch), len(epoch)
    alike = differ({rank: of.data for rank, of in epoch.items()}) is None
    if differ({rank: of.tensors for rank, of in epoch.items()}) and one.distributed:
        text = "the data sets of the ranks differ: the same index means different samples"
        return WRONG, text, "split_differs_by_rank"
    if not alike:
        status = UNSURE if one.distributed else UNSEEN
        return status, f"each rank has a data set of its own: {own_data(one.distributed)}", ""
    counts = Counter(index for of in seen.values() for index in of)
    twice = counts.total() - len(counts)
    if ranks > 1 and differ({rank: set(of) for rank, of in seen.items()}) is None:
        text = f"each rank trains on the same {len(seen[min(seen)])} samples"
        return WRONG, text, "no_sampler"
    largest = max((len(batch["indices"]) for batch in one.batches), default=1)
    if twice >= (ranks if one.distributed else ranks * largest):  # more than padding
        text = f"{twice} samples are seen by several ranks"
        if all(of.ended for of in epoch.values()):
            return WRONG, text, "rank_seeds_split_data"
        return UNSURE, f"{text}: each draws from all of them in an order of its own", "no_sampler"
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
        return Verdict(UNSEEN, "fewer than two epochs: run more")
    if not most[0].shuffle:
        return Verdict(UNSEEN, "the sampler does not shuffle: is that intended?", where)
    for line, of in loops.items():
        orders = [one.samples() for one in of]
        if None in orders or len(orders[0]) < 8:
            return Verdict(UNSEEN, "the samples have no index, or there are too few", line)
        for number, (order, next_order) in enumerate(pairwise(orders), 1):
            if order == next_order:
                text = f"epochs {number} and {number + 1} have the same order"
                return Verdict(WRONG, text, line, "no_set_epoch")
    return Verdict(PASS, f"{len(most)} epochs", where)


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
    """Return the verdict if a step's gradients differ between ranks or are all zero, or None."""
    bypass = next(iter(run.all("bypass")), None)
    for number, row in enumerate(step_rows(run), 1):
        where = row[0]["where"]
        if all(step["zero"] for step in row):
            return Verdict(WRONG, f"step {number}: all gradients are zero", where)
        if len({step["gradients"] for step in row}) == 1:
            continue
        text = f"step {number}: the gradients differ from rank to rank"
        if bypass:
            text += f"; the model is called without its wrapper at {short(bypass['where'])}"
            return Verdict(WRONG, text, where, "forward_through_module")
        if not row[0]["synced"]:
            text += "; the last backward() was under no_sync"
        return Verdict(WRONG, text, where)
    return None


def reduced_too_often(run):
    """Return the verdict if gradients are all-reduced more than once per step, or None."""
    for number, step in enumerate(lowest(run.of("step")), 1):
        if step["reductions"] > 1:
            text = f"step {number}: {step['reductions']} backward passes all-reduce their gradients"
            text += "; under no_sync(), only the last of them would"
            return Verdict(SLOW, text, step["where"], "accumulation_without_no_sync")
    return None


def stepped_apart(run):
    """Return the verdict if the ranks take different numbers of steps, or None."""
    counts = {rank: len(of) for rank, of in run.of("step").items()}
    if run.returncode == 0 and (pair := differ(counts)):
        text = " and ".join(f"rank {rank} takes {counts[rank]}" for rank in pair)
        return Verdict(WRONG, f"{text} steps", run.all("step")[0]["where"], "uneven_batches")
    return None


@rule
def training_mode(run):
    """the model is in training mode in each step"""
    steps = lowest(run.of("step"))
    if not steps:
        return Verdict(UNSEEN, "no optimizer took a step")
    if not any(run.of("wrap").values()):
        return Verdict(UNSEEN, "no model is wrapped in DistributedDataParallel")
    if not any(step["training"] for step in steps):
        return Verdict(UNSURE, "all steps are taken in evaluation mode", steps[0]["where"])
    for number, step in enumerate(steps, 1):
        if not step["training"]:
            text = f"step {number} is taken in evaluation mode"
            return Verdict(WRONG, text, step["where"], "eval_never_undone")
    return Verdict(PASS, f"{len(steps)} steps", steps[0]["where"])


@rule
def evaluation_mode(run):
    """the model is in evaluation mode when it is evaluated"""
    looked = {
        (rank, one.number)
        for rank, of in passes(run).items()
        for one in of
        if one.batches and not one.is_training
    }
    for rank, events in run.of("noisy").items():
        for event in events:
            if (rank, event["number"]) in looked:
                text = f"it is in training mode: {event['layer']} changes what it returns"
                return Verdict(WRONG, text, event["where"])
    if not looked or not any(run.of("wrap").values()):
        return Verdict(UNSEEN, "no wrapped model was evaluated with a DataLoader")
    return Verdict(PASS, "or its layers do the same in both")


@rule
def randomness(run):
    """ranks draw different random numbers in training"""
    found = epochs(run)
    if not found:
        return Verdict(UNSEEN, "no DataLoader was used to train")
    drawn = drawn_for_samples(run)
    if lowest(drawn) and differ(drawn) is None:
        (worker, source), *_ = lowest(drawn)
        place = "" if worker is None else " in DataLoader workers"
        text = f"all ranks have the same augmentation{place}: equal seeds of {source}"
        return Verdict(WRONG, text, lowest(found[0]).where, "same_augmentation")
    for epoch in found:
        numbers = {rank: [step["random"] for step in of.steps] for rank, of in epoch.items()}
        if len(epoch) > 1 and any(len(set(of)) > 1 for of in numbers.values()):
            where = lowest(epoch).steps[0]["where"]
            if differ(numbers):
                return Verdict(PASS, "dropout or augmentation differs from rank to rank", where)
            return same_numbers(run, where)
    if lowest(drawn):
        return Verdict(PASS, "augmentation differs from rank to rank", lowest(found[0]).where)
    return Verdict(UNSEEN, "the training process draws no random numbers between steps")


def same_numbers(run, where):
    """Return the verdict on ranks that draw the same random numbers outside of the data set.

    Dropout is drawn inside the model; some libraries do that alike. Without DDP, the checker does
    not see where the model begins.
    """
    what, status = "augmentation", WRONG
    if any(step["dropout"] for step in run.all("step")):
        what, status = "dropout: should they?", UNSURE
    elif not run.all("wrap"):
        what, status = "dropout or augmentation: should they?", UNSURE
    return Verdict(status, f"all ranks have the same {what}", where, "same_augmentation")


def drawn_for_samples(run):
    """Return from which states the ranks that make random samples do so: {rank: {source: state}}.

    Only sources that all ranks draw from, or nothing if fewer than two ranks do.
    """
    found = {
        rank: {(event["worker"], event["source"]): event["state"] for event in reversed(events)}
        for rank, events in run.of("drawn").items()
    }
    if len(found) < 2:
        return {}
    common = set.intersection(*map(set, found.values()))
    return {rank: {key: of[key] for key in of if key in common} for rank, of in found.items()}


@rule
def own_gpu(run):
    """each rank uses a GPU of its own"""
    used = {rank: events for rank, events in run.of("gpu").items() if events}
    if not used:
        return Verdict(UNSEEN, "the script names no GPU, or its calls were not translated")
    if any(event["alone"] for event in run.all("gpu")):
        return Verdict(UNSEEN, "the script chooses what each rank can see")
    uses = {rank: [one for one in of if one["use"] == "use"] or of for rank, of in used.items()}
    found = {rank: {event["index"] for event in events} for rank, events in uses.items()}
    if any(len(of) > 1 for of in found.values()):
        return Verdict(UNSEEN, "a rank uses several GPUs")
    for rank, (event, *_) in uses.items():
        if not 0 <= event["index"] < event["count"]:
            text = f"rank {rank} uses GPU {event['index']}, but a node has {event['count']}"
            return Verdict(WRONG, text, event["where"], "global_rank_as_device")
    if len(found) > 1 and differ(found) is None:
        index = lowest(uses)[0]["index"]
        text = f"ranks {' and '.join(map(str, found))} use the same GPU, number {index}"
        return Verdict(WRONG, text, uses[max(uses)][0]["where"])
    return Verdict(PASS, counted(len(used), "rank"), lowest(used)[0]["where"])


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
            return Verdict(UNSURE, f"{text}: is that intended?", where, "prints_on_every_rank")
        labelled |= bool(common)
    if labelled:
        return Verdict(UNSEEN, "every rank prints, with its own number: is that intended?")
    return Verdict(PASS, f"{len(run.all('print'))} lines")


def names_its_rank(texts):
    """Return whether one number in each line is always the rank that prints it."""
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
            return Verdict(WRONG, text, lowest(lines), "every_rank_saves")
    saved = {event["path"]: event["where"] for event in run.all("save") if event["path"]}
    renamed = {event["source"] for event in run.all("rename")}
    for path, where in saved.items():
        if path not in renamed:
            name = Path(path).name
            text = f"{name} is written in place: a crash during the save leaves half a file"
            return Verdict(FRAGILE, text, where, "written_in_place")
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
            text = f"a key is {prefixed[0]}: only a wrapped model can load it"
            return Verdict(FRAGILE, text, event["where"], "module_prefix_saved")
    return Verdict(PASS, f"{len(saves)} saves", saves[0]["where"])


@rule
def safe_loads(run):
    """checkpoints are loaded with weights_only=True"""
    events = run.all("load")
    if not events:
        return Verdict(UNSEEN, "nothing is loaded: run it again with a checkpoint (--drill kill)")
    for event in events:
        if not event["weights_only"]:
            text = "a file from an untrusted source could run code"
            return Verdict(FRAGILE, text, event["where"], "weights_only_false")
    return Verdict(PASS, f"{len(events)} loads", events[0]["where"])


def looks(run):
    """Return the evaluations: {size of a data set and line: [one pass of each rank]}.

    Without those on the training set: they only show how training goes. In a run that failed, also
    without those that some ranks did not come to.
    """
    looked, found = {}, passes(run)
    trained = {(one.data, one.part) for of in found.values() for one in of if one.is_training}
    for rank, of in found.items():
        for one in of:
            if one.ended and one.length and (one.data, one.part) not in trained:
                key = one.length, one.where
                looked.setdefault(key, {}).setdefault(rank, []).append(one)
    least = 1 if run.returncode == 0 else len(run.ranks)
    return {key: list(zip(*of.values())) for key, of in looked.items() if len(of) >= least}


@rule
def evaluation(run):
    """the evaluation sees each sample once"""
    looked = looks(run)
    if not looked:
        return Verdict(UNSEEN, "no DataLoader was used without training")
    text = ""
    for (total, where), rows in looked.items():
        rest = [row for of in looked.values() for row in of if is_rest(row, rows[0])]
        for row in rows:
            if bad := missed([row, *rest[:1]], total, len(run.ranks)):
                return Verdict(*bad, where, "padded_evaluation")
            if padding(row) and not text:
                text = f"; its padding of {padding(row)} is dropped after a gather"
    total, where = max(looked)
    return Verdict(PASS, f"{total} samples{text}", where)


def is_rest(row, other):
    """Return whether all ranks evaluate the same few samples, which another pass may leave out."""
    ours, theirs = row[0], other[0]
    few = ours.data == theirs.data and ours.length < theirs.length
    parts = [one.samples("base") for one in row]
    return few and None not in parts and parts[1:] == parts[:-1]


def padding(row):
    """Return how many samples an evaluation by all ranks loads more than once."""
    seen = [one.samples() for one in row]
    if None in seen or len({tuple(sorted(of)) for of in seen}) == 1:  # all evaluate the same
        return 0
    counts = Counter(index for of in seen for index in of)
    return counts.total() - len(counts)


def missed(rows, total, ranks):
    """Return what is wrong with an evaluation that the ranks shared: (status, text), or None."""
    row, *rest = rows
    seen = [one.samples() for one in row]
    if None in seen or len({one.part for one in row}) > 1:
        return UNSEEN, "the samples have no index, or each rank evaluates a part of its own"
    if all(sorted(of) == list(range(total)) for of in seen):
        return None  # each of these ranks evaluates the whole set
    if twice := padding(row):
        return counted_twice(row, twice, total)
    counts = {index for one in row for index in one.samples("base")}
    whole = counts.union(*(other[0].samples("base") for other in rest))
    if len(counts) < total and len(whole) != total:
        lost = row[0].drop_last or (row[0].distributed and len(row) < ranks)
        text = f"it sees {len(counts)} of {total} samples"
        return (WRONG, text) if lost else (UNSURE, f"{text}: is that intended?")
    if row[0].distributed and not rest:
        text = f"{total} is divisible by {len(row)}; otherwise DistributedSampler would pad"
        return UNSEEN, text
    return None


def counted_twice(row, twice, total):
    """Return what is wrong with a padded evaluation: (status, text), or None if it is cut off."""
    if any(twice in one.dropped for one in row):
        return None
    loaded = sum(len(one.samples()) for one in row)
    text = f"{loaded} samples, {loaded - twice} of them distinct, of {total}"
    if any(one.gathered for one in row) and not all(one.added_up for one in row):
        return UNSURE, f"it loads {text}: are the extra ones dropped after the gather?"
    return WRONG, f"it counts {text}"


@rule
def held_out(run):
    """no sample is both trained on and evaluated"""
    trained, parts = {}, {}  # checksum of a data set -> indices; and -> rank -> part of it
    for epoch in epochs(run):
        for rank, one in epoch.items():
            trained.setdefault(one.data, set()).update(one.samples("base") or ())
            parts.setdefault(one.data, {}).setdefault(rank, one.part)
    text = "training and evaluation do not use parts of one data set"
    verdict = Verdict(UNSEEN, text)
    for (_, where), rows in looks(run).items():
        for one in (one for row in rows for one in row):
            if one.data not in trained:
                continue
            seen = set(one.samples("base") or ())
            if both := seen & trained[one.data]:
                return overlapping(len(both), len(seen), parts[one.data], where)
            verdict = Verdict(PASS, "they are parts of one data set that do not overlap", where)
    return verdict


def overlapping(both, total, parts, where):
    """Return the verdict on an evaluation that shares samples with the training set."""
    text = f"{both} of the {total} samples of an evaluation are also trained on"
    if differ(parts):
        text += ": the split differs from rank to rank; give it a seed"
        return Verdict(WRONG, text, where, "split_differs_by_rank")
    return Verdict(WRONG if both < total else UNSURE, f"{text}: is that intended?", where)


@rule
def same_collectives(run):
    """all ranks call the same collectives in the same order"""
    calls = run.of("collective")
    if not any(calls.values()):
        return Verdict(UNSEEN, "the script calls none itself")
    together = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(together, 1):
        events = dict(zip(calls, row))
        if pair := differ({rank: event and event["name"] for rank, event in events.items()}):
            said = " and ".join(f"rank {rank} calls {named(events[rank])}" for rank in pair)
            return Verdict(WRONG, f"call {number}: {said}", "", "collective_on_one_rank")
    return Verdict(PASS, counted(len(lowest(calls)), "call"))


def named(event):
    """Return the name of a collective and the line that calls it, or "nothing" without an event."""
    return f"{event['name']} ({short(event['where'])})" if event else "nothing"


@rule
def needed_search(run):
    """find_unused_parameters is set only where it is needed"""
    steps = run.all("step")
    if not any(run.of("wrap").values()) or not steps:
        return Verdict(UNSEEN, "no model is wrapped in DistributedDataParallel and trained")
    said = "find_unused_parameters=True was specified" in run.output
    if said and not any(step["unused"] for step in steps):
        text = "it costs time, and every parameter is used in each step"
        return Verdict(SLOW, text, run.all("wrap")[0]["where"], "find_unused_without_need")
    return Verdict(PASS, "DDP does not warn about it")


NUMBER = r"\d\.\d"


@rule
def printed_loss(run):
    """printed values are summed over all ranks"""
    before, since = None, []  # what was collected before the last step, and since
    summed = False
    for event in lowest(run.ranks):
        if event["kind"] == "step":
            before, since = since, []
        elif event["kind"] == "collective":
            since.append(event["adds"] or "gather" in event["name"])
        elif event["kind"] == "print" and before is not None and re.search(NUMBER, event["text"]):
            if not any(before + since):  # a loss may be summed before the step, and printed after
                text = "no collective before it: is the loss only that of rank 0?"
                return Verdict(UNSURE, text, event["where"], "rank_0_loss")
            summed = True
    if not summed:
        return Verdict(UNSEEN, "no fraction is printed after a step")
    return Verdict(PASS, "after a collective")


@rule
def beyond(run):
    """what you must check yourself"""
    text = "division of losses, weighting of means, waiting for files, scaling of the learning rate"
    return Verdict(UNSEEN, f"{text}, several nodes: see pitfalls/README.md")
