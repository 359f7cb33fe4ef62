"""The drills: what is left of a run that is killed, stopped or resized."""

import contextlib
import math
import os
import random
import re
import signal
import time
from functools import partial
from itertools import chain

import torch

from ddp_check import events
from ddp_check.keeper import signalled
from ddp_check.plan import kill_all, reports
from ddp_check.protocol import STEPS
from ddp_check.ranks import counted, lowest
from ddp_check.rules import base, judge, judged, launch, training
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong

TOLERANCE, ABOUT = 1e-6, 1e-2  # of equal values, and of a factor
DOING = (events.Step, events.Batch, events.PassBegun, events.Collective, events.Final)
LOADS = r"\.load\b|load_|resume|from_pretrained"  # what a script that resumes does
GOES_ON = "it resumes"  # a title
FORGOTTEN = "resume_without_optimizer"  # the page about what a resume has to restore


def steps_of(run):
    return lowest(run.by_rank(events.Step))


def complete(found):
    """Return the number of steps before each save that is complete: its rank has gone on since."""
    last = max((at for at, event in enumerate(found) if isinstance(event, DOING)), default=0)
    return [event.steps for event in found[:last] if isinstance(event, events.Save)]


def saved_steps(run):
    """Return the number of steps before the last complete save, or None without one."""
    return max(chain(*map(complete, run.events_by_rank.values())), default=None)


def steps_in(found):
    return sum(isinstance(event, events.Step) for event in found)


def trains_on(found):
    """Return whether steps have followed a complete save."""
    return steps_in(found) > min(complete(found), default=math.inf)


def once(ready, act, process, folder, end):
    """Act soon after this is true of the events of any rank."""
    while time.monotonic() < end and process.poll() is None:
        if any(ready(found) for _, found in reports(folder).values()):
            time.sleep(random.uniform(0, 0.2))
            return act(process, folder)
        time.sleep(0.05)


def draws(run):
    """Return whether the training process draws random numbers between steps, as for dropout."""
    parts = [lowest(epoch).steps for epoch in run.epochs] or [steps_of(run)]
    return any(step.random for steps in parts for step in steps)


def compare(plan, resumed):
    """Return the verdict on the final weights of a resumed run, and what made them differ."""
    one, other = (final_weights(run) for run in (plan.undisturbed, resumed))
    if not one or not other:
        return unseen("no full model to compare: it is sharded, or nothing was trained")
    if bad := [name for (_, name), value in (one | other).items() if not value.isfinite().all()]:
        return wrong(f"{bad[0]} is not finite, so no run can be compared")
    if not (found := differing(one, other)):
        return passed("bit-for-bit identical to an uninterrupted run")
    both = [name for name in found if name in other and one[name].shape == other[name].shape]
    off = max((apart(one[name], other[name]) for name in both), default=math.inf)
    text = f"{len(found)} of {len(one)} tensors differ, first {found[0][1]}, by up to {off:.1e} of"
    return why_apart(plan, resumed, f"{text} the largest value")


def differing(one, other):
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def why_apart(plan, resumed, text):
    """Return the verdict on a resumed run with other weights: what was not restored."""
    whole, after = steps_of(plan.undisturbed), steps_of(resumed)
    line = "".join(
        one.where for one in lowest(resumed.by_rank(events.Load, events.StateLoaded))[-1:]
    )
    new = [rank for rank, of in resumed.by_rank(events.Step).items() if of and not of[0].has_state]
    if new and any(step.has_state for step in whole):
        text += f"; on rank {new[0]}, the optimizer starts again without its state"
        return wrong(text, line, FORGOTTEN)
    pairs = list(zip(whole[-len(after) :], after[-len(whole) :]))
    rates = [(now.rates[0], old.rates[0]) for old, now in pairs if now.rates != old.rates]
    if rates:
        text += "; the learning rate is {:.3g} instead of {:.3g}".format(*rates[0])
        text += ": is the scheduler restored?"
    loaders = [lowest(epoch) for epoch in plan.undisturbed.epochs]
    if draws(plan.undisturbed) or any(one.shuffle and not one.distributed for one in loaders):
        others = {one.source for one in plan.undisturbed.all(events.Drawn)} - {"torch"}
        which = f"that {' and '.join(sorted(others))} draws"
        if not others or any(old.random != now.random for old, now in pairs):
            which = "(dropout, batches)"
        text += f"; the optimizer is restored, the random numbers {which} are not"
        return unsure(text, line, "recipes/randomness")
    if differing(final_weights(plan.undisturbed), final_weights(plan.run("again"))):
        return unseen("two uninterrupted runs differ as well: seed the script")
    if not rates and any(old.inputs != now.inputs for old, now in pairs):
        return wrong(f"{text}; it goes on with other batches", line, "epoch_starts_again")
    return wrong(text, line, FORGOTTEN if rates else "")


