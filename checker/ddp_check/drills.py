"""The drills: what is left of a run that is killed, stopped or resized."""

import contextlib
import math
import os
import random
import re
import signal
import time
from itertools import chain

import torch

from ddp_check import events
from ddp_check.keeper import signalled
from ddp_check.passes import epochs
from ddp_check.protocol import STEPS
from ddp_check.ranks import counted, lowest
from ddp_check.rules import RULES
from ddp_check.rules.base import (
    FRAGILE,
    PASS,
    QUIET,
    WRONG,
    not_applicable,
    passed,
    unseen,
    unsure,
    wrong,
)
from ddp_check.run import kill_all, reports

TOLERANCE, ABOUT = 1e-6, 1e-2  # of equal values, and of a factor
DOING = (events.Step, events.Batch, events.PassBegun, events.Collective, events.Final)
LOADS = r"\.load\b|load_|resume|from_pretrained"  # what a script that resumes does
RULE = {rule.name: rule for rule in RULES}
GOES_ON = "it resumes"  # a title
FORGOTTEN = "resume_without_optimizer"  # the page about what a resume has to restore


def steps_of(run):
    return lowest(run.of(events.Step))


def complete(found):
    """Return the number of steps before each save that is complete.

    It is once its rank has done something else: the file may have to be renamed first.
    """
    last = max((at for at, event in enumerate(found) if isinstance(event, DOING)), default=0)
    return [event.steps for event in found[:last] if isinstance(event, events.Saved)]


def saved_steps(run):
    """Return the number of steps before the last complete save, or None without one."""
    return max(chain(*map(complete, run.ranks.values())), default=None)


def steps_in(found):
    return sum(isinstance(event, events.Step) for event in found)


def trains_on(found):
    """Return whether steps have followed a complete save."""
    return steps_in(found) > min(complete(found), default=math.inf)


def once(ready, act, of_all=False):
    """Return a function that acts once this is true of the events of any rank, or of all ranks."""

    def during(process, folder, end):
        while time.monotonic() < end and process.poll() is None:
            ranks = [ready(found) for _, found in reports(folder).values()]
            if ranks and (all(ranks) if of_all else any(ranks)):
                act(process, folder)
                return
            time.sleep(0.05)

    return during


def draws(run):
    """Return whether the training process draws random numbers between steps, as for dropout."""
    parts = [lowest(epoch).steps for epoch in epochs(run)] or [steps_of(run)]
    return any(len({step.random for step in steps}) > 1 for steps in parts)


def compare(plan, resumed):
    """Return the verdict on the final weights of a resumed run, and what made them differ."""
    one, other = (final_weights(run) for run in (plan.undisturbed, resumed))
    if not one or not other:
        return unseen("no full model to compare: it is sharded, or nothing was trained")
    if bad := [name for (_, name), value in (one | other).items() if not value.isfinite().all()]:
        return wrong(f"{bad[0]} is not finite, so no run can be compared")
    found = differing(one, other)
    if not found:
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
    loads = lowest(resumed.of(events.Load, events.StateLoaded))
    line = loads[-1].where if loads else ""
    new = [rank for rank, of in resumed.of(events.Step).items() if of and not of[0].state]
    if new and any(step.state for step in whole):
        text += f"; on rank {new[0]}, the optimizer starts again without its state"
        return wrong(text, line, FORGOTTEN)
    pairs = list(zip(reversed(whole), reversed(after)))
    rates = [(now.rates[0], old.rates[0]) for old, now in pairs if now.rates != old.rates]
    if rates:
        text += "; the learning rate is {:.3g} instead of {:.3g}".format(*rates[-1])
        text += ": is the scheduler restored?"
    loaders = [lowest(epoch) for epoch in epochs(plan.undisturbed)]
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
    return {
        (number, name): value
        for number, model in enumerate(torch.load(path, weights_only=True) if path.exists() else [])
        for name, value in model.items()
        if isinstance(value, torch.Tensor)
    }


def too_little(plan, interrupted):
    """Return why nothing can be learned from the interrupted run, or an empty string."""
    if plan.undisturbed.returncode != 0:
        return "the script fails even when it is not interrupted"
    if saved_steps(interrupted) is None:
        return "no rank called torch.save before the interruption"
    if len(steps_of(interrupted)) >= len(steps_of(plan.undisturbed)):
        return "all steps were taken before the interruption: run more epochs"
    return ""


