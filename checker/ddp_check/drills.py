"""The drills: what is left of a run that is killed, stopped or resized."""

import contextlib
import math
import os
import random
import re
import signal
import time
from itertools import chain

import psutil
import torch

from ddp_check import events
from ddp_check.keeper import processes
from ddp_check.passes import epochs
from ddp_check.protocol import STEPS
from ddp_check.rules import RULES
from ddp_check.rules.base import (
    PASS,
    WRONG,
    counted,
    lowest,
    not_applicable,
    passed,
    unseen,
    unsure,
    wrong,
)
from ddp_check.run import kill_all, reports

TOLERANCE = 1e-6
DOING = (events.Step, events.Batch, events.PassBegun, events.Collective, events.Final)
LOADS = r"\.load\b|load_|resume|from_pretrained"  # what a script that resumes does
RULE = {rule.name: rule for rule in RULES}
GOES_ON, SAME_SAMPLES = "it resumes", "each step has the same samples"  # titles of verdicts


def steps_of(run):
    """Return the number of optimizer steps that the lowest rank has taken."""
    return len(lowest(run.of(events.Step)))


def saved_steps(run):
    """Return the number of steps before the last complete save, or None without one.

    A save counts once its rank has done something else: the file may have to be renamed first.
    """
    saved = None
    for found in run.ranks.values():
        last = max((at for at, event in enumerate(found) if isinstance(event, DOING)), default=0)
        done = [event.steps for event in found[:last] if isinstance(event, events.Saved)]
        saved = max([*done, *([] if saved is None else [saved])], default=None)
    return saved


def wait_until(process, folder, end, ready):
    """Wait until this is true of the events of all ranks; return whether the run still goes on."""
    while time.monotonic() < end and process.poll() is None:
        if ready([found for _, found in reports(folder).values()]):
            return True
        time.sleep(0.05)
    return False


def steps_in(found):
    """Return how many steps there are among these events."""
    return sum(isinstance(event, events.Step) for event in found)


def has_saved(found):
    """Return whether a step follows a save among these events."""
    saved = (at for at, event in enumerate(found) if isinstance(event, events.Saved))
    return steps_in(found[next(saved, len(found)) :]) > 0


