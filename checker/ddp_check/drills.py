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
from ddp_check.rules.base import PASS, WRONG, not_applicable, passed, unseen, unsure, wrong
from ddp_check.run import kill_all, reports

TOLERANCE = 1e-6
DOING = (events.Step, events.Batch, events.PassBegun, events.Collective, events.Final)
LOADS = r"\.load\b|load_|resume|from_pretrained"  # what a script that resumes does
RULE = {rule.name: rule for rule in RULES}
GOES_ON, SAME_SAMPLES = "it resumes", "each step has the same samples"  # titles of verdicts
SAME_END = "the final weights are the same"


def steps_of(run):
    return lowest(run.of(events.Step))


def saved_steps(run):
    """Return the number of steps before the last complete save, or None without one.

    A save counts once its rank has done something else: the file may have to be renamed first.
    """
    saved = []
    for found in run.ranks.values():
        last = max((at for at, event in enumerate(found) if isinstance(event, DOING)), default=0)
        saved += [event.steps for event in found[:last] if isinstance(event, events.Saved)]
    return max(saved, default=None)


def steps_in(found):
    return sum(isinstance(event, events.Step) for event in found)


def has_saved(found):
    saved = (at for at, event in enumerate(found) if isinstance(event, events.Saved))
    return steps_in(found[next(saved, len(found)) :]) > 0


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
    one, other = (final_weights(run) for run in (plan.undisturbed, resumed))
    if one is None or other is None:
        return unseen("no full model to compare: it is sharded, or nothing was trained")
    bad = next((name for name, value in (one | other).items() if not is_finite(value)), None)
    differing = [n for n in one if n not in other or not torch.equal(one[n], other[n])]
    if bad or not differing:
        text = "bit-for-bit identical to an uninterrupted run"
        return wrong(f"{bad} is not finite, so no run can be compared") if bad else passed(text)
    both = [n for n in differing if n in other and one[n].shape == other[n].shape]
    off = max((apart(one[name], other[name]) for name in both), default=math.inf)
    text = f"{len(differing)} of {len(one)} tensors differ, by up to {off:.1e} of the largest value"
    first = next(iter(steps_of(resumed)), None)
    if first and not first.state and any(step.state for step in steps_of(plan.undisturbed)):
        text += "; the optimizer starts again without its state"
        return wrong(text, first.where, "resume_without_optimizer")
    loaders = [lowest(epoch) for epoch in epochs(plan.undisturbed)]
    if draws(plan.undisturbed) or any(one.shuffle and not one.distributed for one in loaders):
        numbers = f"the random numbers {not_restored(plan.undisturbed, resumed)} are not"
        return unsure(f"{text}; the optimizer is restored, {numbers} (recipes/randomness.md)")
    again = final_weights(plan.run("again")) or {}
    if all(name in again and torch.equal(one[name], again[name]) for name in one):
        return wrong(f"{text}; the first is {differing[0]}")
    return unseen("two uninterrupted runs differ as well: seed the script")


def not_restored(whole, resumed):
    """Return which random numbers differ after a restart: if PyTorch's agree, the others."""
    others = {one.source for one in whole.all(events.Drawn)} - {"torch"}
    before, after = steps_of(whole), steps_of(resumed)
    last = zip(reversed(before), reversed(after))
    if not others or any(one.random != other.random for one, other in last):
        return "(dropout, batches)"
    return f"that {' and '.join(sorted(others))} draws"


def is_finite(value):
    return bool(value.isfinite().all())


