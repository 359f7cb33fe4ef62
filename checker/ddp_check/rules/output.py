"""Rules about what is printed, written and loaded."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from ddp_check import events
from ddp_check.ranks import counted, differing_ranks, grouped, of_lowest_rank
from ddp_check.rules.base import fragile, passed, unseen, unsure, worst, wrong

COLOUR = r"\x1b\[[\d;]*m"  # an ANSI code
SYNCHRONIZES = events.Join | events.Wrap | events.Step | events.Collective
WRITES = events.Written | events.Save
SAYS_RANK = r"(?i)\brank"


def one_rank_prints(run):
    """one rank prints the progress, or each with its number"""
    printed = grouped(run.by_rank(events.Print), place_of)
    for (where, words), lines_by_rank in printed.items():
        if len(lines_by_rank) > 1 and words.strip() and not re.search(SAYS_RANK, words):
            ranks = " and ".join(map(str, lines_by_rank))
            example = re.sub(COLOUR, "", of_lowest_rank(lines_by_rank)[0].text).strip()[:60]
            text = f'ranks {ranks} print "{example}": is that intended?'
            return unsure(text, where, "prints_on_every_rank")


def place_of(line):
    """Return what is equal for lines that the same call of print() has given."""
    return line.where, pattern(line.text)


def pattern(text):
    """Return a line without colours, and without its numbers, which may differ between ranks."""
    return re.sub(r"[\d.,]+", "#", re.sub(COLOUR, "", text))


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writes = file_uses(run, WRITES)
    if verdict := worst([written_by_several(run, writes), written_in_place(run)]):
        return verdict
    if not writes:
        return unseen("no file of the script's folder is written, or lines are only appended to it")
    where = next((event.where for event in run.all(events.Save)), "")
    return passed(counted(len(writes), "file"), where)


def written_in_place(run):
    """Return the verdict if torch.save writes a file under its name, not under another one."""
    renamed = {os.devnull, *(event.old_name for event in run.all(events.Written))}
    in_place = [  # unless the folder of the file is renamed
        save
        for save in run.all(events.Save)
        if save.path and not renamed & {save.path, *map(str, Path(save.path).parents)}
    ]
    paths = [save.path for save in in_place]
    for save in in_place:  # more than once, or before the last step: the script may resume from it
        if paths.count(save.path) > 1 or save.steps < len(run.steps):
            text = f"{Path(save.path).name} is written in place: a crash then leaves half a file"
            return fragile(text, save.where, "written_in_place")
    if in_place:  # once, at the end, as the result of the training
        text = f"{Path(paths[0]).name} is written in place after the last step: that matters only "
        return unseen(f"{text}if the script resumes from it", in_place[0].where)


class Use(NamedTuple):
    """A file is written, gets its name, or is read."""

    rank: int
    waits: int  # how many calls that wait for the other ranks came before
    steps: int  # that were taken before
    where: str


def file_uses(run, kinds):
    """Return the uses of each file: {path: [use]}."""
    uses = {}
    for rank, events_of_rank in run.events_by_rank.items():
        waits = steps = 0
        for event in events_of_rank:
            steps += isinstance(event, events.Step)
            waits += isinstance(event, SYNCHRONIZES)
            if isinstance(event, kinds) and event.path:
                uses.setdefault(event.path, []).append(Use(rank, waits, steps, event.where))
    return uses


def written_by_several(run, writes_by_path):
    """Return the verdict if several ranks write the same file: at once, or at other times.

    Before the first step, that may be a copy of the configuration, equal on all ranks.
    """
    verdicts = []
    for path, writes in writes_by_path.items():
        steps_by_rank, ranks_by_wait = {}, {}
        for write in writes:
            steps_by_rank.setdefault(write.rank, set()).add(write.steps)
            ranks_by_wait.setdefault(write.waits, set()).add(write.rank)
        text = f"ranks {', '.join(map(str, steps_by_rank))} write {Path(path).name}"
        # The line is that of the highest rank, which should leave the file to the lowest.
        where = next(write.where for write in writes if write.rank == max(steps_by_rank))
        at_once = [write for write in writes if len(ranks_by_wait[write.waits]) > 1]
        if at_once:  # nothing makes one rank wait for another
            text += " at the same time"
            verdict = wrong
            if not any(write.steps for write in at_once):
                text, verdict = f"{text}: do they write the same?", unsure
        elif run.returncode == 0 and differing_ranks(steps_by_rank):
            text += " after other steps: is that intended?"  # each after steps of its own
            verdict = unsure
        else:
            continue
        verdicts.append(verdict(text, where, "every_rank_saves"))
    return worst(verdicts)


def plain_names(run):
    """a plain model can load what is saved"""
    names = {name for wrap in run.all(events.Wrap) for name in wrap.names}
    for event in run.all(events.Save):
        if event.wrapper:
            text = "the DDP wrapper itself is saved, and loading it needs a process group: save "
            return fragile(f"{text}model.module.state_dict()", event.where, "module_prefix_saved")
        if prefixed := [key for key in event.keys if key not in names]:
            text = f"a key is {prefixed[0]}: only a wrapped model can load it"
            return fragile(text, event.where, "module_prefix_saved")


def gathered_parts_are_apart(run):
    """what is gathered is told apart by rank"""
    if not any("gather" in call.name for call in run.all(events.Collective)):
        return unseen("nothing is gathered")
    for event in run.all(events.PartsOverwritten):
        text = "all parts go into one tensor, which keeps the last rank's: [tensor] * N is the "
        return wrong(f"{text}same tensor N times", event.where)


def loaded_names_fit(run):
    """a model has some of the names that it loads"""
    if not any(event.by_model for event in run.all(events.StateLoaded)):
        return unseen("no model loads a state")
    for event in run.all(events.NothingLoaded):
        text = f"with strict=False, nothing is loaded: the model has no {event.name}, nor any other"
        page = "module_prefix_saved" if event.name.startswith("module.") else ""
        return wrong(text, event.where, page)