def kill_one(steps, killed):
    """Return a function that kills a rank once it has saved and taken this number of steps.

    It appends the process ID to `killed`.
    """

    def ready(ranks):
        return any(has_saved(found) and steps_in(found) >= steps for found in ranks)

    def strike(process, folder, end):
        if not wait_until(process, folder, end, ready):
            return
        time.sleep(random.uniform(0, 0.2))
        found = reports(folder)
        if found and process.poll() is None:
            pid, _ = found[random.choice(list(found))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    return strike


def stop_all(process, folder, end):
    """Send SIGTERM to all processes, as Slurm does."""
    wait_until(process, folder, end, lambda ranks: any(map(has_saved, ranks)))
    time.sleep(random.uniform(0, 0.2))
    for candidate in processes(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            candidate.terminate()


def end_after_some_steps(nproc):
    """Return a function that ends a run once all ranks have taken the steps to compare."""

    def ready(ranks):
        return len(ranks) == nproc and min(map(steps_in, ranks)) > STEPS

    def stop(process, folder, end):
        if wait_until(process, folder, end, ready):
            kill_all(process, folder)

    return stop


def compare(plan, resumed):
    """Return the verdict on the weights of a run that was resumed."""
    one, other = (final_weights(run) for run in (plan.undisturbed, resumed))
    if one is None or other is None:
        return unseen("no full model to compare: it is sharded, or nothing was trained")
    bad = next((name for name, value in (one | other).items() if not is_finite(value)), None)
    if bad:
        return wrong(f"{bad} is not finite, so no run can be compared")
    differing = [n for n in one if n not in other or not torch.equal(one[n], other[n])]
    if not differing:
        return passed("bit-for-bit identical to an uninterrupted run")
    text = f"{len(differing)} of {len(one)} tensors differ{apart_by(one, other, differing)}"
    first = next(iter(lowest(resumed.of(events.Step))), None)
    if (
        any(step.state for step in lowest(plan.undisturbed.of(events.Step)))
        and first
        and not first.state
    ):
        text += "; the optimizer starts again without its state"
        return wrong(text, first.where, "resume_without_optimizer")
    if by_chance(plan.undisturbed):
        text += "; the optimizer is restored, the random numbers (dropout, batches) are not"
        return unsure(text)
    again = final_weights(plan.run("again")) or {}
    same = all(name in again and torch.equal(one[name], again[name]) for name in one)
    seed = "two uninterrupted runs differ as well: seed the script"
    return wrong(f"{text}; the first is {differing[0]}") if same else unseen(seed)


def is_finite(value):
    return bool(value.isfinite().all())


def by_chance(run):
    """Return whether training depends on random numbers: dropout's, or a loader's order."""
    ones = [lowest(epoch) for epoch in epochs(run)]
    parts = [one.steps for one in ones] or [
        lowest(run.of(events.Step))
    ]  # without a DataLoader, one
    drawn = any(len({step.random for step in steps}) > 1 for steps in parts)
    return drawn or any(one.shuffle and not one.distributed for one in ones)


def apart_by(one, other, names):
    """Return the largest difference between these tensors in words, or an empty string."""
    pairs = [(one[name], other[name]) for name in names if name in other]
    same = [(a.double(), b.double()) for a, b in pairs if a.shape == b.shape]
    off = max(((a - b).abs().max().item() for a, b in same if a.numel()), default=0)
    return f", by up to {off:.1e}" if off else ""


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
    if steps_of(interrupted) >= steps_of(plan.undisturbed):
        return "all steps were taken before the interruption: run more epochs"
    return ""


def go_on(plan, interrupted):
    """Restart an interrupted run; return the new run, the verdict, and the number of lost steps."""
    if reason := too_little(plan, interrupted):
        return None, unseen(reason), None
    resumed = plan.again(interrupted)
    verdict, lost = continued(plan, [interrupted], resumed)
    return resumed, verdict, lost


def continued(plan, interrupted, resumed):
    """Return the verdict on a run that was resumed to its end, and the number of lost steps."""
    before = [steps_of(run) for run in interrupted]
    after, total = steps_of(resumed), steps_of(plan.undisturbed)
    lost = sum(before) + after - total
    text = f"{' and '.join(map(str, before))} steps, then {after}; uninterrupted, {total}"
    if resumed.returncode != 0:
        end = RULE["script_ends"](resumed)
        text = f"when started again, it fails: {end.text}"
        return wrong(text, end.where, "", end.details), lost
    if after == total and not resumed.all(events.Load) and plan.restart_arguments is None:
        if not re.search(LOADS, resumed.text):
            return unsure("it loads nothing and begins again at step 0: it has no resume"), lost
        text = "with the same arguments, it loads nothing and begins again at step 0"
        return unsure(f"{text}: does it need others to resume (--restart-args)?"), lost
    if after == total and any(map(saved_steps, interrupted)):
        text = f"when started again, it begins at step 0 of {total}"
        return wrong(text, lowest(resumed.of(events.Load))[0].where), lost
    if lost < 0:
        return wrong(f"{-lost} steps are skipped: {text}"), lost
    return passed(text), lost


def kill(plan):
    """a killed rank costs at most the steps since the last save"""
    first = plan.run("interrupted", during=kill_one(0, []))
    if reason := too_little(plan, first):
        return [(GOES_ON, unseen(reason))]
    struck, killed, left = [first], [], steps_of(plan.undisturbed) - saved_steps(first)
    resumed = plan.again(first, during=kill_one(random.randrange(left), killed))
    if killed and resumed.returncode != 0:  # else it had ended, or failed by itself
        struck.append(resumed)
        resumed = plan.again(first)
    verdict, lost = continued(plan, struck, resumed)
    if verdict.status != PASS:
        return [(GOES_ON, verdict)]
    again = sum(steps_of(run) - (saved_steps(run) or 0) for run in struck)
    most = passed(f"{lost} of the {again} steps since the last save are repeated")
    if lost > again:
        text = f"{lost} steps are repeated, although {lost - again} of them were saved"
        most = wrong(text, "", "epoch_starts_again")
    return [
        (GOES_ON, verdict),
        ("no saved step is repeated", most),
        ("the final weights are the same", compare(plan, resumed)),
        (RULE["safe_loads"].title, RULE["safe_loads"](resumed)),
    ]


def sigterm(plan):
    """when it is told to stop, no step is lost"""
    interrupted = plan.run("stopped", during=stop_all)
    if not interrupted.all(events.Handler):
        saved = saved_steps(interrupted)
        steps = "all steps" if saved is None else f"{steps_of(interrupted) - saved} steps"
        return [(GOES_ON, not_applicable(f"nothing handles SIGTERM: {steps} are lost"))]
    resumed, verdict, lost = go_on(plan, interrupted)
    if verdict.status != PASS:
        return [(GOES_ON, verdict)]
    if lost:
        return [(GOES_ON, verdict), ("no step is lost", wrong(f"{lost} steps are lost"))]
    return [
        (GOES_ON, verdict),
        ("no step is lost", passed("none is repeated or skipped")),
        ("the final weights are the same", compare(plan, resumed)),
    ]


def world_size(plan):
    """N processes train like one with N times the batch"""
    many = plan.run("many", scale=1, during=end_after_some_steps(plan.nproc))
    if not kept(many):
        return [(SAME_SAMPLES, unseen(not_kept(many)))]
    alone = {"nproc": 1, "scale": plan.nproc, "start": str(many.folder)}
    one = plan.run("one", **alone, during=end_after_some_steps(1))
    if len(one.ranks) != 1 or len(many.ranks) != plan.nproc:
        text = f"asked for 1 and {plan.nproc} processes, the script starts"
        text += f" {len(one.ranks)} and {len(many.ranks)}"
        return [(SAME_SAMPLES, unseen(text))]
    if not kept(one):
        return [(SAME_SAMPLES, unseen(f"in one process: {not_kept(one)}"))]
    verdict = same_samples(many, one)
    if verdict.status != PASS:
        return [(SAME_SAMPLES, verdict), ("the learning rates agree", same_rates(many, one))]
    results = [same_gradients(many, one), same_weights(many, one)]
    reason = by_process(many)
    if reason and WRONG in {result.status for result in results}:
        results = [unseen(reason)] * 2
    if many.all(events.GradientLost):
        results = [unseen("both runs lack the gradient of what is gathered")] * 2
    titles = ("the gradients agree", "the weights agree")
    return [
        (SAME_SAMPLES, verdict),
        ("the learning rates agree", same_rates(many, one)),
        *zip(titles, results),
    ]


def same_rates(many, one):
    """Return the verdict on the learning rates of the first steps."""
    pairs = list(zip(lowest(many.of(events.Step)), lowest(one.of(events.Step))))[:STEPS]
    for number, (ours, theirs) in enumerate(pairs, 1):
        if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours.rates, theirs.rates)):
            text = f"in step {number}, they are {ours.rates[0]:.3g} and {theirs.rates[0]:.3g}"
            return wrong(f"{text}: does a schedule count the samples of one rank?", ours.where)
    return passed(f"in the first {counted(len(pairs), 'step')}")


