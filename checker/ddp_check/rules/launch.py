"""Rules about how the script starts and ends, its process group, GPUs and collectives."""

import re
import signal
from itertools import zip_longest

from ddp_check import events
from ddp_check.protocol import is_own, own_frame
from ddp_check.ranks import counted, differing_ranks, of_lowest_rank, short
from ddp_check.rules.base import (
    WRONG,
    fragile,
    not_applicable,
    note,
    passed,
    unseen,
    unsure,
    wrong,
)
from ddp_check.run import LACKS_GPUS

NETWORK = (
    r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"
    r"|(FileNotFoundError|OSError): .*https?://"
)
DROP_THE_MODEL = "drop every reference to the DDP model (del model) before destroy_process_group"
PASSED_ON = "in __torch_function__"
BUFFERS = "Buffers wait for all ranks to call the DDP model: evaluate model.module"
UNTRANSLATED = rf"{LACKS_GPUS}|ddp_check/observer|Tensor-likes"
FAILS_ON_GPUS_TOO = "must not be negative"  # a GPU's number


def script_ends(run):
    """the script ends"""
    text = f"after {run.seconds:.0f} s"
    rank, code = run.status
    if run.returncode == 0 and run.option:
        return missing_option(run)
    if run.returncode == 0:
        return passed(text)
    if run.hangs:
        return hang(run)
    if run.returncode is None:
        return unsure(f"still busy {text}: shorten the run, or raise --timeout")
    if code == -signal.SIGABRT and run.by_rank(events.Exit).get(rank):
        text += f"; rank {rank} was aborted after its last line, a rare race of gloo's threads"
        return passed(text) if joined_by_framework(run) else fragile(text, "", "late_import")
    return failure(run)


def missing_option(run):
    """Return the verdict on a script that ends only if it is told its local rank."""
    needs = f"it needs {run.option}, which {{}} passes: read LOCAL_RANK from the environment"
    if run.option == "--local-rank":
        only = "torch.distributed.launch, not torchrun,"
        return fragile(needs.format(only), run.option_where)
    return wrong(needs.format("no launcher of PyTorch 2"), run.option_where)


def hang(run):
    """Return the verdict on a run that hangs, with the place where each rank waits."""
    own_lines, places = [], []
    for rank, stack in run.stacks.items():
        own = [f"{path}:{line}" for path, line, _ in stack if is_own(path)]
        at = f"is at {short(own[0])}, in {stack[0][2]}" if own else "has ended"
        places.append(f"rank {rank} {at}")
        own_lines += own[:1]
    places_text = "; ".join(places) or "no rank has joined a process group"
    text = f"still running after {run.seconds:.0f} s; {places_text}"
    if run.joins and all(run.by_rank(events.Leave).values()):
        text += f". All ranks have left the process group. To rule out a race: {DROP_THE_MODEL}"
        return wrong(text, "", "handler_holds_model")
    where = next(iter(own_lines), "")
    return explained(run, text, where, "collective_on_one_rank" if run.joins else "")


def explained(run, text, where, page="", details=()):
    """Return the verdict on a run that fails or hangs, perhaps as a rank does not take part."""
    in_sync = [
        rank
        for rank, stack in run.stacks.items()
        if any(function == "_sync_buffers" for _, _, function in stack)
    ]
    if (left := left_alone(run)) and left[0] not in in_sync:
        early, late, epochs = left
        step = f"{epochs}, in step {len(run.by_rank(events.Step)[early])}"
        reason = f"rank {early} left the loop over the epochs after {step}, and rank {late} "
        reason += "began the next: does each decide by its own loss?"
        return wrong(f"{reason}; {text}", where, "recipes/early_stopping", details)
    if in_sync or "_sync_buffers" in str(details):
        return wrong(f"{BUFFERS}; {text}", where, "rank_0_evaluates_the_wrapper", details)
    cause = same_collectives(run)
    if cause and cause.status == WRONG:
        return wrong(f"{cause.text}; {text}", cause.where, cause.page or page, details)
    return wrong(text, where, page, details)


def left_alone(run):
    """Return a rank that left the training loop, one that began another epoch, and after which."""
    passes = [entry for of_rank in run.passes_by_rank.values() for entry in of_rank]
    loops = {entry.where for entry in passes if entry.steps}
    begun = {
        rank: sum(entry.where in loops for entry in of_rank if entry.batches)
        for rank, of_rank in run.passes_by_rank.items()
    }
    pair = differing_ranks(begun) if begun else None
    if not pair or not min(begun.values()):  # a rank that never began evaluates the DDP model
        return None
    early, late = sorted(pair, key=begun.get)
    return early, late, begun[early]


def failure(run):
    """Return the verdict on a run that failed: the fault may not be the script's."""
    text, details, cure = run.ending, tuple(run.traceback), ""
    # Without names of the script's files, and calls that the observer passes on:
    telling = [line for line in details[-6:] if not (own_frame(line) or line.endswith(PASSED_ON))]
    untranslated = run.translate and re.search(UNTRANSLATED, " ".join([text, *telling]))
    errors = [match[1] for match in run.raised]
    if re.search(NETWORK, " ".join([*errors, text, *details])):
        cure = "it needs the network: download the data first"
    elif text.startswith("ModuleNotFoundError") or run.fails_in_an_import:
        cure = "run the checker in the environment of the script"
    elif untranslated and FAILS_ON_GPUS_TOO not in text:
        cure = "the checker cannot translate this for the CPU"
    if cure:
        return unsure(f"{text}; {cure}", run.error_where, "", details)
    if run.left_out:
        names = ", ".join(run.left_out)
        text += f"; {names} could be a checkpoint and was left out: give its absolute path"
    return explained(run, text, run.error_where, "", details)


