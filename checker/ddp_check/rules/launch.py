"""Rules about how the script starts and ends, its process group, GPUs and collectives."""

import re
import signal
from itertools import zip_longest

from ddp_check import events
from ddp_check.protocol import is_own, own_frame
from ddp_check.ranks import counted, differ, lowest, short
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, wrong

NETWORK = (
    r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"
    r"|(FileNotFoundError|OSError): .*https?://"
)
DROP_THE_MODEL = "drop every reference to the DDP model (del model) before destroy_process_group"
PASSED_ON = "in __torch_function__"
BUFFERS = "Buffers wait for all ranks to call the DDP model: evaluate model.module"
LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu|accelerator|ddp_check/observer|Tensor-likes"


def script_ends(run):
    """the script ends"""
    text = f"after {run.seconds:.0f} s"
    needs = f"it needs {run.option}, which {{}} passes: read LOCAL_RANK from the environment"
    rank, code = run.status
    if run.returncode == 0 and run.option == "--local-rank":
        yield fragile(needs.format("torch.distributed.launch, not torchrun,"), run.option_where)
    elif run.returncode == 0 and run.option:
        yield wrong(needs.format("no launcher of PyTorch 2"), run.option_where)
    elif run.returncode == 0:
        yield passed(text)
    elif run.hangs:
        yield hang(run)
    elif run.returncode is None:
        yield unsure(f"still busy {text}: shorten the run, or raise --timeout")
    elif code == -signal.SIGABRT and run.by_rank(events.Exit).get(rank):
        text += f"; rank {rank} was aborted after its last line, a rare race of gloo's threads"
        yield passed(text) if by_framework(run) else fragile(text, "", "late_import")
    else:
        yield failure(run)


def hang(run):
    """Return the verdict on a run that hangs, with the place where each rank waits."""
    lines, places = [], []
    for rank, stack in run.stacks.items():
        own = [f"{path}:{line}" for path, line, _ in stack if is_own(path)]
        at = f"is at {short(own[0])}, in {stack[0][2]}" if own else "has ended"
        places.append(f"rank {rank} {at}")
        lines += own[:1]
    told = "; ".join(places) or "no rank has joined a process group"
    text = f"still running after {run.seconds:.0f} s; {told}"
    if run.joins and all(run.by_rank(events.Leave).values()):
        text += f". All ranks have left the process group. To rule out a race: {DROP_THE_MODEL}"
        return wrong(text, "", "handler_holds_model")
    return blamed(run, text, next(iter(lines), ""), "collective_on_one_rank" if run.joins else "")


def blamed(run, text, where, page="", details=()):
    """Return the verdict on a run that fails or hangs, perhaps as a rank does not take part."""
    syncs = [rank for rank, of in run.stacks.items() if "_sync_buffers" in [one[2] for one in of]]
    found = run.passes_by_rank
    loops = {one.where for of in found.values() for one in of if one.steps}
    begun = {r: sum(one.where in loops for one in of if one.batches) for r, of in found.items()}
    pair = sorted(differ(begun) or (), key=begun.get) if begun else ()
    if pair and min(begun.values()) and pair[0] not in syncs:  # it evaluates the DDP model
        step = f"{begun[pair[0]]}, in step {len(run.by_rank(events.Step)[pair[0]])}"
        early = f"rank {pair[0]} left the loop over the epochs after {step}, and rank {pair[1]} "
        early += "began the next: does each decide by its own loss?"
        return wrong(f"{early}; {text}", where, "recipes/early_stopping", details)
    if syncs or "_sync_buffers" in str(details):
        return wrong(f"{BUFFERS}; {text}", where, "rank_0_evaluates_the_wrapper", details)
    return wrong(text, where, page, details)


def failure(run):
    """Return the verdict on a run that failed: the fault may not be the script's."""
    text, details, cure = run.ending, tuple(run.traceback), ""
    # Without names of the script's files, and calls that the observer passes on:
    telling = [one for one in details[-6:] if not (own_frame(one) or one.endswith(PASSED_ON))]
    lacks = re.search(LACKS_GPUS, " ".join([text, *telling]))
    if re.search(NETWORK, " ".join([*(one[1] for one in run.raised), text, *details])):
        cure = "it needs the network: download the data first"
    elif text.startswith("ModuleNotFoundError") or run.fails_in_an_import:
        cure = "run the checker in the environment of the script"
    elif run.translate and lacks and "must not be negative" not in text:  # that fails on GPUs, too
        cure = "the checker cannot translate this for the CPU"
    if cure:
        return unsure(f"{text}; {cure}", run.error_where, "", details)
    if run.left_out:
        names = ", ".join(run.left_out)
        text += f"; {names} could be a checkpoint and was left out: give its absolute path"
    return blamed(run, text, run.error_where, "", details)