def kept(run):
    """Return whether the run kept a model to compare."""
    return (run.folder / "step1").exists()


def not_kept(run):
    """Return why the run kept no model to compare."""
    if run.returncode == 0 or steps_of(run) > STEPS:
        return "no model is wrapped in DistributedDataParallel and trained"
    return f"in float64: {RULE['script_ends'](run).text}"


def by_process(run):
    """Return why even a correct script's gradients may depend on the world size, or None."""
    drawn = {step.random for epoch in epochs(run)[:1] for step in lowest(epoch).steps}
    if len(drawn) > 1:
        return "the script draws random numbers, such as dropout's, while it trains"
    if any(wrap.buffers for wrap in run.all(events.Wrap)):
        return "the model has buffers, such as BatchNorm's, which each process updates"
    return None


def same_samples(many, one):
    """Return the verdict on the samples in the first steps of both runs."""
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


def same_gradients(many, one):
    """Return the verdict on the first step's gradients; it names the first that differs."""
    ours, theirs = models(many, 1), models(one, 1)
    sizes = [gradient.abs().max().item() for _, gradient in theirs.values() if gradient is not None]
    bad = [name for name, (_, one) in ours.items() if one is not None and not is_finite(one)]
    if bad:
        return wrong(f"that of {bad[0]} is not finite", many.all(events.Step)[0].where)
    least = max([1e-300, *(1e-6 * size for size in sizes)])  # before BatchNorm, a bias has about 0
    for name, (_, gradient) in ours.items():
        other = theirs[name][1]
        if gradient is None or other is None:
            continue
        if not (far := apart(gradient, other, least)) <= TOLERANCE:
            factor = (gradient.norm() / other.norm()).item()
            text = f"that of {name} is off by {far:.1e}; its norm is {factor:.2f} times as large"
            return wrong(text, many.all(events.Step)[0].where)
    return passed(f"in float64, to within {TOLERANCE:.0e}")


def same_weights(many, one):
    """Return the verdict on the weights after the first steps."""
    step = min(STEPS, steps_of(many), steps_of(one))
    ours, theirs = models(many, step), models(one, step)
    far = {name: apart(value, theirs[name][0]) for name, (value, _) in ours.items()}
    name = max(far, key=lambda one: math.inf if math.isnan(far[one]) else far[one])
    if not far[name] <= TOLERANCE:
        return wrong(f"after {step - 1} steps, {name} is off by {far[name]:.1e}")
    return passed(f"after {step - 1} steps, to within {TOLERANCE:.0e}")


DRILLS = {
    "kill": (kill, "a killed rank costs no saved step"),
    "sigterm": (sigterm, "when the scheduler stops the job, no step is lost"),
    "world-size": (world_size, "N processes train like one with N times the batch"),
}
