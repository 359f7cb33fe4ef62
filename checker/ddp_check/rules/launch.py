"""Rules about how the script starts and ends, its process group, GPUs and collectives."""

import re
import signal
from itertools import zip_longest

from ddp_check import events
from ddp_check.passes import passes
from ddp_check.protocol import is_own, own_frame
from ddp_check.rules.base import (
    counted,
    differ,
    fragile,
    is_sharded,
    joined,
    lowest,
    not_applicable,
    passed,
    short,
    unseen,
    unsure,
    wrong,
)

NETWORK = (
    r"URLError|gaierror|ConnectionError|MaxRetryError|name resolution|OfflineMode|HTTPError"
    r"|(FileNotFoundError|OSError): .*https?://"
)
DROP_THE_MODEL = "drop every reference to the DDP model (del model) before destroy_process_group"
LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu|accelerator|ddp_check/observer|Tensor-likes"


def script_ends(run):
    if run.returncode == 0 and run.option:
        yield started_by_option(run)
    elif run.returncode == 0:
        yield passed(f"after {run.seconds:.0f} s")
    elif run.returncode is None and not run.hangs:
        yield unsure(f"still busy after {run.seconds:.0f} s: shorten the run, or raise --timeout")
    elif run.returncode is None:
        yield hang(run)
    else:
        yield aborted_at_exit(run) or failure(run)


def started_by_option(run):
    """Return the verdict on a script that needs its local rank from its command line."""
    text = "it needs {}, which {} passes: read LOCAL_RANK from the environment instead"
    if run.option == "--local-rank":
        only = "torch.distributed.launch, but not torchrun,"
        return fragile(text.format(run.option, only), run.option_where)
    return wrong(text.format(run.option, "no launcher of PyTorch 2"), run.option_where)


def hang(run):
    """Return the verdict on a run that hangs."""
    text = f"still running after {run.seconds:.0f} s; {waiting(run)}"
    if joined(run) and all(run.of(events.Leave).values()):
        text += f". All ranks have left the process group. To rule out a race: {DROP_THE_MODEL}"
        return wrong(text, "", "handler_holds_model")
    lines = {rank: place[0] for rank, stack in run.stacks.items() if (place := own_lines(stack))}
    if any("_sync_buffers" in [name for *_, name in stack] for stack in run.stacks.values()):
        text += ". Buffers wait for all ranks to call the DDP model: evaluate model.module"
        return wrong(text, lowest(lines), "rank_0_evaluates_the_wrapper")
    if early := left_early(run):
        return wrong(f"{early}; {text}", lowest(lines), "uneven_batches")
    return wrong(text, lowest(lines), "collective_on_one_rank" if joined(run) else "")


def own_lines(stack):
    """Return the lines of the script in a stack, innermost first."""
    return [f"{path}:{line}" for path, line, _ in stack if is_own(path)]


def waiting(run):
    """Return where each rank was when the time ran out."""
    lines = []
    for rank, stack in run.stacks.items():
        own = own_lines(stack)
        inside = stack[0][2] if stack else "?"
        at = f"is at {short(own[0])}, in {inside}" if own else "has ended"
        lines.append(f"rank {rank} {at}")
    return "; ".join(lines) or "no rank has joined a process group"


def left_early(run):
    """Return which rank left the epoch loop before the others, in words, or an empty string."""
    found = passes(run)
    lines = {one.where for of in found.values() for one in of if one.steps}
    begun = {r: sum(one.where in lines for one in of if one.batches) for r, of in found.items()}
    steps = {rank: len(of) for rank, of in run.of(events.Step).items()}
    if len(begun) < 2 or not (pair := differ(begun)) or not min(begun.values()):
        return ""
    first, last = sorted(pair, key=begun.get)
    text = (
        f"rank {first} left the loop over the epochs after {begun[first]}, in step {steps[first]}"
    )
    return f"{text}, and rank {last} began the next: does each decide by its own loss?"


def aborted_at_exit(run):
    """Return the verdict if a rank was aborted when all its work was done, or None."""
    rank, code = run.status
    if code != -signal.SIGABRT or not run.of(events.Exit).get(rank):
        return None
    text = f"after {run.seconds:.0f} s; rank {rank} was aborted after its last line, a rare race"
    if by_framework(run):
        return passed(f"{text} in PyTorch")
    return fragile(f"{text} of gloo's threads", "", "late_import")


def failure(run):
    """Return the verdict on a run that failed: the fault may not be the script's."""
    text, where, details = run.ending, run.error_where, tuple(run.traceback)
    if re.search(NETWORK, " ".join([*run.errors, *details])):
        text += "; it needs the network: download the data first"
        return unsure(text, where, "", details)
    if text.startswith("ModuleNotFoundError") or run.fails_in_an_import:
        text += "; run the checker in the environment of the script"
        return unsure(text, where, "", details)
    if run.translate and re.search(LACKS_GPUS, " ".join([run.ending, *telling(details[-6:])])):
        text = f"the checker cannot translate this for the CPU: {text}"
        return unsure(text, where, "", details)
    if run.left_out:
        names = ", ".join(run.left_out)
        text += f"; {names} could be a checkpoint and was left out: give its absolute path"
    if early := left_early(run):
        return wrong(f"{early}; {text}", where, "uneven_batches", details)
    return wrong(text, where, "", details)


