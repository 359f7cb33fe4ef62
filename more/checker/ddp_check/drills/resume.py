"""Drills that interrupt the script and start it again."""

import contextlib
import math
import time
from dataclasses import replace
from functools import partial
from itertools import chain

import psutil
import torch

from ddp_check import events
from ddp_check.keeper import observed_process, signal_processes
from ddp_check.numbers import distance
from ddp_check.ranks import counted
from ddp_check.reading import Reader
from ddp_check.rules import base, judge, launch
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong

INCOMPLETE = "resume_without_optimizer"  # the page about what a resume has to restore
MIN_TRAINING_SECONDS = 4.0  # least number of seconds that the steps of an interrupted run take
# Events that show that a rank has finished a save and has gone on:
GOES_ON = (events.Step, events.Batch, events.PassBegun, events.Collective, events.Final)


def kill(plan):
    """a killed rank costs no saved step"""
    is_late_enough = partial(goes_on_after_a_save, least=len(plan.undisturbed.steps) // 3)
    during = partial(act_when, is_late_enough, kill_highest_rank)
    killed = plan.run("interrupted", during=during, pause=pause_of(plan))
    rank, events_of_rank = max(killed.events_by_rank.items())
    taken = counted(count_steps(events_of_rank), "step")
    promise = f"no saved step is repeated (rank {rank} was killed after {taken})"
    yield from resumes(plan, killed, promise, may_lose_steps=True)


def sigterm(plan):
    """when the scheduler stops the job, no step is lost"""
    stop_all = partial(signal_processes, method="terminate")  # Slurm, too, signals all processes
    during = partial(act_when, goes_on_after_a_save, stop_all)
    stopped = plan.run("stopped", during=during, pause=pause_of(plan))
    if stopped.all(events.SigtermHandler):
        yield from resumes(plan, stopped, "no step is lost", may_lose_steps=False)
    else:
        lost = len(stopped.steps) - (saved_steps(stopped) or 0)
        yield "it resumes", not_applicable(f"nothing handles SIGTERM: {lost} steps are lost")


def cannot_resume(run):
    """Return why an interrupted run could not be resumed, judging by the undisturbed one, or ""."""
    if run.returncode != 0:
        return "the script fails even when it is not interrupted"
    saves = run.all(events.Save)
    if not saves:
        return "no rank saves with torch.save"
    if min(save.steps for save in saves) >= len(run.steps):
        return "the first save comes after the last step: save each epoch, or run more epochs"
    return ""


# ---------------------------------------------------------------- when a run is interrupted


def pause_of(plan):
    """Return how many seconds to wait before each step, to leave time for an interruption."""
    steps = plan.undisturbed.steps
    return max(0.0, (MIN_TRAINING_SECONDS - (steps[-1].time - steps[0].time)) / len(steps))


def act_when(is_ready, act, process, folder, end):
    """Call `act(folder)` as soon as the events of a rank satisfy `is_ready`, unless the run ends.

    `Plan.run` passes the last three arguments to the function that it is given as `during`.
    """
    reader = Reader(folder)
    while time.monotonic() < end and process.poll() is None:
        if any(is_ready(events_of_rank) for _, events_of_rank in reader.processes().values()):
            return act(folder)
        time.sleep(0.05)


def kill_highest_rank(folder):
    """Kill the rank with the highest number, unless it has ended."""
    _, (pid, _) = max(Reader(folder).processes().items())
    with contextlib.suppress(psutil.Error):  # the rank may have ended
        if process := observed_process(pid, folder):
            process.kill()


def count_steps(events_of_rank):
    """Return how many steps a rank has taken."""
    return sum(isinstance(event, events.Step) for event in events_of_rank)


def complete_saves(events_of_rank):
    """Return how many steps preceded each complete save, that is, one followed by other work."""
    going_on = [at for at, event in enumerate(events_of_rank) if isinstance(event, GOES_ON)]
    before = events_of_rank[: going_on[-1]] if going_on else []
    return [event.steps for event in before if isinstance(event, events.Save)]


def goes_on_after_a_save(events_of_rank, least=0):
    """Return whether a rank has taken a step after a complete save, and more steps than `least`."""
    saved = min(complete_saves(events_of_rank), default=math.inf)
    return count_steps(events_of_rank) > max(saved, least)


def saved_steps(run):
    """Return the number of steps before the last complete save, or None if there is none."""
    return max(chain(*map(complete_saves, run.events_by_rank.values())), default=None)


# ---------------------------------------------------------------- what a resumed run shows


def resumes(plan, interrupted, promise, may_lose_steps):
    """Resume an interrupted run; yield pairs of a title and a verdict."""
    if saved_steps(interrupted) is None:
        yield "it resumes", unseen("no rank had saved before the interruption")
        return
    if len(interrupted.steps) >= len(plan.undisturbed.steps):
        yield "it resumes", unseen("all steps were taken before the interruption: run more epochs")
        return
    resumed = plan.run(interrupted.cwd.name, arguments=plan.restart_arguments)
    where = line_of_load(plan, resumed)
    verdict = begins_again(plan, interrupted, resumed, where)
    yield "it resumes", verdict
    if verdict.status != base.PASS:
        return
    yield promise, steps_kept(plan, interrupted, resumed, where, may_lose_steps)
    faults = new_faults(plan, resumed)
    yield from ((fault.title, fault) for fault in faults)
    follows = base.WRONG in {fault.status for fault in faults}
    yield "the final weights are the same", replace(same_weights(plan, resumed), follows=follows)


def line_of_load(plan, resumed):
    """Return the line in which a resumed run loads its checkpoint, or "".

    Files that the undisturbed run also loads before its first step are data or a backbone.
    """
    begun = plan.undisturbed.steps[0].time
    known = {load.where for load in plan.undisturbed.all(events.Load) if load.time < begun}
    lines = [load.where for load in resumed.all(events.Load) if load.where not in known]
    return lines[0] if lines else ""


def begins_again(plan, interrupted, resumed, where):
    """Return the verdict on the step at which an interrupted run has continued."""
    before, after, total = map(len, (interrupted.steps, resumed.steps, plan.undisturbed.steps))
    if resumed.returncode != 0:
        end = launch.script_ends(resumed)
        if end.status != base.WRONG:
            return unseen(f"when started again: {end.text}")
        return wrong(f"when started again, it fails: {end.text}", end.where, "", end.details)
    if after == total:
        text = f"when started again, it begins at step 0 of {total}"
        if where or plan.restart_args is not None:  # it loaded a file, or got --restart-args
            return wrong(text, where)
        return unsure(f"{text}: has it no resume, or does it need --restart-args='…' to resume?")
    text = f"{before} steps, then {after}; uninterrupted, {total}"
    if before + after < total:
        return wrong(f"{total - before - after} steps are skipped: {text}", where)
    return passed(text)


def steps_kept(plan, interrupted, resumed, where, may_lose_steps):
    """Return the verdict on the steps that a resumed run has repeated."""
    before, total = len(interrupted.steps), len(plan.undisturbed.steps)
    repeated, unsaved = before + len(resumed.steps) - total, before - saved_steps(interrupted)
    if repeated > unsaved:
        text = f"{repeated} steps are repeated, although {repeated - unsaved} of them were saved"
        return wrong(text, where, "epoch_starts_again")
    if repeated and not may_lose_steps:
        handler = interrupted.all(events.SigtermHandler)[0]
        return wrong(f"{repeated} steps are lost: they are not saved when it stops", handler.where)
    return passed(f"{counted(repeated, 'step')} repeated, all since the last save")


def new_faults(plan, resumed):
    """Return what is wrong or fragile in a resumed run, but was not in the undisturbed one."""
    return [
        now
        for before, now in zip(judge(plan.undisturbed), judge(resumed))
        if before.status not in base.LEVELS and now.status in (base.WRONG, base.FRAGILE)
    ]


# ---------------------------------------------------------------- the final weights


def same_weights(plan, resumed):
    """Return the verdict on the final weights of a resumed run, with the reason if they differ."""
    expected, weights = final_weights(plan.undisturbed), final_weights(resumed)
    if not expected or not weights:
        return unseen("no full model to compare: it is sharded, or nothing was trained")
    names = names_that_differ(expected, weights)
    if not names:
        return passed("bit-for-bit identical to an uninterrupted run")
    pairs = [
        (expected[name], weights[name])
        for name in names
        if name in weights and expected[name].shape == weights[name].shape
    ]
    largest = max((distance(*pair) for pair in pairs), default=math.inf)
    text = f"{len(names)} of {len(expected)} tensors differ, first {names[0][1]}, by up to "
    return not_restored(plan, resumed, f"{text}{largest:.1e} of the largest value")


def final_weights(run):
    """Return the final weights of rank 0's models: {(number of the model, name): tensor}."""
    path = run.folder / "final"
    models = torch.load(path, weights_only=True) if path.exists() else []
    return {
        (number, name): value
        for number, model in enumerate(models)
        for name, value in model.items()
        if isinstance(value, torch.Tensor)
    }


def names_that_differ(weights, others):
    """Return the names of the weights that differ at the end of two runs."""
    return [
        name
        for name in weights
        if name not in others or not torch.equal(weights[name], others[name])
    ]


def not_restored(plan, resumed, text):
    """Return the verdict on a resumed run whose weights differ, which says what was not restored.

    It looks at the optimizer, then the learning rate, then the random numbers. If all are restored,
    it runs the script once more, because two uninterrupted runs may differ as well.
    """
    undisturbed, after = plan.undisturbed.steps, resumed.steps
    loads = resumed.of_lowest_rank(events.Load, events.StateLoaded)
    where = loads[-1].where if loads else ""
    for rank, steps in resumed.by_rank(events.Step).items():
        if steps and not steps[0].has_state and any(step.has_state for step in undisturbed):
            text += f"; on rank {rank}, the optimizer starts again without its state"
            return wrong(text, where, INCOMPLETE)
    # Both runs end with the same steps: if 8 of 20 follow an interruption, these are 13 to 20.
    pairs = list(zip(undisturbed[-len(after) :], after[-len(undisturbed) :]))
    for old, now in pairs:
        if changed := [pair for pair in zip(now.rates, old.rates) if pair[0] != pair[1]]:
            text += "; the learning rate is {:.3g} instead of {:.3g}".format(*changed[0])
            return wrong(f"{text}: is the scheduler restored?", where, INCOMPLETE)
    if any(old.rng != now.rng for old, now in pairs):
        text += "; the optimizer is restored, and the random numbers are not, which dropout, "
        return unsure(f"{text}augmentation or a shuffle take", where, "recipes/bitwise_resume")
    if names_that_differ(final_weights(plan.undisturbed), final_weights(plan.run("again"))):
        return unseen("two uninterrupted runs differ as well: seed the script")
    return wrong(text, where)
