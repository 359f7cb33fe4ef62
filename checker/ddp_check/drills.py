"""The drills: what is left of a run that is killed, stopped or resized."""

import contextlib
import os
import random
import signal
import time
from itertools import chain

import psutil
import torch

from ddp_check.keeper import processes
from ddp_check.passes import epochs
from ddp_check.protocol import STEPS
from ddp_check.rules import (
    NONE,
    PASS,
    UNSEEN,
    UNSURE,
    WRONG,
    Verdict,
    it_ends,
    lowest,
    safe_loads,
)
from ddp_check.run import kill_all, reports

TOLERANCE = 1e-6
DOING = ("step", "batch", "pass", "collective", "final")  # a rank that does so has saved
GOES_ON, SAME_SAMPLES = "it resumes", "each step has the same samples"  # titles of verdicts


def steps_of(run):
    """Return the number of optimizer steps that the lowest rank has taken."""
    return len(lowest(run.of("step")))


def saved_steps(run):
    """Return the number of steps before the last complete save, or None without one.

    A save counts once its rank has done something else: the file may have to be renamed first.
    """
    saved = None
    for events in run.ranks.values():
        last = max((at for at, event in enumerate(events) if event["kind"] in DOING), default=0)
        done = [event["steps"] for event in events[:last] if event["kind"] == "saved"]
        saved = max([*done, *([] if saved is None else [saved])], default=None)
    return saved


def wait_for_a_save(process, events, end, steps=0):
    """Wait for a step after a save, and for so many steps; return whether the run still goes on."""
    while time.monotonic() < end and process.poll() is None:
        for _, found in reports(events).values():
            kinds = [event["kind"] for event in found]
            saved = "saved" in kinds and "step" in kinds[kinds.index("saved") :]
            if saved and kinds.count("step") >= steps:
                return True
        time.sleep(0.05)
    return False