def telling(details):
    """Return a traceback's lines without names of the script's files, and calls passed on."""
    passed_on = "in __torch_function__"  # by the observer, as any call of PyTorch
    return [line for line in details if not own_frame(line) and not line.endswith(passed_on)]


# ---------------------------------------------------------------- the process group


def one_group(run):
    ranks = joined(run)
    if not ranks and run.returncode == 0:
        yield alone(run)
    for event in run.all(events.OtherMachine):
        text = f"the ranks meet at {event.host}, not this machine (changed for this run)"
        yield fragile(f"{text}: let the launcher set MASTER_ADDR", event.where)
    yield from fixed_port(run)
    if run.returncode != 0:
        yield unseen("the script did not finish")
    if missing := run.ranks.keys() - ranks.keys():
        yield wrong(f"rank {min(missing)} did not join")
    yield from left_badly(run)
    yield passed(counted(len(ranks), "rank"), lowest(ranks)[0].where)


def alone(run):
    """Return the verdict on a run in which no process joined a process group."""
    if run.all(events.Step):
        text = "no process joined a process group: each trains on its own"
        return wrong(f"{text}; diffs/README.md shows what to add")
    last = (run.own.strip() or "nothing is printed").splitlines()[-1]
    return unsure(f"no process joined a process group or trained: {last}")


def fixed_port(run):
    """Yield the verdict if the port stands in the script or in a small file beside it."""
    for found in joined(run).values():
        port = found[0].port
        place = port and run.place_of(port)
        if place:
            text = f"the port is always {port}: two jobs on one node would collide"
            yield fragile(text, place if isinstance(place, str) else found[0].where, "fixed_port")


def by_framework(run):
    """Return whether a library joined the process group, so leaving it is not the script's task."""
    return not all(event.own for event in run.all(events.Join))


def left_badly(run):
    """Yield the verdict if a rank skips destroy_process_group or Python's normal exit."""
    for rank, found in run.of(events.Exit).items():
        if not found:
            text = f"rank {rank} ends with os._exit: atexit functions are not called"
            yield fragile(text, "", "os_exit")
        elif found[0].open_group and not by_framework(run):
            text = f"rank {rank} did not call destroy_process_group"
            yield fragile(text, joined(run)[rank][0].where, "destroy_missing")


def no_thread_left(run):
    ranks = joined(run)
    if run.for_nccl or "get_default_backend_for_device" in run.text:
        yield not_applicable("the script is for NCCL")
    if by_framework(run):
        yield not_applicable("a library joined the process group")
    if is_sharded(run):
        yield unseen("with sharded parameters, PyTorch itself may keep the group alive")
    for rank, found in run.of(events.Exit).items():
        if not found or not found[0].threads:
            continue
        text = f"rank {rank} has some, and in rare cases aborts after its work is done"
        if found[0].nn and not ranks[rank][0].nn:
            cure = "import torch.distributed.nn at the top: DDP and optimizers import it too late"
            yield fragile(f"{text}: {cure}", ranks[rank][0].where, "late_import")
        yield fragile(f"{text}: {DROP_THE_MODEL}", "", "handler_holds_model")
    if not all(run.of(events.Exit).values()):
        yield unseen("a rank did not finish")
    if any(event.open_group for event in run.all(events.Exit)):
        yield unseen("the process group was not destroyed")
    yield passed(counted(len(ranks), "rank"))


# ---------------------------------------------------------------- GPUs


def own_gpu(run):
    used = {rank: found for rank, found in run.of(events.Gpu).items() if found}
    if any(event.chosen for event in run.all(events.Gpu)):
        yield unseen("the script chooses what each rank can see")
    uses = {rank: [one for one in of if one.use == "use"] or of for rank, of in used.items()}
    for rank, found in uses.items():
        for event in found:
            if not 0 <= event.index < event.count:
                text = f"rank {rank} uses GPU {event.index}, but a node has {event.count}"
                yield wrong(text, event.where, "global_rank_as_device")
    numbers = {rank: {event.index for event in found} for rank, found in uses.items()}
    for rank, found in list(uses.items())[1:]:
        other = min(numbers)
        for event in found:
            if event.index in numbers[other]:
                text = f"ranks {other} and {rank} use the same GPU, number {event.index}"
                yield wrong(text, event.where)
    yield passed(counted(len(used), "rank"), lowest(used)[0].where)


# ---------------------------------------------------------------- collectives


def same_collectives(run):
    calls = run.of(events.Collective)
    together = zip_longest(*calls.values()) if run.returncode == 0 else zip(*calls.values())
    for number, row in enumerate(together, 1):
        found = dict(zip(calls, row))
        if pair := differ({rank: event and event.name for rank, event in found.items()}):
            said = " and ".join(f"rank {rank} calls {named(found[rank])}" for rank in pair)
            where = next((found[rank].where for rank in pair if found[rank]), "")
            yield wrong(f"call {number}: {said}", where, "collective_on_one_rank")
    fewest = min(map(len, calls.values()))
    if run.returncode is None:
        yield unseen(f"the script hangs; {counted(fewest, 'call')} until then agree")
    yield passed(counted(fewest, "call"))


def named(event):
    """Return the name of a collective and the line that calls it, or "nothing" without an event."""
    return f"{event.name} ({short(event.where)})" if event else "nothing"
