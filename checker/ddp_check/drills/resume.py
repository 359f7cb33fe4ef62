"""Drills that interrupt the script and start it again."""

import contextlib
import math
import os
import random
import re
import signal
import time
from dataclasses import replace
from functools import partial

from ddp_check import events
from ddp_check.drills.steps import (
    LOADS,
    SAVES,
    count_steps,
    differing,
    draws_numbers,
    final_weights,
    saved_steps,
    steps_of,
    trains_on,
)
from ddp_check.keeper import signal_processes
from ddp_check.numbers import distance
from ddp_check.plan import read_events
from ddp_check.ranks import counted, of_lowest_rank
from ddp_check.rules import base, judge, launch
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong

HAS_RESUME = r"\.load\b|load_|resume|from_pretrained"  # in the text of a script that resumes
RESUMES = "it resumes"  # a title
FORGOTTEN = "resume_without_optimizer"  # the page about what a resume has to restore
LEAST = 4.0  # seconds that the steps of an interrupted run take at least


def kill(plan):
    """a killed rank costs no saved step"""
    if reason := cannot_resume(plan):
        yield RESUMES, unseen(reason)
        return
    killed = plan.run("interrupted", during=kill_a_rank(plan), pause=pause_of(plan))
    yield from resumes(plan, killed, "no saved step is repeated", True)


def sigterm(plan):
    """when the scheduler stops the job, no step is lost"""
    if reason := cannot_resume(plan):
        yield RESUMES, unseen(reason)
        return
    stop_all = partial(once, trains_on, lambda _, folder: signal_processes(folder, "terminate"))
    stopped = plan.run("stopped", during=stop_all, pause=pause_of(plan))  # as Slurm does
    if not stopped.all(events.SigtermHandler):
        lost = len(steps_of(stopped)) - (saved_steps(stopped) or 0)
        yield RESUMES, not_applicable(f"nothing handles SIGTERM: {lost} steps are lost")
        return
    yield from resumes(plan, stopped, "no step is lost", False)


def own_folders(plan):
    """if only rank 0 finds the checkpoint, all ranks go on from it, or the run ends"""
    title = "the ranks resume together"
    if plan.launcher == "python":
        yield title, not_applicable("it starts its ranks itself, all in one folder")
        return
    if reason := cannot_resume(plan):
        yield title, unseen(reason)
        return
    killed = plan.run("split", during=kill_a_rank(plan), pause=pause_of(plan))
    if reason := not_interrupted(plan, killed):
        yield title, unseen(reason)
        return
    timeout = min(plan.timeout, 30 + 3 * plan.undisturbed.seconds)
    resumed = plan.run(
        "split", arguments=plan.words_of_restart, others_in="elsewhere", timeout=timeout
    )
    yield title, resumed_together(plan, resumed)


def cannot_resume(plan):
    """Return why the undisturbed run shows that no interruption can be resumed, or ""."""
    run = plan.undisturbed
    if run.returncode != 0:
        return "the script fails even when it is not interrupted"
    saves = run.all(*SAVES)
    if not saves:
        return "no rank saves with torch.save or torch.distributed.checkpoint"
    if min(save.steps for save in saves) >= len(steps_of(run)):
        return "the first save comes after the last step: save each epoch, or run more epochs"
    return ""


def not_interrupted(plan, struck):
    """Return why an interrupted run leaves nothing to resume, or ""."""
    if saved_steps(struck) is None:
        return "no rank had saved before the interruption"
    if len(steps_of(struck)) >= len(steps_of(plan.undisturbed)):
        return "all steps were taken before the interruption: run more epochs"
    return ""


def pause_of(plan):
    """Return how long to wait before each step, so that an interruption comes before the end."""
    steps = steps_of(plan.undisturbed)
    return max(0.0, (LEAST - (steps[-1].time - steps[0].time)) / len(steps))


