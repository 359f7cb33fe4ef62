"""Pitfalls in saving and resuming: what the broken script does; tests/ shows what step 5 does."""

import pytest
import torch
from changes import IMPATIENT
from running import TWO
from support.positions import BATCH, RANK_1_LOOKS_ELSEWHERE, SIGTERM
from support.results import losses, same_bits, weights

pytestmark = pytest.mark.slow


def test_every_rank_saves(pitfall):
    """The ranks rename the file when both have written it."""
    line = "        os.replace("
    pitfall.refused((line, f"        dist.barrier()\n{line}"), IMPATIENT)


def test_module_prefix_saved(pitfall):
    """The function that the page names removes the prefix, but only at the start of a name."""
    state = weights(pitfall.ran())
    pitfall.refused()
    state["module.attention_module.weight"] = torch.ones(1)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    assert {"0.weight", "attention_module.weight"} <= {*state}


def test_resume_without_optimizer(pitfall, trained):
    """Only a resumed run ends with other weights than step 5."""
    undisturbed = trained("05", *TWO)
    assert same_bits(pitfall.at("undisturbed").ran(args=TWO), undisturbed)
    pitfall.ran()
    assert not same_bits(pitfall.ran(args=TWO), undisturbed)


def test_lr_overruled(pitfall, trained):
    """It ends with the weights of a run that was not given another learning rate."""
    pitfall.ran()
    assert same_bits(pitfall.ran(args=(*TWO, "--lr=1e-5")), trained("05", *TWO))


def test_epoch_starts_again(pitfall):
    """After 640 samples of 12,942, it trains on all of them."""
    pitfall.stopped((BATCH, f"            {SIGTERM}\n{BATCH}"), samples=640, nprocs=1)
    line = "            self.epochs_run += 1\n"
    job = pitfall.ran((line, f"            log(f'samples {{self.samples_run}}')\n{line}"), nprocs=1)
    assert "samples 13582\n" in job.stdout


def test_unseen_checkpoint(pitfall, trained):
    """Rank 1 does not see the checkpoint: the losses are other than step 5's, and the run hangs."""
    pitfall.ran()
    job = pitfall.ran(RANK_1_LOOKS_ELSEWHERE, IMPATIENT, args=TWO, code=1)
    assert losses(job) not in ([], losses(trained("05", *TWO))[1:])
    assert "Timed out waiting" in job.stderr


def test_written_in_place(pitfall):
    """The rank is killed when it has written 1000 bytes, and the next start fails."""
    save = "        torch.save(checkpoint, self.path)\n"
    killed = "        os.truncate(self.path, 1000)\n        os.kill(os.getpid(), 9)\n"
    pitfall.ran((save, save + killed), nprocs=1, code=1)
    pitfall.refused(nprocs=1)
