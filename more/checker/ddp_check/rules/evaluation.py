"""Rules about which samples are evaluated, and whether the ranks' results are combined.

Here, an evaluation is a tuple, `parts`: one pass over the data for each rank that takes part.
"""

import re
from itertools import chain

from ddp_check import events
from ddp_check.ranks import counted, differ, grouped
from ddp_check.rules.base import passed, unseen, unsure, worst, wrong

CUTS = r"\[\s*:\s*len\("  # matches a script that cuts off a sampler's padding


def evaluations(run):
    """Return the evaluations; in a run that failed, only those that all ranks have reached."""
    by_data = grouped(evaluating_passes(run), lambda each: each.dataset)
    ranks_needed = 1 if run.returncode == 0 else run.world_size
    enough = [by_rank for by_rank in by_data.values() if len(by_rank) >= ranks_needed]
    # The first passes of all ranks over the same data are one evaluation, and so on.
    return [parts for by_rank in enough for parts in zip(*by_rank.values())]


def evaluating_passes(run):
    """Return the passes of each rank over data that is not trained on: {rank: [pass]}.

    A pass that ends early counts only if that is intended: no other pass reads all of this data,
    and a model evaluates the batches, which are not only looked at, as by next(iter(loader)).
    """
    passes = list(chain(*run.passes_by_rank.values()))
    trained = {data_pass.dataset for data_pass in passes if data_pass.is_training}
    read_whole = {data_pass.dataset for data_pass in passes if data_pass.is_whole}

    def evaluates(data_pass):
        if data_pass.dataset in trained or not (data_pass.batches and data_pass.sample_count):
            return False
        on_purpose = data_pass.dataset not in read_whole and run.returncode == 0
        return data_pass.is_whole or (on_purpose and data_pass.events_of(events.BatchEvaluated))

    return {
        rank: [data_pass for data_pass in of_rank if evaluates(data_pass)]
        for rank, of_rank in run.passes_by_rank.items()
    }


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    verdicts, evaluated = [], evaluations(run)
    # Another evaluation may load the rest of a data set, as in PyTorch's ImageNet example.
    seen = {}  # checksum of a data set -> its samples that any evaluation has loaded
    for part in chain(*evaluated):
        seen.setdefault(part.dataset_checksum, set()).update(part.values("indices") or ())
    for parts in evaluated:
        samples, size = [part.values("indices") for part in parts], parts[0].sample_count
        other_subsets = differ(dict(enumerate(parts)), "subset_checksum")
        if None in samples or len(parts) < run.world_size or other_subsets:
            continue
        loaded, distinct = sum(map(len, samples)), len({*chain(*samples)})
        if any(len({*of_rank}) == distinct for of_rank in samples):
            continue  # one rank evaluates all samples
        text = f"{loaded} samples, {distinct} of them distinct, of {size}"
        totals = [event.values for part in parts for event in part.events_of(events.Totalled)]
        where_and_page = parts[0].where, "padded_evaluation"
        # The ranks may have added up how many samples each of them has loaded.
        if loaded > distinct and loaded in chain(*totals):
            verdicts.append(wrong(f"it counts {text}", *where_and_page))
        elif loaded > distinct and not re.search(CUTS, run.source):
            text = f"it loads {text}: are the extra ones dropped?"
            verdicts.append(unsure(text, *where_and_page))
        elif loaded == distinct < size and len(seen[parts[0].dataset_checksum]) < size:
            verdicts.append(unsure(f"it loads {text}: is that intended?", *where_and_page))
    if not evaluated:
        return unseen("no DataLoader was used without training")
    return worst(verdicts)


def result_is_of_all(run):
    """the results of all ranks are combined after an evaluation"""
    divided = [parts for parts in evaluations(run) if is_divided(run, parts)]
    for parts in divided:
        calls = parts[0].events_of(events.Collective)
        if not any(re.search("reduce|gather|all_to_all", call.name) for call in calls):
            own, total = len(parts[0].values("indices")), parts[0].sample_count
            text = f"rank 0 evaluates {own} of {total} samples, and no collective follows that "
            return unsure(f"{text}could bring the others' results", parts[0].where, "rank_0_loss")
    if not divided:
        return unseen("no evaluation is divided among the ranks")
    return passed(counted(len(divided), "evaluation"), divided[0][0].where)


def is_divided(run, parts):
    """Return whether each rank evaluates a part; padding may add a sample for each rank."""
    samples = [part.values("indices") for part in parts]
    if not len(parts) == run.world_size > 1 or None in samples or not all(samples):
        return False
    counts, distinct = [len({*of_rank}) for of_rank in samples], len({*chain(*samples)})
    return max(counts) < distinct and sum(counts) - distinct <= len(samples)
