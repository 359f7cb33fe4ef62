"""DDP by hand: it ends with the weights of DDP, and what happens when it is broken."""

import pytest
from changes import printed_at_the_end
from running import FEW, ONE, TWO, Patched, same_but_for_rounding
from support.positions import BATCH
from support.results import printed_by, resumed, same_bits
from support.scripts import DOUBLE, digest

pytestmark = pytest.mark.slow
END = "    if dist.get_rank() == 0:\n        evaluate("
RANKS_WEIGHTS = printed_at_the_end(digest("model.parameters()"), END)
OWN_SEED = ("seed(args.seed)", "seed(args.seed + dist.get_rank())")
UNSENT = ("            dist.broadcast(tensor, src=0)\n", "            pass\n")
ONLY_RANK_0 = "self.model.module[0].bias.requires_grad_(dist.get_rank() == 0)"
UNUSED_ON_RANK_1 = (BATCH, f"            {ONLY_RANK_0}\n{BATCH}")
MODEL = "    model = build_model(args.width).to(device)\n"
TWO_BRANCHES = f"""\
    class Branches(nn.ModuleList):
        def forward(self, images):
            order = (0, 1) if dist.get_rank() == 0 else (1, 0)
            results = {{branch: self[branch](images) for branch in order}}
            return results[0] + 2 * results[1]

    first = Branches(nn.Conv2d(1, args.width, 3, padding=1) for _ in range(2))
{MODEL}    model[0] = first.to(device)
"""
OTHER_ORDER = (MODEL, TWO_BRANCHES)


@pytest.fixture(params=["after_backward", "during_backward", "in_buckets"])
def by_hand(request, tmp_path):
    return Patched(f"more/recipes/{request.param}", tmp_path)


@pytest.mark.gpu
def test_ddp_by_hand_ends_with_the_same_bits(by_hand, trained):
    """After an epoch, and after the one with which it is resumed."""
    assert same_bits(by_hand.ran(args=ONE), trained("03", *ONE))
    again = by_hand.ran(args=TWO)
    assert resumed(again) == [1]
    assert same_bits(again, trained("03", *TWO))


def test_ddp_by_hand_on_four_ranks(by_hand, trained_with):
    """The weights are those of DDP but for rounding, so they are compared in double precision."""
    double = by_hand.ran(*DOUBLE, args=FEW, nprocs=4)
    same_but_for_rounding(double, trained_with("03", (*DOUBLE,), FEW, nprocs=4))


def test_broken_ddp_by_hand(tmp_path, trained_with):
    """Without a first broadcast or an order, ranks differ; without a gradient, they fail."""

    def broken(name, *changes, code=0):
        recipe = Patched(f"more/recipes/{name}", tmp_path).at(f"{len([*tmp_path.iterdir()])}")
        return recipe.ran(*changes, RANKS_WEIGHTS, args=FEW, code=code)

    for job in broken("after_backward", UNSENT, OWN_SEED), broken("during_backward", OTHER_ORDER):
        assert printed_by(job, 0) != printed_by(job, 1)
    ordered = broken("in_buckets", OTHER_ORDER)
    assert same_bits(ordered, trained_with("03", (OTHER_ORDER,), FEW))
    job = broken("during_backward", UNUSED_ON_RANK_1, code=1)
    assert "op.preamble.length <= op.nbytes" in job.stderr
    job = broken("in_buckets", UNUSED_ON_RANK_1, code=1)
    assert "RuntimeError: a bucket waits for a gradient" in job.stderr