def goes_on(plan, struck, resumed, lost, line):
    """Yield the verdict on where an interrupted run has begun again."""
    before, after, total = (len(steps_of(run)) for run in (struck, resumed, plan.undisturbed))
    text = f"{before} steps, then {after}; uninterrupted, {total}"
    if resumed.returncode != 0:
        end = RULE["script_ends"](resumed)
        yield wrong(f"when started again, it fails: {end.text}", end.where, "", end.details)
    if after == total and not line and plan.restart_args is None:
        if not re.search(LOADS, resumed.text):
            yield unsure("it loads nothing and begins again at step 0: it has no resume")
        text = "with the same arguments, it loads nothing and begins again at step 0"
        yield unsure(f"{text}: does it need others to resume (--restart-args)?")
    if after == total and saved_steps(struck):
        yield wrong(f"when started again, it begins at step 0 of {total}", line)
    if lost < 0:
        yield wrong(f"{-lost} steps are skipped: {text}", line)
    yield passed(text)


def resumes(plan, struck, promise, may_lose):
    """Resume a run that was interrupted; yield the verdicts."""
    if reason := too_little(plan, struck):
        yield GOES_ON, unseen(reason)
        return
    resumed = plan.again(struck)
    before, after, total = (len(steps_of(run)) for run in (struck, resumed, plan.undisturbed))
    unsaved, lost = before - saved_steps(struck), before + after - total
    loads = resumed.all(events.Load)
    line = loads[0].where if loads else ""
    verdict = next(goes_on(plan, struck, resumed, lost, line))
    yield GOES_ON, verdict
    if verdict.status != PASS:
        return
    kept = passed(f"{counted(lost, 'step')} repeated, all since the last save")
    if lost > unsaved:
        text = f"{lost} steps are repeated, although {lost - unsaved} of them were saved"
        kept = wrong(text, line, "epoch_starts_again")
    elif lost and not may_lose:
        handler = struck.all(events.Handler)[0]
        kept = wrong(f"{lost} steps are lost: they are not saved when it stops", handler.where)
    yield promise, kept
    told = [rule(resumed) for rule in RULES if rule(plan.undisturbed).status in QUIET]
    told = [verdict for verdict in told if verdict.status in (WRONG, FRAGILE)]
    yield from ((verdict.title, verdict) for verdict in told)
    ended = compare(plan, resumed)
    ended.follows = WRONG in {verdict.status for verdict in told}
    yield "the final weights are the same", ended