def once(ready, act, process, folder, end):
    """Act soon after this is true of the events of any rank."""
    while time.monotonic() < end and process.poll() is None:
        if any(ready(found) for _, found in read_events(folder).values()):
            time.sleep(random.uniform(0, 0.2))
            return act(process, folder)
        time.sleep(0.05)


def kill_a_rank(plan):
    """Return what kills a rank at a random moment after a save."""
    moment = random.randrange(1 + len(steps_of(plan.undisturbed)) // 2)

    def strike(process, folder):
        pid, _ = random.choice([*read_events(folder).values()])
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(pid, signal.SIGKILL)

    return partial(once, lambda found: trains_on(found) and count_steps(found) >= moment, strike)


def resumes(plan, struck, promise, may_lose):
    """Resume a run that was interrupted; yield titles and verdicts."""
    if reason := not_interrupted(plan, struck):
        yield RESUMES, unseen(reason)
        return
    resumed = plan.run(struck.cwd.name, arguments=plan.words_of_restart)
    line = "".join(event.where for event in resumed.all(*LOADS)[:1])
    verdict = begins_again(plan, struck, resumed, line)
    yield RESUMES, verdict
    if verdict.status != base.PASS:
        return
    yield promise, steps_kept(plan, struck, resumed, line, may_lose)
    faults = new_faults(plan, resumed)
    yield from ((fault.title, fault) for fault in faults)
    ended = compare(plan, resumed)
    follows = base.WRONG in {fault.status for fault in faults}
    yield "the final weights are the same", replace(ended, follows=follows)


def begins_again(plan, struck, resumed, line):
    """Return the verdict on where an interrupted run has begun again."""
    before, after, total = (len(steps_of(run)) for run in (struck, resumed, plan.undisturbed))
    if resumed.returncode != 0:
        end = launch.script_ends(resumed)
        return wrong(f"when started again, it fails: {end.text}", end.where, "", end.details)
    text = f"when started again, it begins at step 0 of {total}"
    if after == total and not line and plan.restart_args is None:
        if not re.search(HAS_RESUME, resumed.source):
            return unsure(f"{text}: it has no resume")
        return unsure(f"{text}. If it needs more arguments to resume, add --restart-args '…'")
    if after == total and saved_steps(struck):
        return wrong(text, line)
    text = f"{before} steps, then {after}; uninterrupted, {total}"
    if before + after < total:
        return wrong(f"{total - before - after} steps are skipped: {text}", line)
    return passed(text)


def steps_kept(plan, struck, resumed, line, may_lose):
    """Return the verdict on the steps that a resumed run has repeated."""
    before, total = len(steps_of(struck)), len(steps_of(plan.undisturbed))
    lost, unsaved = before + len(steps_of(resumed)) - total, before - saved_steps(struck)
    if lost > unsaved:
        text = f"{lost} steps are repeated, although {lost - unsaved} of them were saved"
        return wrong(text, line, "epoch_starts_again")
    if lost and not may_lose:
        where = struck.all(events.SigtermHandler)[0].where
        return wrong(f"{lost} steps are lost: they are not saved when it stops", where)
    return passed(f"{counted(lost, 'step')} repeated, all since the last save")


def new_faults(plan, resumed):
    """Return what is wrong or fragile in a resumed run, and was not in the undisturbed one."""
    return [
        now
        for before, now in zip(judge(plan.undisturbed), judge(resumed))
        if before.status not in base.LEVELS and now.status in (base.WRONG, base.FRAGILE)
    ]


def compare(plan, resumed):
    """Return the verdict on the final weights of a resumed run, and what made them differ."""
    whole, again = final_weights(plan.undisturbed), final_weights(resumed)
    if not whole or not again:
        return unseen("no full model to compare: it is sharded, or nothing was trained")
    for (_, name), value in (whole | again).items():
        if not value.isfinite().all():
            return wrong(f"{name} is not finite, so no run can be compared")
    names = differing(whole, again)
    if not names:
        return passed("bit-for-bit identical to an uninterrupted run")
    common = [name for name in names if name in again and whole[name].shape == again[name].shape]
    apart = max((distance(whole[name], again[name]) for name in common), default=math.inf)
    text = f"{len(names)} of {len(whole)} tensors differ, first {names[0][1]}, by up to "
    return why_apart(plan, resumed, f"{text}{apart:.1e} of the largest value")


def why_apart(plan, resumed, text):
    """Return the verdict on a resumed run with other weights: what was not restored."""
    whole, after = steps_of(plan.undisturbed), steps_of(resumed)
    loads = resumed.of_lowest_rank(*LOADS, events.StateLoaded)
    line = loads[-1].where if loads else ""
    without_state = [
        rank
        for rank, steps in resumed.by_rank(events.Step).items()
        if steps and not steps[0].has_state
    ]
    if without_state and any(step.has_state for step in whole):
        text += f"; on rank {without_state[0]}, the optimizer starts again without its state"
        return wrong(text, line, FORGOTTEN)
    pairs = list(zip(whole[-len(after) :], after[-len(whole) :]))
    for old, now in pairs:
        if changed := [pair for pair in zip(now.rates, old.rates) if pair[0] != pair[1]]:
            text += "; the learning rate is {:.3g} instead of {:.3g}".format(*changed[0])
            return wrong(f"{text}: is the scheduler restored?", line, FORGOTTEN)
    if numbers := random_numbers(plan, pairs):
        text += f"; the optimizer is restored, the random numbers {numbers} are not"
        return unsure(text, line, "recipes/randomness")
    if differing(final_weights(plan.undisturbed), final_weights(plan.run("again"))):
        return unseen("two uninterrupted runs differ as well: seed the script")
    if any(old.inputs != now.inputs for old, now in pairs):
        return wrong(f"{text}; it goes on with other batches", line, "epoch_starts_again")
    return wrong(text, line)


def random_numbers(plan, pairs):
    """Return in words which random numbers make a resumed run another one, or ""."""
    run = plan.undisturbed
    loaders = [of_lowest_rank(epoch) for epoch in run.epochs]
    shuffles = any(entry.shuffle and not entry.distributed for entry in loaders)
    others = {event.source for event in run.all(events.Drawn)} - {"torch"}
    if not (draws_numbers(run) or shuffles or run.all(events.Drawn)):
        return ""
    if not others or any(old.random != now.random for old, now in pairs):
        return "(dropout, batches)"
    return f"that {' and '.join(sorted(others))} draws"


def resumed_together(plan, resumed):
    """Return the verdict on a run that was resumed where only rank 0 finds the checkpoint."""
    loads = resumed.by_rank(*LOADS)
    where = loads[0][0].where if loads.get(0) else ""
    if not where:
        return unseen("rank 0 loads nothing when it is started again")
    if any(loads[rank] for rank in loads if rank):
        return unseen("each rank finds the checkpoint: its path is the same from any folder")
    counts = {rank: len(steps) for rank, steps in resumed.by_rank(events.Step).items()}
    if resumed.returncode and not any(counts.values()):
        return passed(f"the run ends before its first step: {resumed.ending}")
    text = "only rank 0 finds the checkpoint, and nothing says so: "
    if resumed.returncode == 0 and len(set(counts.values())) == 1:
        first, *_ = [*new_faults(plan, resumed), compare(plan, resumed)]
        if first.status == base.PASS:
            return passed("what rank 0 has loaded reaches the others")
        if first.status not in (base.WRONG, base.FRAGILE):
            return unseen(first.text)
        return wrong(f"{text}{first.text}", where, "unseen_checkpoint")
    text += "it resumes, and the others begin anew, with "
    text += " and ".join(f"{counts[rank]} steps on rank {rank}" for rank in list(counts)[:2])
    if resumed.returncode != 0:
        ends = "it hangs" if resumed.returncode is None else resumed.ending
        text += f"; then {ends}"
    text += ". Compare where the ranks stand before the first step"
    return wrong(text, where, "unseen_checkpoint")
