"""The drills of check.py: what a run that is killed, stopped or resized ends with."""

import contextlib
import os
import random
import signal
import time
from itertools import chain

import psutil
import torch
from check_rules import FAIL, NONE, PASS, UNSEEN, Verdict, it_ends, loads, samples, trained
from check_run import ranks

STEPS = 3  # as in observer/observe.py
TOLERANCE = 1e-6


def steps_of(run):
    """Return how many steps the optimizers of rank 0 have taken."""
    return sum(event["kind"] == "step" for event in run.ranks.get(0, []))


def saved_steps(run):
    """Return after how many steps rank 0 saved last, or None if it never did."""
    return next((e["steps"] for e in reversed(run.ranks.get(0, [])) if e["kind"] == "saved"), None)


def wait_for_a_save(process, events, end):
    """Wait until a checkpoint has been saved and a few steps have followed."""
    while time.monotonic() < end and process.poll() is None:
        for _, found in ranks(events).values():
            kinds = [event["kind"] for event in found]
            if "saved" in kinds and "step" in kinds[kinds.index("saved") :]:
                return
        time.sleep(0.05)


def kill_one(process, events, end):
    """Kill a rank at a random moment after the first save."""
    wait_for_a_save(process, events, end)
    time.sleep(random.uniform(0, 1))
    found = ranks(events)
    if found and process.poll() is None:
        pid, _ = found[random.choice(list(found))]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stop_all(process, events, end):
    """Tell all processes to stop, as Slurm does."""
    wait_for_a_save(process, events, end)
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if candidate.environ().get("DDP_CHECK") == str(events):
                candidate.terminate()


def compare(plan, undisturbed, resumed):
    """Return the verdict on the weights of a run that was resumed."""
    one, other = (final_weights(run) for run in (undisturbed, resumed))
    if one is None or other is None:
        return Verdict(UNSEEN, "no model was wrapped in DistributedDataParallel at the end")
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    if not differing:
        return Verdict(PASS, "the same bits as without the interruption")
    again = final_weights(plan.run("again"))
    if any(not torch.equal(one[name], again[name]) for name in one):
        return Verdict(UNSEEN, "two undisturbed runs differ, too: seed the script")
    name = differing[0]
    off = max((one[n].double() - other[n].double()).abs().max().item() for n in differing)
    text = f"{len(differing)} of {len(one)} tensors differ, by up to {off:.1e}; the first is {name}"
    return Verdict(FAIL, text, "", "resume-without-optimizer")


def final_weights(run):
    path = run.folder / "final"
    if not path.exists():
        return None
    return {
        f"{name}{'' if number == 0 else f' of model {number}'}": value
        for number, model in enumerate(torch.load(path, weights_only=True))
        for name, value in model.items()
    }


def interruption(plan, interrupt):
    """Return the undisturbed run, the interrupted one and the one that goes on after it."""
    undisturbed = plan.run("undisturbed")
    interrupted = plan.run("interrupted", during=interrupt)
    return undisturbed, interrupted, plan.run("interrupted")


def went_on(runs):
    """Return the verdict on the steps of a run that was interrupted, and the steps it lost."""
    undisturbed, interrupted, resumed = runs
    total, before, after = map(steps_of, runs)
    if undisturbed.returncode != 0:
        return Verdict(UNSEEN, "the script does not end well without it, either"), None
    if interrupted.returncode == 0:
        return Verdict(UNSEEN, "it was over too soon: ask the script for more epochs"), None
    if resumed.returncode != 0:
        return Verdict(FAIL, f"started again, it fails: {it_ends(resumed).text}"), None
    if after == total:
        return Verdict(FAIL, f"started again, it begins at step 0 of {total}"), None
    lost = before + after - total
    if lost < 0:
        return Verdict(FAIL, f"{-lost} steps are skipped: {before} and {after} of {total}"), None
    text = f"{before} steps, then {after}, of {total}"
    return Verdict(PASS, text), lost


