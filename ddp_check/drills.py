"""The drills: what a run that is killed, stopped or resized ends with."""

import contextlib
import os
import random
import signal
import time
from itertools import chain

import psutil
import torch

from ddp_check.passes import epochs
from ddp_check.protocol import STEPS
from ddp_check.rules import FAIL, NONE, PASS, UNSEEN, Verdict, it_ends, lowest, safe_loads
from ddp_check.run import kill_all, processes, reports

TOLERANCE = 1e-6
GOES_ON, SAME_SAMPLES = "it goes on", "each step has the same samples"  # titles of verdicts


def steps_of(run):
    """Return how many steps the optimizers of the lowest rank have taken."""
    return len(lowest(run.of("step")))


def saved_steps(run):
    """Return after how many steps a rank saved last, or None if none did."""
    return max((event["steps"] for event in run.all("saved")), default=None)


def wait_for_a_save(process, events, end):
    """Wait for a step after a save; return the seconds from the first step to that one."""
    start = None
    while time.monotonic() < end and process.poll() is None:
        for _, found in reports(events).values():
            kinds = [event["kind"] for event in found]
            if "step" in kinds:
                start = start or time.monotonic()
            if "saved" in kinds and "step" in kinds[kinds.index("saved") :]:
                return time.monotonic() - start
        time.sleep(0.05)
    return 0


def kill_one(process, events, end):
    """Kill a rank at a random moment after the first save, and soon, or it may be over."""
    time.sleep(random.uniform(0, min(1, wait_for_a_save(process, events, end))))
    found = reports(events)
    if found and process.poll() is None:
        pid, _ = found[random.choice(list(found))]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stop_all(process, events, end):
    """Tell all processes to stop, as Slurm does."""
    wait_for_a_save(process, events, end)
    for candidate in processes(events):
        with contextlib.suppress(psutil.NoSuchProcess):
            candidate.terminate()


def end_after_some_steps(nproc):
    """Return a function that ends a run when all ranks have taken the steps to compare."""

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
        return Verdict(UNSEEN, "no whole model to compare: it is sharded, or there is none")
    differing = [n for n in one if n not in other or not torch.equal(one[n], other[n])]
    if not differing:
        return Verdict(PASS, "the same bits as without the interruption")
    again = final_weights(plan.run("again")) or {}
    if any(name not in again or not torch.equal(one[name], again[name]) for name in one):
        return Verdict(UNSEEN, "two undisturbed runs differ, too: seed the script")
    text = f"{len(differing)} of {len(one)} tensors differ{apart_by(one, other, differing)}"
    return Verdict(FAIL, f"{text}; the first is {differing[0]}", "", "resume_without_optimizer")


def apart_by(one, other, names):
    """Return in words by how much these tensors differ at most."""
    pairs = [(one[name], other[name]) for name in names if name in other]
    same = [(a.double(), b.double()) for a, b in pairs if a.shape == b.shape]
    off = max(((a - b).abs().max().item() for a, b in same if a.numel()), default=0)
    return f", by up to {off:.1e}" if off else ""


def final_weights(run):
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
    """Return why the interrupted run shows nothing, or an empty string."""
    if plan.undisturbed.returncode != 0:
        return "the script does not end well without it, either"
    if saved_steps(interrupted) is None:
        return "no rank has called torch.save before the interruption"
    if steps_of(interrupted) >= steps_of(plan.undisturbed):
        return "it was over too soon: ask the script for more epochs"
    return ""


def go_on(plan, interrupted):
    """Start an interrupted run again; return that run, the verdict on its steps and those lost."""
    if reason := too_little(plan, interrupted):
        return None, Verdict(UNSEEN, reason), None
    resumed = plan.again(interrupted)
    before, after, total = map(steps_of, (interrupted, resumed, plan.undisturbed))
    lost, text = before + after - total, f"{before} steps, then {after}, of {total}"
    verdict = Verdict(PASS, text)
    if resumed.returncode != 0:
        verdict = Verdict(FAIL, f"started again, it fails: {it_ends(resumed).text}")
    elif after == total:
        verdict = Verdict(FAIL, f"started again, it begins at step 0 of {total}")
    elif lost < 0:
        verdict = Verdict(FAIL, f"{-lost} steps are skipped: {text}")
    return resumed, verdict, lost


def kill(plan):
    """a killed worker costs at most the steps since the last save"""
    interrupted = plan.run("interrupted", during=kill_one)
    resumed, verdict, lost = go_on(plan, interrupted)
    if verdict.status != PASS:
        return [(GOES_ON, verdict)]
    again = steps_of(interrupted) - saved_steps(interrupted)
    most = Verdict(PASS, f"{lost} steps are repeated, of {again} since the last save")
    if lost > again:
        text = f"{lost} steps are repeated, although {lost - again} of them were saved"
        most = Verdict(FAIL, text, "", "epoch_starts_again")
    return [
        (GOES_ON, verdict),
        ("no saved step is repeated", most),
        ("it ends alike", compare(plan, resumed)),
        (safe_loads.__doc__, safe_loads(resumed)),
    ]


