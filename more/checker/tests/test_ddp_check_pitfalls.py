"""The checker notices the pitfalls."""

import re

import pytest
from checking import judged, named, plan_of, reported
from ddp_check.drills import conclude, perform
from ddp_check.plan import planned
from ddp_check.rules import judge
from ddp_check.rules.base import FRAGILE, SLOW, UNSURE, WRONG
from patching import on_screen, text_of
from support.scripts import LONG, ROOT, write

pytestmark = pytest.mark.usefixtures("own_folder")
SHORT = ("2", "--batch-size=256", "--width=4")
REPORTED = {  # pitfall: the rules that tell it, and what they say
    "accumulation_without_no_sync": {"gradients_are_averaged": "4 backward passes all-reduce"},
    "collective_on_one_rank": {
        "script_ends": "rank 0 calls all_reduce .* but rank 1 barrier .* in barrier",
    },
    "edit_on_one_rank": {"weights_agree": "before step 1, the weights differ from rank to rank"},
    "eval_never_undone": {"training_mode": "step 27 is in evaluation mode"},
    "every_rank_saves": {"one_rank_writes": "ranks 0, 1 write checkpoint.pt.new"},
    "forward_through_module": {
        "weights_agree": "before step 2, the weights differ from rank to rank",
        "gradients_are_averaged": "differ from rank to rank, .* the model is called without",
    },
    "module_prefix_saved": {"plain_names": "a key is module.0.weight"},
    "no_sampler": {"ranks_share_data": "each rank trains on the same 12942 samples"},
    "no_set_epoch": {"order_changes": "epochs 1 and 2 have the same order"},
    "optimizer_of_other_parameters": {"gradients_are_averaged": "has 2 parameters of a model"},
    "padded_evaluation": {"each_sample_is_evaluated_once": "360 samples, 359 of them distinct"},
    "rank_0_evaluates_the_wrapper": {"script_ends": "rank 0 is at .* rank 1 is at .* in barrier"},
    "rank_seeds_split_data": {"ranks_share_data": "samples are seen by several ranks"},
    "same_augmentation": {"random_numbers_differ": "all ranks draw the same numbers"},
    "split_differs_by_rank": {"ranks_share_data": "the same index means different samples"},
    "uneven_batches": {"script_ends": "the ranks have different numbers of batches"},
    "unused_parameters": {"script_ends": "^RuntimeError: .* by making sure all"},
    "written_in_place": {"one_rank_writes": "a crash then leaves half a file"},
}
SEVERITY = {  # of those that are not wrong
    "accumulation_without_no_sync": SLOW,
    "eval_never_undone": UNSURE,
    **dict.fromkeys(("module_prefix_saved", "written_in_place"), FRAGILE),
    **dict.fromkeys(("padded_evaluation", "rank_seeds_split_data"), UNSURE),
    **dict.fromkeys(("same_augmentation", "split_differs_by_rank"), UNSURE),
}
MAY_FAIL = ("every_rank_saves",)  # then the run fails, too
DRILLED = {  # pitfall: the drill that fails
    "epoch_starts_again": "sigterm",
    "resume_without_optimizer": "kill",
    "sigterm_with_workers": "sigterm",
}
QUICK = ("no_sampler", "no_set_epoch")
OWN_TESTS = "".join(path.read_text("utf-8") for path in ROOT.glob("more/pitfalls/tests/test_*.py"))


def broken(tmp_path, name):
    """Write the script that a pitfall breaks."""
    return write(tmp_path / f"{name}.py", text_of(f"more/pitfalls/{name}"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in REPORTED],
)
def test_pitfall(tmp_path, fork_ranks, monkeypatch, name):
    """Exactly the rules that the pitfall breaks tell it; step 5 passes."""
    monkeypatch.setattr("ddp_check.plan.HANGS_AFTER", 8)
    assert reported(named(judge(plan_of("05", tmp_path).undisturbed))) == {}
    run, verdicts = judged(broken(tmp_path, name), *SHORT, timeout=200)
    if name in MAY_FAIL:
        verdicts.pop("script_ends")
    severity = SEVERITY.get(name, WRONG)
    assert reported(verdicts) == dict.fromkeys(REPORTED[name], severity), run.output
    for rule, text in REPORTED[name].items():
        assert re.search(text, verdicts[rule].text)
    if f"def test_{name}(" not in OWN_TESTS:
        assert all(text in run.output for text in on_screen(f"more/pitfalls/{name}")), run.output


WEEKLY = pytest.mark.weekly("the drills of one more pitfall, several runs each")
AGAIN = [pytest.param(name, marks=WEEKLY) for name in DRILLED if name != "resume_without_optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resume_without_optimizer", *AGAIN])
def test_a_pitfall_fails_its_drill(tmp_path, name, fork_ranks):
    """One process is enough to show these pitfalls."""
    drill = DRILLED[name]
    with planned(broken(tmp_path, name), LONG, nproc=1) as plan:
        # Without an interruption, these pitfalls have no effect.
        plan.undisturbed = plan_of("05", tmp_path, nproc=1).undisturbed
        verdicts = perform(drill, plan)
    assert WRONG in {verdict.status for verdict in verdicts}, verdicts
    assert "do not rely on it" in conclude(drill, verdicts)
