"""Rules about what is written."""

import math
import os
from pathlib import Path

from ddp_check import events
from ddp_check.ranks import counted
from ddp_check.rules.base import fragile, passed, unseen, unsure, worst, wrong

SYNCHRONIZES = events.Join | events.Wrap | events.Step | events.Collective
WRITES = events.Written | events.Save


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writes = writes_between_waits(run)
    if verdict := worst([*written_by_several(run, writes), written_in_place(run)]):
        return verdict
    if not writes:
        return unseen("no file of the script's folder is written, or lines are only appended to it")
    where = next((event.where for event in run.all(events.Save)), "")
    return passed(counted(len({path for path, _ in writes}), "file"), where)


def written_in_place(run):
    """Return the verdict if torch.save writes a file under its final name, not a temporary one."""
    renamed = {os.devnull, *(event.old_name for event in run.all(events.Written))}
    in_place = [  # neither the file nor a folder above it is renamed
        save
        for save in run.all(events.Save)
        if save.path and not renamed & {save.path, *map(str, Path(save.path).parents)}
    ]
    paths = [save.path for save in in_place]
    for save in in_place:  # a file saved twice, or before the last step, may be for a resume
        if paths.count(save.path) > 1 or save.steps < len(run.steps):
            text = f"{Path(save.path).name} is written in place: a crash then leaves half a file"
            return fragile(text, save.where, "written_in_place")
    if in_place:  # the file is saved once, at the end, so it is the result of the training
        text = f"{Path(paths[0]).name} is written in place after the last step: that matters only "
        return unseen(f"{text}if the script resumes from it", in_place[0].where)


def writes_between_waits(run):
    """Return {(path, number of calls before it that wait for other ranks): {rank: write}}."""
    writes = {}
    for rank, events_of_rank in run.events_by_rank.items():
        waits = 0
        for event in events_of_rank:
            waits += isinstance(event, SYNCHRONIZES)
            if isinstance(event, WRITES) and event.path:
                writes.setdefault((event.path, waits), {})[rank] = event
    return writes


def written_by_several(run, writes):
    """Return the verdicts on files that several ranks write without waiting for each other.

    A file written before the first step may be a copy of the configuration, equal on all ranks.
    """
    first_step = min((step.time for step in run.all(events.Step)), default=math.inf)
    verdicts = []
    for (path, _), by_rank in writes.items():
        if len(by_rank) > 1:
            last = by_rank[max(by_rank)]  # the highest rank's, as only the lowest should write
            ranks = ", ".join(map(str, sorted(by_rank)))
            text = f"ranks {ranks} write {Path(path).name} at the same time"
            say = wrong if last.time > first_step else unsure
            text += ": do they write the same?" * (say is unsure)
            verdicts.append(say(text, last.where, "every_rank_saves"))
    return verdicts


def plain_names(run):
    """a plain model can load what is saved"""
    names = {name for wrap in run.all(events.Wrap) for name in wrap.names}
    for event in run.all(events.Save):
        if event.wrapper:
            text = "the DDP wrapper itself is saved, and loading it needs a process group: save "
            return fragile(f"{text}model.module.state_dict()", event.where, "module_prefix_saved")
        # A model may have a part that is itself named "module".
        if prefixed := [key for key in event.keys if key not in names]:
            text = f"a key is {prefixed[0]}: only a wrapped model can load it"
            return fragile(text, event.where, "module_prefix_saved")