def kill(plan):
    """a killed worker costs at most the steps since the last save"""
    runs = interruption(plan, kill_one)
    verdict, lost = went_on(runs)
    if verdict.status != PASS:
        return [("it goes on", verdict)]
    saved = saved_steps(runs[1])
    again = steps_of(runs[1]) - saved
    most = Verdict(PASS, f"{lost} steps are repeated, of {again} since the last save")
    if lost > again:
        text = f"{lost} steps are repeated, although {lost - again} of them were saved"
        most = Verdict(FAIL, text, "", "epoch-starts-again")
    weights = compare(plan, runs[0], runs[2])
    return [
        ("it goes on", verdict),
        ("no saved step is repeated", most),
        ("it ends alike", weights),
        (loads.__doc__, loads(runs[2])),
    ]


def sigterm(plan):
    """told to stop, it loses no step"""
    runs = interruption(plan, stop_all)
    if not runs[1].all("handler"):
        saved = saved_steps(runs[1])
        lost = "all steps" if saved is None else f"{steps_of(runs[1]) - saved} steps"
        return [("it goes on", Verdict(NONE, f"nothing handles SIGTERM: {lost} are lost"))]
    verdict, lost = went_on(runs)
    if verdict.status != PASS:
        return [("it goes on", verdict)]
    none = Verdict(PASS, "none") if lost == 0 else Verdict(FAIL, f"{lost} steps are lost")
    weights = compare(plan, runs[0], runs[2])
    return [("it goes on", verdict), ("no step is lost", none), ("it ends alike", weights)]


def world_size(plan):
    """N processes train as one with a batch N times as large"""
    many, one = plan.run("many", scale=1), plan.run("one", nproc=1, scale=plan.nproc)
    for run in (many, one):
        if not (run.folder / "step1").exists():
            return [("the same steps", Verdict(UNSEEN, f"in float64: {it_ends(run).text}"))]
    return [
        ("each step has the same samples", same_samples(many, one)),
        ("the gradients agree", same_gradients(many, one)),
        ("the weights agree", same_weights(many, one)),
    ]


def same_samples(many, one):
    """Return the verdict on the samples in the first steps of both runs."""
    epochs = [trained(run)[:1] for run in (many, one)]
    if not all(epochs):
        return Verdict(UNSEEN, "no DataLoader was used to train")
    if None in (samples(p) for (epoch,) in epochs for p in epoch.values()):
        return Verdict(UNSEEN, "the samples have no index")
    first = [[epoch[rank]["batches"] for rank in sorted(epoch)] for (epoch,) in epochs]
    for step in range(min(STEPS, len(first[0][0]), len(first[1][0]))):
        several, alone = (sorted(chain(*(of[step] for of in ranks))) for ranks in first)
        if several != alone:
            return Verdict(FAIL, f"step {step + 1} has other samples", epochs[0][0][0]["where"])
    return Verdict(PASS, f"in the first {STEPS} steps")


def kept(run, step):
    """Return parameters and gradients of rank 0 before a step: {name: (parameter, gradient)}."""
    models = torch.load(run.folder / f"step{step}", weights_only=True)
    return {name: (value, gradient) for model in models for name, value, gradient in model}


def apart(one, other):
    """Return how far two tensors are apart, relative to the larger one."""
    return ((one - other).abs().max() / max(one.abs().max(), other.abs().max(), 1e-300)).item()


def same_gradients(many, one):
    """Return the verdict on the gradients of the first step, and name the first that differs."""
    several, alone = kept(many, 1), kept(one, 1)
    for name, (_, gradient) in several.items():
        if gradient is not None and (far := apart(gradient, alone[name][1])) > TOLERANCE:
            factor = (gradient.norm() / alone[name][1].norm()).item()
            text = f"that of {name} is off by {far:.1e} and {factor:.2f} times as long"
            return Verdict(FAIL, text, many.all("step")[0]["where"])
    return Verdict(PASS, f"in float64, to {TOLERANCE:.0e}")


def same_weights(many, one):
    step = min(STEPS, steps_of(many), steps_of(one))
    several, alone = kept(many, step), kept(one, step)
    far = {name: apart(value, alone[name][0]) for name, (value, _) in several.items()}
    name = max(far, key=far.get)
    if far[name] > TOLERANCE:
        return Verdict(FAIL, f"after {step - 1} steps, {name} is off by {far[name]:.1e}")
    return Verdict(PASS, f"after {step - 1} steps, to {TOLERANCE:.0e}")


DRILLS = {
    "kill": (kill, "a killed worker costs no step that was saved"),
    "sigterm": (sigterm, "when the scheduler stops the job, no step is lost"),
    "world-size": (world_size, "N processes train as one with N times the batch"),
}