def one_group(run):
    """one process group, destroyed at the end"""
    ranks, none = run.joins, "no process joined a process group"
    if not ranks and run.returncode == 0 and run.all(events.Step):
        yield wrong(f"{none}: each trains on its own; diffs/README.md shows what to add")
    if not ranks and run.returncode == 0:
        _, _, last = run.printed.strip().rpartition("\n")
        yield unsure(f"{none} or trained: {last or 'nothing is printed'}")
    for event in run.all(events.OtherMachine):
        text = f"the ranks meet at {event.host}, not this machine (changed for this run)"
        yield fragile(f"{text}: let the launcher set MASTER_ADDR", event.where)
    for join in ranks.values():
        for name, text in {"": run.text, **run.others}.items():
            if join.port and (match := re.search(rf"\b{join.port}\b", text)):
                line = f"{name}:{text[: match.start()].count(chr(10)) + 1}" if name else join.where
                said = f"the port is always {join.port}: two jobs on one node would collide"
                yield fragile(said, line, "fixed_port")
    if run.returncode != 0:
        yield unseen("the script did not finish")
    if missing := run.events_by_rank.keys() - ranks.keys():
        yield wrong(f"rank {min(missing)} did not join")
    for rank, found in run.by_rank(events.Exit).items():
        if not found:
            yield fragile(f"rank {rank} ends with os._exit: no atexit function runs", "", "os_exit")
        elif found[0].group_open and not by_framework(run):
            text = f"rank {rank} did not call destroy_process_group"
            yield fragile(text, ranks[rank].where, "destroy_missing")
    yield passed(counted(len(ranks), "rank"), lowest(ranks).where)


def by_framework(run):
    """Return whether a library joined the process group, so leaving it is not the script's task."""
    return not all(event.by_script for event in run.all(events.Join))


def no_thread_left(run):
    """no gloo thread is left at exit"""
    ranks = run.joins
    if run.for_nccl or "get_default_backend_for_device" in run.text:
        yield not_applicable("with NCCL, for which the script is written, there are none")
    if by_framework(run) or run.is_sharded:
        yield not_applicable("a library joined the group, or keeps it alive for sharded parameters")
    exits = run.by_rank(events.Exit)
    for rank, event in (
        (rank, one) for rank, of in exits.items() for one in of if one.gloo_threads
    ):
        text = f"rank {rank} has some, and in rare cases aborts after its work is done"
        if event.nn_imported and not ranks[rank].nn_imported:
            cure = "import torch.distributed.nn at the top: DDP and optimizers import it too late"
            yield fragile(f"{text}: {cure}", ranks[rank].where, "late_import", follows=True)
        yield fragile(f"{text}: {DROP_THE_MODEL}", "", "handler_holds_model", follows=True)
    if not all(exits.values()) or any(event.group_open for event in run.all(events.Exit)):
        yield unseen("a rank did not finish, or did not destroy the process group")


def own_gpu(run):
    """each rank uses a GPU of its own"""
    if any(event.visible_chosen for event in run.all(events.Gpu)):
        yield unseen("the script chooses what each rank can see")
    first = {}  # number of a GPU -> the first rank that uses it
    for rank, of in run.by_rank(events.Gpu).items():
        for event in [one for one in of if one.use == "use"] or of:
            if not 0 <= event.index < event.count:
                text = f"rank {rank} uses GPU {event.index}, but a node has {event.count}"
                yield wrong(text, event.where, "global_rank_as_device")
            if (other := first.setdefault(event.index, rank)) != rank:
                yield wrong(f"ranks {other} and {rank} both use GPU {event.index}", event.where)


def same_collectives(run):
    """all ranks call the same collectives in the same order"""
    calls = run.by_rank(events.Collective)
    together = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(together, 1):
        found = dict(zip(calls, row))
        if pair := differ({rank: event and event.name for rank, event in found.items()}):
            ends = [found[rank] for rank in pair]
            said = [f"{one.name} ({short(one.where)})" if one else "nothing" for one in ends]
            text = f"call {number}: rank {pair[0]} calls {said[0]}, rank {pair[1]} calls {said[1]}"
            yield wrong(text, (ends[0] or ends[1]).where, "collective_on_one_rank")
    if run.returncode is None:
        until = counted(min(map(len, calls.values())), "call")
        yield unseen(f"the script hangs; {until} until then agree")
