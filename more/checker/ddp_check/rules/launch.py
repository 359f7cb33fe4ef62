"""Rules about how the script starts and ends, its process group, GPUs and collectives."""

import re
import signal

from ddp_check import events
from ddp_check.ending import LACKS_GPUS, OF_OTHERS
from ddp_check.protocol import FRAME, PROTECTED, is_own
from ddp_check.ranks import counted, differing_ranks, of_lowest_rank, short
from ddp_check.rules.base import fragile, passed, unseen, unsure, wrong

NETWORK = (
    r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"
    r"|(FileNotFoundError|OSError): .*https?://|Error downloading"
)
BESIDE = r"(FileNotFoundError|NotFound|No such file).*\.\./"  # matches a missing ../data
OF_A_LIBRARY = r"ModuleNotFoundError|ImportError: .+/site-packages/"  # a missing or wrong library
BUFFERS = "Buffers wait for all ranks to call the DDP model: evaluate model.module"
UNTRANSLATED = rf"{LACKS_GPUS}|Tensor-likes|not implemented for '|getFuture not implemented"
UNTRANSLATED += "|must have the same dtype|bias type"  # errors because autocast is left out
PAGES = {  # part of an error -> the pitfall that explains it
    "Expected to have finished reduction": "unused_parameters",
    'key(s) in state_dict: "module.': "module_prefix_saved",
}


def script_ends(run):
    """the script ends"""
    text = f"after {run.seconds:.0f} s"
    rank, code = run.end.first_failure
    if run.returncode == 0:
        return passed(text)
    if run.hangs:
        return hang(run)
    if run.returncode is None:
        cure = "shorten the run"
        if not run.joins:
            cure = "no process joined a process group: download the data first, name its --launcher"
        return unsure(f"still busy {text}: {cure}, or raise --timeout")
    if code == -signal.SIGABRT and run.by_rank(events.Exit).get(rank):
        return passed(f"{text}; rank {rank} was aborted afterwards, a race of gloo's threads")
    return failure(run)


def hang(run):
    """Return the verdict on a run that hangs, with the line where each rank waits."""
    own_lines, waiting = [], []
    for rank, stack in run.stacks.items():
        own = [f"{path}:{line}" for path, line, _ in stack if is_own(path)]
        at = f"is at {short(own[0])}, in {stack[0][2]}" if own else "has ended"
        waiting.append(f"rank {rank} {at}")
        own_lines += own[:1]
    text = f"still running after {run.seconds:.0f} s; {'; '.join(waiting)}"
    where = next(iter(own_lines), "")
    return with_cause(run, text, where, "collective_on_one_rank" if run.joins else "")


def with_cause(run, text, where, page="", details=()):
    """Return the verdict on a run that fails or hangs, with its cause if that was seen.

    An error that does not mention other ranks has a cause of its own, so different numbers of
    batches do not explain it. But a collective on one rank may cause any error, for example about
    a tensor of another size.
    """
    tells_its_cause = run.returncode and run.end.errors and not re.search(OF_OTHERS, run.end.text)
    cause = (not tells_its_cause and uneven_passes(run)) or cause_of_waiting(run, details)
    if cause:
        page = cause.page or page
        return wrong(f"{cause.text}; {text}", cause.where or where, page, details)
    return wrong(text, where, page, details)


def cause_of_waiting(run, details):
    """Return a verdict if a rank waits for other ranks' buffers or in a different collective."""
    functions = [function for stack in run.stacks.values() for _, _, function in stack]
    if "_sync_buffers" in functions or "_sync_buffers" in str(details):
        return wrong(BUFFERS, "", "rank_0_evaluates_the_wrapper")
    return differing_calls(run)


def uneven_passes(run):
    """Return a verdict if one rank has finished an epoch that has more batches on another one."""
    for number, epoch in enumerate([] if run.in_join else run.training_passes, 1):
        counts = {rank: len(data_pass.batches) for rank, data_pass in epoch.items()}
        least, most = min(counts, key=counts.get), max(counts, key=counts.get)
        if epoch[least].ended and counts[least] < counts[most]:
            text = f"the ranks have different numbers of batches: in epoch {number}, rank {least} "
            text += f"has {counts[least]}, and rank {most} at least {counts[most]}"
            return wrong(text, epoch[least].where, "uneven_batches")