def final_weights(run):
    """Return the final weights of rank 0's models: {(number of the model, name): tensor}."""
    path = run.folder / "final"
    models = torch.load(path, weights_only=True) if path.exists() else []
    found = {(at, name): value for at, model in enumerate(models) for name, value in model.items()}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def goes_on(plan, struck, resumed, line):
    """Yield the verdict on where an interrupted run has begun again."""
    before, after, total = (len(steps_of(run)) for run in (struck, resumed, plan.undisturbed))
    if resumed.returncode != 0:
        end = next(launch.script_ends(resumed))
        yield wrong(f"when started again, it fails: {end.text}", end.where, "", end.details)
    begins = f"when started again, it begins at step 0 of {total}"
    if after == total and not line and plan.restart_args is None:
        if not re.search(LOADS, resumed.text):
            yield unsure(f"{begins}: it has no resume")
        yield unsure(f"{begins}: does it need others to resume (--restart-args)?")
    if after == total and saved_steps(struck):
        yield wrong(begins, line)
    text = f"{before} steps, then {after}; uninterrupted, {total}"
    if before + after < total:
        yield wrong(f"{total - before - after} steps are skipped: {text}", line)
    yield passed(text)


def resumes(plan, struck, promise, may_lose):
    """Resume a run that was interrupted; yield the verdicts."""
    before, total = len(steps_of(struck)), len(steps_of(plan.undisturbed))
    saved = saved_steps(struck)
    reasons = {
        "the script fails even when it is not interrupted": plan.undisturbed.returncode != 0,
        "no rank called torch.save before the interruption": saved is None,
        "all steps were taken before the interruption: run more epochs": before >= total,
    }
    if told := [reason for reason, holds in reasons.items() if holds]:
        yield GOES_ON, unseen(told[0])
        return
    resumed = plan.run(struck.cwd.name, arguments=[*plan.arguments, *(plan.restart_args or [])])
    line = "".join(one.where for one in resumed.all(events.Load)[:1])
    verdict = next(goes_on(plan, struck, resumed, line))
    yield GOES_ON, verdict
    if verdict.status != base.PASS:
        return
    lost = before + len(steps_of(resumed)) - total
    kept = passed(f"{counted(lost, 'step')} repeated, all since the last save")
    if lost > before - saved:
        text = f"{lost} steps are repeated, although {lost - before + saved} of them were saved"
        kept = wrong(text, line, "epoch_starts_again")
    elif lost and not may_lose:
        where = struck.all(events.SigtermHandler)[0].where
        kept = wrong(f"{lost} steps are lost: they are not saved when it stops", where)
    yield promise, kept
    pairs = zip(judge(plan.undisturbed), judge(resumed))
    told = [now for old, now in pairs if old.status not in base.LEVELS]
    told = [now for now in told if now.status in (base.WRONG, base.FRAGILE)]
    yield from ((verdict.title, verdict) for verdict in told)
    ended = compare(plan, resumed)
    ended.follows = base.WRONG in {verdict.status for verdict in told}
    yield "the final weights are the same", ended