def kill_one(steps, killed):
    """Return a function that kills a rank once it has saved and taken this number of steps.

    It appends the process ID to `killed`.
    """

    def strike(process, events, end):
        if not wait_for_a_save(process, events, end, steps):
            return
        time.sleep(random.uniform(0, 0.2))
        found = reports(events)
        if found and process.poll() is None:
            pid, _ = found[random.choice(list(found))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    return strike


def stop_all(process, events, end):
    """Send SIGTERM to all processes, as Slurm does."""
    wait_for_a_save(process, events, end)
    time.sleep(random.uniform(0, 0.2))
    for candidate in processes(events):
        with contextlib.suppress(psutil.NoSuchProcess):
            candidate.terminate()


def end_after_some_steps(nproc):
    """Return a function that ends a run once all ranks have taken the steps to compare."""

    def wait(process, events, end):
        while time.monotonic() < end and process.poll() is None:
            found = [[event["kind"] for event in of] for _, of in reports(events).values()]
            if len(found) == nproc and min(kinds.count("step") for kinds in found) > STEPS:
                return kill_all(process, events)
            time.sleep(0.05)

    return wait


def compare(plan, resumed):
    """Return the verdict on the weights of a run that was resumed."""
    one, other = (final_weights(run) for run in (plan.undisturbed, resumed))
    if one is None or other is None:
        return Verdict(UNSEEN, "no full model to compare: it is sharded, or nothing was trained")
    differing = [n for n in one if n not in other or not torch.equal(one[n], other[n])]
    if not differing:
        return Verdict(PASS, "bit-for-bit identical to an uninterrupted run")
    text = f"{len(differing)} of {len(one)} tensors differ{apart_by(one, other, differing)}"
    first = next(iter(lowest(resumed.of("step"))), {})
    if max(step["state"] for step in lowest(plan.undisturbed.of("step"))) and not first["state"]:
        text += "; the optimizer starts again without its state"
        return Verdict(WRONG, text, first["where"], "resume_without_optimizer")
    if by_chance(plan.undisturbed):
        text += "; the optimizer is restored, the random numbers (dropout, batches) are not"
        return Verdict(UNSURE, text)
    again = final_weights(plan.run("again")) or {}
    if any(name not in again or not torch.equal(one[name], again[name]) for name in one):
        return Verdict(UNSEEN, "two uninterrupted runs differ as well: seed the script")
    return Verdict(WRONG, f"{text}; the first is {differing[0]}")


def by_chance(run):
    """Return whether training depends on random numbers: dropout's, or a loader's order."""
    ones = [lowest(epoch) for epoch in epochs(run)]
    parts = [one.steps for one in ones] or [lowest(run.of("step"))]  # without a DataLoader, one
    drawn = any(len({step["random"] for step in steps}) > 1 for steps in parts)
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
        return None, Verdict(UNSEEN, reason), None
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
        end = it_ends(resumed)
        text = f"when started again, it fails: {end.text}"
        return Verdict(WRONG, text, end.where, "", end.details), lost
    if after == total and not resumed.all("load") and plan.restart_arguments is None:
        text = "with the same arguments, it loads nothing and begins again at step 0"
        return Verdict(UNSURE, f"{text}: does it need others to resume (--restart-args)?"), lost
    if after == total and any(map(saved_steps, interrupted)):
        text = f"when started again, it begins at step 0 of {total}"
        return Verdict(WRONG, text, lowest(resumed.of("load"))[0]["where"]), lost
    if lost < 0:
        return Verdict(WRONG, f"{-lost} steps are skipped: {text}"), lost
    return Verdict(PASS, text), lost


def kill(plan):
    """a killed rank costs at most the steps since the last save"""
    first = plan.run("interrupted", during=kill_one(0, []))
    if reason := too_little(plan, first):
        return [(GOES_ON, Verdict(UNSEEN, reason))]
    struck, killed, left = [first], [], steps_of(plan.undisturbed) - saved_steps(first)
    resumed = plan.again(first, during=kill_one(random.randrange(left), killed))
    if killed and resumed.returncode != 0:  # else it had ended, or failed by itself
        struck.append(resumed)
        resumed = plan.again(first)
    verdict, lost = continued(plan, struck, resumed)
    if verdict.status != PASS:
        return [(GOES_ON, verdict)]
    again = sum(steps_of(run) - (saved_steps(run) or 0) for run in struck)
    most = Verdict(PASS, f"{lost} of the {again} steps since the last save are repeated")
    if lost > again:
        text = f"{lost} steps are repeated, although {lost - again} of them were saved"
        most = Verdict(WRONG, text, "", "epoch_starts_again")
    return [
        (GOES_ON, verdict),
        ("no saved step is repeated", most),
        ("the final weights are the same", compare(plan, resumed)),
        (safe_loads.__doc__, safe_loads(resumed)),
    ]


def sigterm(plan):
    """when it is told to stop, no step is lost"""
    interrupted = plan.run("stopped", during=stop_all)
    if not interrupted.all("handler"):
        saved = saved_steps(interrupted)
        steps = "all steps" if saved is None else f"{steps_of(interrupted) - saved} steps"
        return [(GOES_ON, Verdict(NONE, f"nothing handles SIGTERM: {steps} are lost"))]
    resumed, verdict, lost = go_on(plan, interrupted)
    if verdict.status != PASS:
        return [(GOES_ON, verdict)]
    if lost:
        return [(GOES_ON, verdict), ("no step is lost", Verdict(WRONG, f"{lost} steps are lost"))]
    return [
        (GOES_ON, verdict),
        ("no step is lost", Verdict(PASS, "none is repeated or skipped")),
        ("the final weights are the same", compare(plan, resumed)),
    ]


def world_size(plan):
    """N processes train like one with N times the batch"""
    many = plan.run("many", scale=1, during=end_after_some_steps(plan.nproc))
    if not kept(many):
        return [(SAME_SAMPLES, Verdict(UNSEEN, not_kept(many)))]
    alone = {"nproc": 1, "scale": plan.nproc, "start": str(many.folder)}
    one = plan.run("one", **alone, during=end_after_some_steps(1))
    if len(one.ranks) != 1 or len(many.ranks) != plan.nproc:
        text = f"asked for 1 and {plan.nproc} processes, the script starts"
        text += f" {len(one.ranks)} and {len(many.ranks)}"
        return [(SAME_SAMPLES, Verdict(UNSEEN, text))]
    if not kept(one):
        return [(SAME_SAMPLES, Verdict(UNSEEN, f"in one process: {not_kept(one)}"))]
    verdict = same_samples(many, one)
    if verdict.status != PASS:
        return [(SAME_SAMPLES, verdict)]
    results = [same_gradients(many, one), same_weights(many, one)]
    reason = by_process(many)
    if reason and WRONG in {result.status for result in results}:
        results = [Verdict(UNSEEN, reason)] * 2
    titles = ("the gradients agree", "the weights agree")
    return [(SAME_SAMPLES, verdict), *zip(titles, results)]


def kept(run):
    """Return whether the run kept a model to compare."""
    return (run.folder / "step1").exists()


def not_kept(run):
    """Return why the run kept no model to compare."""
    if run.returncode == 0 or steps_of(run) > STEPS:
        return "no model is wrapped in DistributedDataParallel and trained"
    return f"in float64: {it_ends(run).text}"


def by_process(run):
    """Return why even a correct script's gradients may depend on the world size, or None."""
    drawn = {step["random"] for epoch in epochs(run)[:1] for step in lowest(epoch).steps}
    if len(drawn) > 1:
        return "the script draws random numbers, such as dropout's, while it trains"
    if any(wrap["buffers"] for wrap in run.all("wrap")):
        return "the model has buffers, such as BatchNorm's, which each process updates"
    return None


def same_samples(many, one):
    """Return the verdict on the samples in the first steps of both runs."""
    if not epochs(many) or not epochs(one):
        return Verdict(UNSEEN, "no DataLoader was used to train")
    pair = [list(epochs(run)[0].values()) for run in (many, one)]
    if any(of.samples() is None for ranks in pair for of in ranks):
        return Verdict(UNSEEN, "the samples have no index")
    if pair[0][0].data != pair[1][0].data:
        return Verdict(UNSEEN, "the data differs from run to run: seed it")
    steps = min(STEPS, *(len(of.batches) for ranks in pair for of in ranks))
    for step in range(steps):
        ours, theirs = (
            sorted(chain(*(of.batches[step]["base"] for of in ranks))) for ranks in pair
        )
        if ours != theirs:
            text = f"step {step + 1} has different samples: the data is not split"
            return Verdict(UNSEEN, f"{text} as DistributedSampler does")
    return Verdict(PASS, f"in the first {steps} steps")


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
    return (one - other).abs().max().item() / largest


def same_gradients(many, one):
    """Return the verdict on the first step's gradients; it names the first that differs."""
    ours, theirs = models(many, 1), models(one, 1)
    sizes = [gradient.abs().max().item() for _, gradient in theirs.values() if gradient is not None]
    least = max([1e-300, *(1e-6 * size for size in sizes)])  # before BatchNorm, a bias has about 0
    for name, (_, gradient) in ours.items():
        other = theirs[name][1]
        if gradient is None or other is None:
            continue
        if (far := apart(gradient, other, least)) > TOLERANCE:
            factor = (gradient.norm() / other.norm()).item()
            text = f"that of {name} is off by {far:.1e}; its norm is {factor:.2f} times as large"
            return Verdict(WRONG, text, many.all("step")[0]["where"])
    return Verdict(PASS, f"in float64, to within {TOLERANCE:.0e}")


def same_weights(many, one):
    """Return the verdict on the weights after the first steps."""
    step = min(STEPS, steps_of(many), steps_of(one))
    ours, theirs = models(many, step), models(one, step)
    far = {name: apart(value, theirs[name][0]) for name, (value, _) in ours.items()}
    name = max(far, key=far.get)
    if far[name] > TOLERANCE:
        return Verdict(WRONG, f"after {step - 1} steps, {name} is off by {far[name]:.1e}")
    return Verdict(PASS, f"after {step - 1} steps, to within {TOLERANCE:.0e}")


DRILLS = {
    "kill": (kill, "a killed rank costs no saved step"),
    "sigterm": (sigterm, "when the scheduler stops the job, no step is lost"),
    "world-size": (world_size, "N processes train like one with N times the batch"),
}