def kill(plan):
    """a killed rank costs no saved step"""
    moment = random.randrange(1 + len(steps_of(plan.undisturbed)) // 2)

    def strike(process, folder):
        time.sleep(random.uniform(0, 0.2))
        found = reports(folder)
        if found and process.poll() is None:
            pid, _ = found[random.choice(list(found))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    ready = once(lambda found: trains_on(found) and steps_in(found) >= moment, strike)
    struck = plan.run("interrupted", during=ready)
    yield from resumes(plan, struck, "no saved step is repeated", True)


def sigterm(plan):
    """when the scheduler stops the job, no step is lost"""

    def stop_all(process, folder):  # as Slurm does
        time.sleep(random.uniform(0, 0.2))
        signalled(folder, "terminate")

    interrupted = plan.run("stopped", during=once(trains_on, stop_all))
    if not interrupted.all(events.Handler):
        saved = saved_steps(interrupted)
        steps = "all" if saved is None else len(steps_of(interrupted)) - saved
        yield GOES_ON, not_applicable(f"nothing handles SIGTERM: {steps} steps are lost")
        return
    yield from resumes(plan, interrupted, "no step is lost", False)


def world_size(plan):
    """N processes train like one with N times the batch"""
    after_some = once(lambda found: steps_in(found) > STEPS, kill_all, of_all=True)
    many = plan.run("many", scale=1, during=after_some)
    start, reason = str(many.folder), not_kept(many)
    if not reason:
        one = plan.run("one", nproc=1, scale=plan.nproc, start=start, during=after_some)
        reason = not_kept(one) and f"in one process: {not_kept(one)}"
    if not reason and (len(one.ranks), len(many.ranks)) != (1, plan.nproc):
        reason = f"asked for 1 and {plan.nproc} processes, the script starts"
        reason += f" {len(one.ranks)} and {len(many.ranks)}"
    yield "the steps agree", unseen(reason) if reason else next(agree(many, one))


def not_kept(run):
    """Return why the run kept no model to compare, or an empty string."""
    if (run.folder / "step1").exists():
        return ""
    if run.returncode == 0 or len(steps_of(run)) > STEPS:
        return "no model is wrapped in DistributedDataParallel and trained"
    return f"in float64: {RULE['script_ends'](run).text}"


def agree(many, one):
    """Yield the verdict on the first steps of many processes and of one."""
    pairs = list(zip(steps_of(many), steps_of(one)))[:STEPS]
    for number, (ours, theirs) in enumerate(pairs, 1):
        if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours.rates, theirs.rates)):
            text = f"in step {number}, the learning rates are {ours.rates[0]:.3g} and "
            text += f"{theirs.rates[0]:.3g}: does a schedule count the samples of one rank?"
            yield wrong(text, ours.where)
    yield from other_samples(many, one)
    if many.all(events.GradientLost):
        yield unseen("both runs lack the gradient of what is gathered")
    gradient, last = first_apart(many, one, 1, 1), len(pairs)
    weight = first_apart(many, one, last, 0)
    if (gradient or weight) and draws(many):
        yield unseen("the script draws random numbers, such as dropout's, while it trains")
    if (gradient or weight) and any(wrap.buffers for wrap in many.all(events.Wrap)):
        yield unseen("the model has buffers, such as BatchNorm's, which each process updates")
    if gradient:
        name, far, ours, theirs = gradient
        factor, ranks = (ours.norm() / theirs.norm()).item(), len(many.ranks)
        text = f"the gradient of {name} is off by {far:.1e}, its norm {factor:.2f} times as large"
        if abs(factor / ranks - 1) < ABOUT:
            text += ": DDP takes the mean over the ranks, and the script their sum"
        if abs(factor * ranks - 1) < ABOUT:
            text += ": DDP takes the mean over the ranks, and the script divides it again"
        if not ours.isfinite().all():
            text = f"the gradient of {name} is not finite"
        told = RULE["gradients_are_averaged"](many)
        yield wrong(text, told.where, told.page)
    if weight:
        text = f"after {last - 1} steps, {weight[0]} is off by {weight[1]:.1e}"
        yield wrong(text, steps_of(many)[last - 1].where)
    text = f"samples, learning rates, gradients and weights of {counted(last, 'step')}, in float64"
    yield passed(f"{text}, to within {TOLERANCE:.0e}")


def other_samples(many, one):
    """Yield the verdict if the steps do not have the same samples, or that is not seen."""
    pair = [list(of[0].values()) for of in map(epochs, (many, one)) if of]
    if len(pair) < 2:
        yield unseen("no DataLoader was used to train")
    if any(of.samples() is None for ranks in pair for of in ranks):
        yield unseen("the samples have no index")
    if pair[0][0].data != pair[1][0].data:
        yield unseen("the data differs from run to run, or with the number of ranks: seed it")
    for step in range(min(STEPS, *(len(of.batches) for ranks in pair for of in ranks))):
        ours, theirs = (sorted(chain(*(of.batches[step].base for of in ranks))) for ranks in pair)
        if ours != theirs:
            text = f"step {step + 1} has different samples: the data is not split"
            yield unseen(f"{text} as DistributedSampler does")


def models(run, step):
    """Return rank 0's parameters and gradients before a step: {name: (parameter, gradient)}."""
    found = torch.load(run.folder / f"step{step}", weights_only=True)
    return {name: (value, gradient) for model in found for name, value, gradient in model}


def apart(one, other, least=1e-300):
    """Return the largest difference of two tensors, relative to their largest value.

    If that is below `least`, the difference is relative to `least` instead.
    """
    one, other = one.to_dense().double(), other.to_dense().double()
    largest = max(one.abs().max().item(), other.abs().max().item(), least)
    return (one - other).abs().max().item() / largest if largest < math.inf else math.inf


def first_apart(many, one, step, of):
    """Return the first parameter (0) or gradient (1) that differs: (name, how far, both), or None.

    Before BatchNorm, a bias has a gradient of about 0: differences of that size do not count.
    """
    ours, theirs = models(many, step), models(one, step)
    pairs = [(name, both[of], theirs[name][of]) for name, both in ours.items()]
    pairs = [pair for pair in pairs if pair[1] is not None and pair[2] is not None]
    least = max([1e-300, *(1e-6 * other.abs().max().item() for *_, other in pairs)])
    found = ((name, apart(*both, least), *both) for name, *both in pairs)
    return next((pair for pair in found if not pair[1] <= TOLERANCE), None)


DRILLS = {"kill": kill, "sigterm": sigterm, "world-size": world_size}