def final_weights(run):
    """Return the final weights of rank 0's models: {name: tensor}, or None if there are none."""
    path = run.folder / "final"
    if not path.exists():
        return None
    return {
        f"{name}{'' if number == 0 else f' of model {number}'}": value
        for number, model in enumerate(torch.load(path, weights_only=True))
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


def resumes(plan, interrupted, resumed):
    """Return the verdict on a run that was resumed to its end, and the number of lost steps."""
    before = [len(steps_of(run)) for run in interrupted]
    after, total = len(steps_of(resumed)), len(steps_of(plan.undisturbed))
    lost = sum(before) + after - total
    text = f"{' and '.join(map(str, before))} steps, then {after}; uninterrupted, {total}"
    loads = resumed.all(events.Load)
    if resumed.returncode != 0:
        end = RULE["script_ends"](resumed)
        text = f"when started again, it fails: {end.text}"
        return wrong(text, end.where, "", end.details), lost
    if after == total and not loads and plan.restart_arguments is None:
        if not re.search(LOADS, resumed.text):
            return unsure("it loads nothing and begins again at step 0: it has no resume"), lost
        text = "with the same arguments, it loads nothing and begins again at step 0"
        return unsure(f"{text}: does it need others to resume (--restart-args)?"), lost
    if after == total and any(map(saved_steps, interrupted)):
        text = f"when started again, it begins at step 0 of {total}"
        return wrong(text, loads[0].where if loads else ""), lost
    if lost < 0:
        return wrong(f"{-lost} steps are skipped: {text}"), lost
    return passed(text), lost


def kill(plan):
    """a killed rank costs no saved step"""
    killed = []  # process IDs

    def strike(process, folder):
        time.sleep(random.uniform(0, 0.2))
        found = reports(folder)
        if found and process.poll() is None:
            pid, _ = found[random.choice(list(found))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    def after(steps):
        return once(lambda found: has_saved(found) and steps_in(found) >= steps, strike)

    first = plan.run("interrupted", during=after(0))
    if reason := too_little(plan, first):
        yield GOES_ON, unseen(reason)
        return
    struck, left = [first], len(steps_of(plan.undisturbed)) - saved_steps(first)
    killed.clear()
    resumed = plan.again(first, during=after(random.randrange(left)))
    if killed and resumed.returncode != 0:  # else it had ended, or failed by itself
        struck.append(resumed)
        resumed = plan.again(first)
    verdict, lost = resumes(plan, struck, resumed)
    yield GOES_ON, verdict
    if verdict.status != PASS:
        return
    again = sum(len(steps_of(run)) - (saved_steps(run) or 0) for run in struck)
    most = passed(f"{lost} of the {again} steps since the last save are repeated")
    if lost > again:
        text = f"{lost} steps are repeated, although {lost - again} of them were saved"
        most = wrong(text, "", "epoch_starts_again")
    yield "no saved step is repeated", most
    yield SAME_END, compare(plan, resumed)
    yield RULE["safe_loads"].title, RULE["safe_loads"](resumed)


def sigterm(plan):
    """when the scheduler stops the job, no step is lost"""

    def stop_all(process, folder):  # as Slurm does
        time.sleep(random.uniform(0, 0.2))
        signalled(folder, "terminate")

    interrupted = plan.run("stopped", during=once(has_saved, stop_all))
    if not interrupted.all(events.Handler):
        saved = saved_steps(interrupted)
        steps = "all" if saved is None else len(steps_of(interrupted)) - saved
        yield GOES_ON, not_applicable(f"nothing handles SIGTERM: {steps} steps are lost")
        return
    if reason := too_little(plan, interrupted):
        yield GOES_ON, unseen(reason)
        return
    resumed = plan.again(interrupted)
    verdict, lost = resumes(plan, [interrupted], resumed)
    yield GOES_ON, verdict
    if verdict.status == PASS and lost:
        yield "no step is lost", wrong(f"{lost} steps are lost")
    elif verdict.status == PASS:
        yield "no step is lost", passed("none is repeated or skipped")
        yield SAME_END, compare(plan, resumed)


def world_size(plan):
    """N processes train like one with N times the batch"""
    after_some = once(lambda found: steps_in(found) > STEPS, kill_all, of_all=True)
    many = plan.run("many", scale=1, during=after_some)
    if reason := not_kept(many):
        yield SAME_SAMPLES, unseen(reason)
        return
    alone = {"nproc": 1, "scale": plan.nproc, "start": str(many.folder)}
    one = plan.run("one", **alone, during=after_some)
    reason = not_kept(one) and f"in one process: {not_kept(one)}"
    if len(one.ranks) != 1 or len(many.ranks) != plan.nproc:
        reason = f"asked for 1 and {plan.nproc} processes, the script starts"
        reason += f" {len(one.ranks)} and {len(many.ranks)}"
    if reason:
        yield SAME_SAMPLES, unseen(reason)
        return
    samples = same_samples(many, one)
    yield SAME_SAMPLES, samples
    yield "the learning rates agree", same_rates(many, one)
    if samples.status != PASS:
        return
    results = [same_gradients(many, one), same_weights(many, one)]
    if many.all(events.GradientLost):
        reason = "both runs lack the gradient of what is gathered"
    elif WRONG in {result.status for result in results}:
        if draws(many):
            reason = "the script draws random numbers, such as dropout's, while it trains"
        elif any(wrap.buffers for wrap in many.all(events.Wrap)):
            reason = "the model has buffers, such as BatchNorm's, which each process updates"
    results = [unseen(reason)] * 2 if reason else results
    yield from zip(("the gradients agree", "the weights agree"), results)


def not_kept(run):
    """Return why the run kept no model to compare, or an empty string."""
    if (run.folder / "step1").exists():
        return ""
    if run.returncode == 0 or len(steps_of(run)) > STEPS:
        return "no model is wrapped in DistributedDataParallel and trained"
    return f"in float64: {RULE['script_ends'](run).text}"


def same_rates(many, one):
    pairs = list(zip(steps_of(many), steps_of(one)))[:STEPS]
    for number, (ours, theirs) in enumerate(pairs, 1):
        if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours.rates, theirs.rates)):
            text = f"in step {number}, they are {ours.rates[0]:.3g} and {theirs.rates[0]:.3g}"
            return wrong(f"{text}: does a schedule count the samples of one rank?", ours.where)
    return passed(f"in the first {counted(len(pairs), 'step')}")