def failure(run):
    """Return the verdict on a run that failed, perhaps for a reason outside the script."""
    text, details = run.end.text, tuple(run.end.traceback)
    if cure := cure_of_this_machine(run):
        return unsure(f"{text}; {cure}", run.end.where, "", details)
    if "mixed torch.Tensor and DTensor" in text and re.search(r"\.forward\(", str(details)):
        text += "; call model(x), not model.forward(x): only then does FSDP2 gather the parameters"
    page = next((page for message, page in PAGES.items() if message in run.output), "")
    return with_cause(run, text, run.end.where, page, details)


def cure_of_this_machine(run):
    """Return what to do if a run failed because this machine lacks something, or ""."""
    errors = [match[1] for match in run.end.errors]
    if re.search(NETWORK, " ".join([*errors, run.end.text, *run.end.traceback])):
        return "it needs the network: download the data first"
    if re.match(OF_A_LIBRARY, run.end.text):
        return "run the checker in the environment of the script"
    if re.search(BESIDE, run.end.text):
        return "it is run in a copy of its folder, which has no such neighbour: use absolute paths"
    if PROTECTED in run.end.text:
        return "let it write to a folder with fewer files"
    if run.translate and is_about_gpus(run):
        return "the checker cannot translate this for the CPU"
    return ""


def is_about_gpus(run):
    """Return whether a translated run failed in the translation, or because there is no GPU."""
    frames = [at for at, line in enumerate(run.end.traceback) if FRAME.match(line)]
    innermost = run.end.traceback[frames[-1] :] if frames else [""]
    # __torch_function__ only passes calls on, so an error there is PyTorch's or the script's.
    if "ddp_check/observer" in innermost[0] and not innermost[0].endswith("in __torch_function__"):
        return True
    text = " ".join([run.end.text, *innermost[1:]])
    is_of_the_script = "Invalid device string" in text  # which is invalid on a GPU, too
    return bool(re.search(UNTRANSLATED, text)) and not is_of_the_script


def one_group(run):
    """all ranks join one process group"""
    joins, none_joined = run.joins, "no process joined a process group"
    if not joins and run.returncode == 0 and run.all(events.Step):
        return wrong(f"{none_joined}: each trains on its own; diffs/README.md shows what to add")
    if not joins and run.returncode == 0:
        return unsure(f"{none_joined} or trained: {run.end.last_line}")
    if run.returncode == 0 and (missing := run.events_by_rank.keys() - joins.keys()):
        return wrong(f"rank {min(missing)} did not join")
    for event in run.all(events.OtherMachine):
        text = f"the ranks meet at {event.host}, not this machine (changed for this run)"
        return fragile(f"{text}: let the launcher set MASTER_ADDR", event.where)
    if not joins:
        return unseen(f"{none_joined} before the script failed")
    return passed(counted(len(joins), "rank"), of_lowest_rank(joins).where)


def differing_calls(run):
    """Return a verdict if the n-th collectives of two ranks are different, or None."""
    calls = {  # without those in a forward or backward pass, whose order may differ between ranks
        rank: [call for call in of_rank if not call.in_model]
        for rank, of_rank in run.by_rank(events.Collective).items()
    }
    for row in zip(*calls.values()):
        call_by_rank = dict(zip(calls, row))
        pair = differing_ranks({rank: signature(call) for rank, call in call_by_rank.items()})
        if pair:
            first, second = (call_by_rank[rank] for rank in pair)
            text = f"rank {pair[0]} calls {described(first)}, but rank {pair[1]} "
            return wrong(text + described(second), first.where, "collective_on_one_rank")


def described(call):
    """Return a collective in words."""
    size = f" of {counted(call.elements, 'element')}" if call.elements else ""
    return f"{call.name}{size} at {short(call.where)}"


def signature(call):
    """Return the properties of a collective that have to be the same on all ranks.

    In collectives other than the three below, the ranks' tensors or objects may differ in size.
    """
    return call.name, call.elements if call.name in ("all_reduce", "reduce", "broadcast") else 0