def one_group(run):
    """all ranks join one process group"""
    joins, none_joined = run.joins, "no process joined a process group"
    if not joins and run.returncode == 0 and run.all(events.Step):
        return wrong(f"{none_joined}: each trains on its own; diffs/README.md shows what to add")
    if not joins and run.returncode == 0:
        _, _, last = run.printed.strip().rpartition("\n")
        return unsure(f"{none_joined} or trained: {last or 'nothing is printed'}")
    for event in run.all(events.OtherMachine):
        text = f"the ranks meet at {event.host}, not this machine (changed for this run)"
        return fragile(f"{text}: let the launcher set MASTER_ADDR", event.where)
    if run.returncode == 0 and (missing := run.events_by_rank.keys() - joins.keys()):
        return wrong(f"rank {min(missing)} did not join")
    if not joins:
        return unseen(f"{none_joined} before the script failed")
    return passed(counted(len(joins), "rank"), of_lowest_rank(joins).where)


def port_is_free(run):
    """the ranks meet at a port that the launcher chooses"""
    for join in run.joins.values():
        for name, text in {"": run.text, **run.others}.items():
            if join.port and (match := re.search(rf"\b{join.port}\b", text)):
                line = f"{name}:{text[: match.start()].count(chr(10)) + 1}" if name else join.where
                reason = f"the port is always {join.port}: two jobs on one node would collide"
                return fragile(reason, line, "fixed_port")


def group_is_destroyed(run):
    """each rank destroys the process group, and ends as Python programs do"""
    if run.returncode != 0:
        return unseen("the script did not finish")
    for rank, exits in run.by_rank(events.Exit).items():
        if not exits:
            text = f"rank {rank} ends with os._exit: no atexit function runs"
            return fragile(text, "", "os_exit")
        if exits[0].group_open and rank in run.joins and not joined_by_framework(run):
            text = f"rank {rank} did not call destroy_process_group"
            return fragile(text, run.joins[rank].where, "destroy_missing")


def joined_by_framework(run):
    """Return whether a library joined the process group, so leaving it is not the script's task."""
    return not all(event.by_script for event in run.all(events.Join))


def no_thread_left(run):
    """no gloo thread is left at exit"""
    if run.for_nccl or "get_default_backend_for_device" in run.text:
        return not_applicable("with NCCL, for which the script is written, there are none")
    if joined_by_framework(run) or run.is_sharded:
        return not_applicable("a library joined the group, or keeps it for sharded parameters")
    for rank, exits in run.by_rank(events.Exit).items():
        for event in exits:
            if event.gloo_threads:
                return thread_left(run, rank, event)
    exits = run.by_rank(events.Exit)
    if not all(exits.values()) or any(event.group_open for event in run.all(events.Exit)):
        return unseen("a rank did not finish, or did not destroy the process group")


def thread_left(run, rank, event):
    """Return the verdict on a rank that ends with a thread of gloo."""
    text = f"rank {rank} has some, and in rare cases aborts after its work is done"
    if event.nn_imported and not run.joins[rank].nn_imported:
        cure = "import torch.distributed.nn at the top: DDP and optimizers import it too late"
        return note(f"{text}: {cure}", run.joins[rank].where, "late_import")
    return fragile(f"{text}: {DROP_THE_MODEL}", "", "handler_holds_model", follows=True)


def own_gpu(run):
    """each rank uses a GPU of its own"""
    if any(event.visible_chosen for event in run.all(events.Gpu)):
        return unseen("the script chooses what each rank can see")
    if not run.all(events.Step) and run.returncode != 0:
        return unseen("no step was taken before the run ended")
    first_rank = {}  # number of a GPU -> the first rank that uses it
    for rank, named in run.by_rank(events.Gpu).items():
        for event in [event for event in named if event.use == "use"] or named:
            if not 0 <= event.index < event.count:
                text = f"rank {rank} uses GPU {event.index}, but a node has {event.count}"
                return wrong(text, event.where, "global_rank_as_device")
            if (other := first_rank.setdefault(event.index, rank)) != rank:
                return wrong(f"ranks {other} and {rank} both use GPU {event.index}", event.where)


def same_collectives(run):
    """all ranks call the same collectives in the same order"""
    calls = run.by_rank(events.Collective)
    rows = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(rows, 1):
        call_by_rank = dict(zip(calls, row))
        signatures = {rank: call and signature(call) for rank, call in call_by_rank.items()}
        if pair := differing_ranks(signatures):
            return different_calls(number, {rank: call_by_rank[rank] for rank in pair})
    if run.returncode is None:
        until = counted(min(map(len, calls.values())), "call")
        return unseen(f"the script did not end; {until} until then agree")


def signature(call):
    """Return what of a collective is the same on all ranks; objects may have any size."""
    return call.name, call.elements if call.name in ("all_reduce", "reduce", "broadcast") else 0


def different_calls(number, call_by_rank):
    """Return the verdict on two ranks that do not make the same call, of which one may be None."""
    calls = [call for call in call_by_rank.values() if call]
    sizes = len(calls) > 1 and calls[0].name == calls[1].name

    def words(call):
        if call is None:
            return "nothing"
        size = f" of {counted(call.elements, 'element')}" if sizes else ""
        return f"{call.name}{size} ({short(call.where)})"

    texts = [f"rank {rank} calls {words(call)}" for rank, call in call_by_rank.items()]
    page = "" if sizes else "collective_on_one_rank"
    return wrong(f"call {number}: {', '.join(texts)}", calls[0].where, page)