def kill(plan):
    """a killed rank costs no saved step"""
    moment = random.randrange(1 + len(steps_of(plan.undisturbed)) // 2)

    def strike(process, folder):
        pid, _ = random.choice([*reports(folder).values()])
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(pid, signal.SIGKILL)

    ready = partial(once, lambda found: trains_on(found) and steps_in(found) >= moment, strike)
    struck = plan.run("interrupted", during=ready)
    yield from resumes(plan, struck, "no saved step is repeated", True)


def sigterm(plan):
    """when the scheduler stops the job, no step is lost"""
    stop_all = partial(once, trains_on, lambda _, folder: signalled(folder, "terminate"))
    interrupted = plan.run("stopped", during=stop_all)  # as Slurm does
    if not interrupted.all(events.SigtermHandler):
        lost = len(steps_of(interrupted)) - (saved_steps(interrupted) or 0)
        yield GOES_ON, not_applicable(f"nothing handles SIGTERM: {lost} steps are lost")
        return
    yield from resumes(plan, interrupted, "no step is lost", False)


def world_size(plan):
    """N processes train like one with N times the batch"""
    yield "the steps agree", next(agree(plan))


def agree(plan):
    """Yield the verdict on the first steps of many processes and of one."""
    after_some = partial(once, lambda found: steps_in(found) > STEPS, kill_all)
    many = plan.run("many", scale=1, during=after_some)
    yield from not_kept(many)
    start = str(many.folder)
    one = plan.run("one", nproc=1, scale=plan.nproc, start=start, during=after_some)
    yield from not_kept(one)
    sizes = len(one.events_by_rank), len(many.events_by_rank)
    if sizes != (1, plan.nproc):
        yield unseen(f"{sizes[0]} and {sizes[1]} ranks, not 1 and {plan.nproc}")
    pairs = list(zip(steps_of(many), steps_of(one)))[:STEPS]
    for number, (ours, theirs) in enumerate(pairs, 1):
        if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours.rates, theirs.rates)):
            text = f"in step {number}, the learning rates are {ours.rates[0]:.3g} and "
            text += f"{theirs.rates[0]:.3g}: does a schedule count the samples of one rank?"
            yield wrong(text, ours.where)
    yield from other_samples(many, one)
    if many.all(events.GradientLost):
        yield unseen("both runs lack the gradient of what is gathered")
    found = first_apart(many, one, 1) or first_apart(many, one, len(pairs))
    if found and draws(many):
        yield unseen("the script draws random numbers, such as dropout's, while it trains")
    if found and any(step.buffers_changed for step in many.all(events.Step)):
        yield unseen("the model has buffers, such as BatchNorm's, which each process updates")
    if found:
        step, name, far, ours, theirs = found
        factor, ranks = (ours.norm() / theirs.norm()).item(), len(many.events_by_rank)
        text = f"the gradient of {name} is off by {far:.1e}, its norm {factor:.2f} times as large"
        for expected, done in ((ranks, "their sum"), (1 / ranks, "divides it again")):
            if abs(factor / expected - 1) < ABOUT:
                text += f": DDP takes the mean over the ranks, and the script {done}"
        if not ours.isfinite().all():
            text = f"the gradient of {name} is not finite"
        told = judged(training.gradients_are_averaged, many)
        yield wrong(f"step {step}: {text}", told.where, told.page)
    text = f"samples, learning rates and gradients of {counted(len(pairs), 'step')}, in float64"
    yield passed(f"{text}, to within {TOLERANCE:.0e}")


def not_kept(run):
    """Yield the verdict if the run kept no model to compare."""
    if not (run.folder / "step1").exists():
        text = "no model is wrapped in DistributedDataParallel and trained"
        if run.returncode != 0 and len(steps_of(run)) <= STEPS:
            text = f"{run.nproc} processes, in float64: {next(launch.script_ends(run)).text}"
        yield unseen(text)


def other_samples(many, one):
    """Yield the verdict if the steps do not have the same samples, or that is not seen."""
    pair = [list(of[0].values()) for of in (many.epochs, one.epochs) if of]
    if len(pair) < 2 or any(of.samples() is None for ranks in pair for of in ranks):
        yield unseen("no DataLoader was used to train, or its samples have no index")
    if pair[0][0].data != pair[1][0].data:
        yield unseen("the data differs from run to run, or with the number of ranks: seed it")
    for step in range(min(STEPS, *(len(of.batches) for ranks in pair for of in ranks))):
        ours, theirs = (sorted(chain(*(of.batches[step].base for of in ranks))) for ranks in pair)
        if ours != theirs:
            text = f"step {step + 1} has different samples: the data is not split"
            yield unseen(f"{text} as DistributedSampler does")


def apart(one, other):
    """Return the largest difference of two tensors, relative to their largest value."""
    both = torch.stack([one.to_dense().double(), other.to_dense().double()])
    return ((both[0] - both[1]).abs().max() / both.abs().max().clamp(min=1e-300)).item()


def first_apart(many, one, step):
    """Return the first gradient that differs in a step: (step, name, how far, both), or None."""
    models = (torch.load(run.folder / f"step{step}", weights_only=True) for run in (many, one))
    rows = [row for both in zip(*models) for row in zip(*both)]
    pairs = [(name, ours, theirs) for (name, ours), (_, theirs) in rows]
    pairs = [one for one in pairs if one[1] is not None and one[2] is not None]
    # Before BatchNorm, a bias has a gradient of about 0.
    least = 1e-6 * max((theirs.abs().max().item() for *_, theirs in pairs), default=0)
    found = ((step, name, apart(*both), *both) for name, *both in pairs)
    found = (one for one in found if not max(value.abs().max() for value in one[3:]) < least)
    return next((one for one in found if not one[2] <= TOLERANCE), None)


DRILLS = {"kill": kill, "sigterm": sigterm, "world-size": world_size}