def sigterm(plan):
    """told to stop, it loses no step"""
    interrupted = plan.run("stopped", during=stop_all)
    if not interrupted.all("handler"):
        saved = saved_steps(interrupted)
        steps = "all steps" if saved is None else f"{steps_of(interrupted) - saved} steps"
        return [(GOES_ON, Verdict(NONE, f"nothing handles SIGTERM: {steps} are lost"))]
    resumed, verdict, lost = go_on(plan, interrupted)
    if verdict.status != PASS:
        return [(GOES_ON, verdict)]
    if lost:
        return [(GOES_ON, verdict), ("no step is lost", Verdict(FAIL, f"{lost} steps are lost"))]
    return [
        (GOES_ON, verdict),
        ("no step is lost", Verdict(PASS, "none")),
        ("it ends alike", compare(plan, resumed)),
    ]


def world_size(plan):
    """N processes train as one with a batch N times as large"""
    many = plan.run("many", scale=1, during=end_after_some_steps(plan.nproc))
    if not kept(many):
        return [(SAME_SAMPLES, Verdict(UNSEEN, not_kept(many)))]
    one = plan.run("one", nproc=1, scale=plan.nproc, during=end_after_some_steps(1))
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
    if reason and FAIL in {result.status for result in results}:
        results = [Verdict(UNSEEN, reason)] * 2
    titles = ("the gradients agree", "the weights agree")
    return [(SAME_SAMPLES, verdict), *zip(titles, results)]


def kept(run):
    """Return whether a model was kept to compare."""
    return (run.folder / "step1").exists()


def not_kept(run):
    """Return why there is no gradient to compare."""
    if run.returncode == 0 or steps_of(run) > STEPS:
        return "no model is wrapped in DistributedDataParallel and trained"
    return f"in float64: {it_ends(run).text}"


def by_process(run):
    """Return why the gradients of a right script may depend on the number of processes."""
    drawn = {step["random"] for epoch in epochs(run)[:1] for step in lowest(epoch).steps}
    if len(drawn) > 1:
        return "the script draws random numbers, such as dropout's, while it trains"
    if any(wrap["buffers"] for wrap in run.all("wrap")):
        return "the model has buffers, such as BatchNorm's, which each process computes"
    return None


def same_samples(many, one):
    """Return the verdict on the samples in the first steps of both runs."""
    if not epochs(many) or not epochs(one):
        return Verdict(UNSEEN, "no DataLoader was used to train")
    pair = [list(epochs(run)[0].values()) for run in (many, one)]
    if any(of.samples() is None for ranks in pair for of in ranks):
        return Verdict(UNSEEN, "the samples have no index")
    steps = min(STEPS, *(len(of.batches) for ranks in pair for of in ranks))
    for step in range(steps):
        ours, theirs = (
            sorted(chain(*(of.batches[step]["base"] for of in ranks))) for ranks in pair
        )
        if ours != theirs:
            text = f"step {step + 1} has others: the data is not dealt out"
            return Verdict(UNSEEN, f"{text} as DistributedSampler does")
    return Verdict(PASS, f"in the first {steps} steps")


def models(run, step):
    """Return parameters and gradients of rank 0 before a step: {name: (parameter, gradient)}."""
    found = torch.load(run.folder / f"step{step}", weights_only=True)
    return {name: (value, gradient) for model in found for name, value, gradient in model}


def apart(one, other):
    """Return how far two tensors are apart, relative to the larger one."""
    one, other = one.to_dense().double(), other.to_dense().double()
    largest = max(one.abs().max().item(), other.abs().max().item(), 1e-300)
    return (one - other).abs().max().item() / largest


def same_gradients(many, one):
    """Return the verdict on the gradients of the first step, and name the first that differs."""
    ours, theirs = models(many, 1), models(one, 1)
    for name, (_, gradient) in ours.items():
        other = theirs[name][1]
        if gradient is None or other is None:
            continue
        if (far := apart(gradient, other)) > TOLERANCE:
            factor = (gradient.norm() / other.norm()).item()
            text = f"that of {name} is off by {far:.1e} and {factor:.2f} times as long"
            return Verdict(FAIL, text, many.all("step")[0]["where"])
    return Verdict(PASS, f"in float64, to {TOLERANCE:.0e}")


def same_weights(many, one):
    """Return the verdict on the weights after the first steps."""
    step = min(STEPS, steps_of(many), steps_of(one))
    ours, theirs = models(many, step), models(one, step)
    far = {name: apart(value, theirs[name][0]) for name, (value, _) in ours.items()}
    name = max(far, key=far.get)
    if far[name] > TOLERANCE:
        return Verdict(FAIL, f"after {step - 1} steps, {name} is off by {far[name]:.1e}")
    return Verdict(PASS, f"after {step - 1} steps, to {TOLERANCE:.0e}")


DRILLS = {
    "kill": (kill, "a killed worker costs no step that was saved"),
    "sigterm": (sigterm, "when the scheduler stops the job, no step is lost"),
    "world-size": (world_size, "N processes train as one with N times the batch"),
}