def same_samples(many, one):
    if not epochs(many) or not epochs(one):
        return unseen("no DataLoader was used to train")
    pair = [list(epochs(run)[0].values()) for run in (many, one)]
    if any(of.samples() is None for ranks in pair for of in ranks):
        return unseen("the samples have no index")
    if pair[0][0].data != pair[1][0].data:
        return unseen("the data differs from run to run: seed it")
    steps = min(STEPS, *(len(of.batches) for ranks in pair for of in ranks))
    for step in range(steps):
        ours, theirs = (sorted(chain(*(of.batches[step].base for of in ranks))) for ranks in pair)
        if ours != theirs:
            text = f"step {step + 1} has different samples: the data is not split"
            return unseen(f"{text} as DistributedSampler does")
    return passed(f"in the first {steps} steps")


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


def same_gradients(many, one):
    if found := first_apart(many, one, 1, 1):
        name, far, ours, theirs = found
        factor = (ours.norm() / theirs.norm()).item()
        text = f"that of {name} is off by {far:.1e}; its norm is {factor:.2f} times as large"
        text = text if is_finite(ours) else f"that of {name} is not finite"
        return wrong(text, many.all(events.Step)[0].where)
    return passed(f"in float64, to within {TOLERANCE:.0e}")


def same_weights(many, one):
    step = min(STEPS, len(steps_of(many)), len(steps_of(one)))
    if found := first_apart(many, one, step, 0):
        return wrong(f"after {step - 1} steps, {found[0]} is off by {found[1]:.1e}")
    return passed(f"after {step - 1} steps, to within {TOLERANCE:.0e}")


DRILLS = {"kill": kill, "sigterm": sigterm, "world-size": world_size}
