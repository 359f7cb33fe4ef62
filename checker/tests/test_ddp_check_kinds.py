"""Each kind of fault is told, with its line; its right counterpart draws nothing.

A script is styles/base.py with changes. To add a kind: what both scripts need, what makes one of
them wrong, the line that the report must name, and what the report shows.
"""

from typing import NamedTuple

import pytest
from checking import failed, fork_ranks, judged, line_of, told
from ddp_check.report import conclude, perform, planned
from ddp_check.rules.base import FRAGILE, NONE, UNSURE, WRONG
from support.jobs import free_port
from support.scripts import ROOT, write

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]
BASE = (ROOT / "checker" / "tests" / "styles" / "base.py").read_text(encoding="utf-8")

# ---------------------------------------------------------------- changes

TRAIN = "            loss = cross_entropy(model(inputs), targets)\n"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
SHOW = "        if rank == 0:\n            print("
READY = "    for epoch in range(3):\n"
WRAP = "    model = DDP(net)\n"
DATA = "    sampler = DistributedSampler(data)\n"
SUM = "        dist.all_reduce(total)\n"
PRINTED = "{total[0] / total[1]:.4f}"
EPOCH = "        sampler.set_epoch(epoch)\n"
LOADER = "    loader = DataLoader(data, 8, sampler=sampler)\n"


def after(line, more):
    """Return the change that adds lines after one."""
    return line, line + more


def before(line, more):
    return line, more + line


def data_set(body, init=""):
    """Return the changes that train on a data set of the script's own, in its own order."""
    text = f"""class Own(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.epoch = x, y, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
{body}

"""
    return [before("\ndef main():", f"\n{text}"), (DATA, f"    data = Own(x[:96], y[:96])\n{DATA}")]


def stream(epoch, part):
    """Return the changes that train on a stream with persistent workers."""
    text = f"""class Stream(torch.utils.data.IterableDataset):
    def __init__(self, x, y):
        self.x, self.y, self.epoch = x, y, {epoch}

    def __iter__(self):
        worker, rank, size = torch.utils.data.get_worker_info(), dist.get_rank(), 2
        order = torch.randperm(96, generator=torch.Generator().manual_seed(int(self.epoch)))
        for index in order[{part}].tolist():
            yield self.x[index], self.y[index]

"""
    loader = "DataLoader(Stream(x[:96], y[:96]), 8, num_workers=2, persistent_workers=True)"
    return [
        before("\ndef main():", f"\n{text}"),
        (LOADER, f"    loader = {loader}\n"),
        (EPOCH, "        loader.dataset.epoch += 1\n"),
    ]


def gathered(how, shown="(guesses == y[96:]).float().mean().item()"):
    """Return the change that evaluates with a padded sampler and gathers the guesses."""
    return before(
        "    dist.barrier()\n",
        f"""    model.eval()
    with torch.no_grad():
        held_out = DataLoader(test, 8, sampler=DistributedSampler(test, shuffle=False))
        mine = torch.cat([net(a).argmax(dim=1) for a, _ in held_out])
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    guesses = {how}
    if rank == 0:
        print({shown})
""",
    )


SCALER = [
    after(
        WRAP,
        '    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)\n',
    ),
    (
        TRAIN,
        '            with torch.autocast("cpu", dtype=torch.float16):\n'
        "                loss = cross_entropy(model(inputs), targets)\n",
    ),
    (
        BACKWARD + STEP,
        "            scaler.scale(loss).backward()\n"
        "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "            scaler.step(optimizer)\n            scaler.update()\n",
    ),
]
UNSCALED = before("            nn.utils.clip_grad", "            scaler.unscale_(optimizer)\n")
BY_HAND = [
    (WRAP, "    model = net\n"),
    after(
        BACKWARD,
        "            for value in model.parameters():\n"
        "                dist.all_reduce(value.grad)\n                value.grad /= size\n",
    ),
]
LOCAL = [
    (WRAP, "    model = net\n"),
    before(
        SUM,
        "        for value in model.parameters():\n"
        "            dist.all_reduce(value.data)\n            value.data /= size\n",
    ),
]
PLATEAU = [
    before(
        READY,
        "    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n",
    ),
    before(SHOW, "        schedule.step(total[0].item())\n"),
]
AVERAGE = [
    before(READY, "    average = torch.optim.swa_utils.AveragedModel(net)\n"),
    after(STEP, "            average.update_parameters(net)\n"),
    before(SHOW, "        with torch.no_grad():\n            average(x[96:])\n"),
]
JOIN = [
    (DATA, "    sampler = DistributedSampler(data, shuffle=False)\n"),
    (LOADER, "    loader = DataLoader(data, 8, sampler=range(rank, 96 - 40 * rank, 2))\n"),
    (EPOCH, ""),
    (
        "        for inputs, targets in loader:\n" + TRAIN,
        "        with model.join():\n          for inputs, targets in loader:\n" + TRAIN,
    ),
]
TOWERS = [
    (
        TRAIN,
        "            out = model(inputs)\n            every = GATHER\n"
        "            loss = cross_entropy(out @ every.T, torch.arange(8) + 8 * rank)\n",
    ),
    (LOADER, LOADER.replace("sampler)", "sampler, drop_last=True)")),
]
LOSES = "lose([torch.empty_like(out), torch.empty_like(out)], out)"
PASSES_ON = ("GATHER", "torch.cat(torch.distributed.nn.all_gather(out))")
LOSE = before(
    "\ndef main():",
    "\ndef lose(parts, out):\n    dist.all_gather(parts, out)\n    return torch.cat(parts)\n\n",
)
SYNCED = [
    ("gloo", "nccl"),
    ("nn.ReLU()", "nn.SyncBatchNorm(8)"),
    before(SUM, "        torch.cuda.set_device(rank)\n"),
]


class Kind(NamedTuple):
    right: list  # changes to the base
    wrong: list  # more changes to the text of the right script
    line: str  # that the report names first
    told: dict  # rule: status
    say: str = ""  # part of what the report says


NO_SAMPLER = (LOADER, "    loader = DataLoader(data, 8, shuffle=True)\n")
KINDS = {
    "not finite": Kind(
        [before(DATA, "    x[37] = 0.0\n")],
        [("x[37] = 0.0", 'x[37] = float("nan")')],
        "optimizer.step()",
        {"values_are_finite": WRONG},
        "the first rank whose loss is not finite is ",
    ),
    "dealt by the data set": Kind(
        [
            *data_set(
                "        row = index // 2 * 2 + dist.get_rank()\n"
                "        return self.x[row], self.y[row] + row"
            ),
            ("nn.Linear(8, 4)", "nn.Linear(8, 100)"),
            NO_SAMPLER,
        ],
        [("2 + dist.get_rank()", "2")],
        "optimizer.step()",
        {"ranks_share_data": WRONG},
        "all ranks train on the same batch",
    ),
    "random samples": Kind(
        [
            *data_set("        return (noise := torch.randn(4)), noise.argmax()"),
            NO_SAMPLER,
            before(READY, "    torch.manual_seed(rank)\n"),
        ],
        [("manual_seed(rank)", "manual_seed(7)")],
        "optimizer.step()",
        {"ranks_share_data": WRONG, "random_numbers_differ": WRONG},
    ),
    "seeded by the index": Kind(
        [
            *data_set(
                "        torch.manual_seed(index)\n"
                "        return self.x[index] + torch.randn(4), self.y[index]"
            )
        ],
        [("        torch.manual_seed(index)\n", "")],
        "for inputs, targets in loader",
        {"random_numbers_differ": WRONG},
    ),
    "join": Kind(JOIN, [("with model.join():", "if True:")], "", {"script_ends": WRONG}),
    "local steps": Kind(
        LOCAL,
        [("dist.all_reduce(value.data)", "value.data *= size")],
        "optimizer.step()",
        {"weights_agree": WRONG, "gradients_are_averaged": WRONG},
        "no model is wrapped",
    ),
    "one log": Kind(
        [before(SHOW, '        open("log.txt", "a").write(f"{rank}\\n")\n')],
        [('"a"', '"w"')],
        'open("log.txt"',
        {"one_rank_writes": WRONG},
    ),
    "cut in order": Kind(
        [gathered("torch.stack(parts, dim=1).flatten()[:21]")],
        [("torch.stack(parts, dim=1).flatten()", "torch.cat(parts)")],
        "mine = torch.cat([",
        {"each_sample_is_evaluated_once": WRONG},
        "in blocks",
    ),
    "cut at all": Kind(
        [gathered("torch.stack(parts, dim=1).flatten()[:21]", "guesses.float().mean()")],
        [("[:21]", "")],
        "mine = torch.cat([",
        {"each_sample_is_evaluated_once": WRONG},
        "nothing is cut off after the gather",
    ),
    "no_sync": Kind(
        [],
        [
            (
                "        for inputs, targets",
                "        model.require_backward_grad_sync = False\n        for inputs, targets",
            )
        ],
        "optimizer.step()",
        {"gradients_are_averaged": WRONG, "weights_agree": WRONG},
        "under no_sync",
    ),
    "a method of the module": Kind(
        [],
        [("cross_entropy(model(inputs)", "cross_entropy(model.module(inputs)")],
        "loss = cross_entropy(",
        {"gradients_are_averaged": WRONG, "weights_agree": WRONG},
        "called without its wrapper",
    ),
    "learning rates": Kind(
        PLATEAU,
        [("step(total[0].item())", "step(-epoch * rank)")],
        "schedule.step(",
        {"rates_are_equal": WRONG, "weights_agree": WRONG},
        "from step ",
    ),
    "loaded after wrapping": Kind(
        [
            after(
                WRAP,
                "    state = {key: 2 * value for key, value in net.state_dict().items()}\n"
                "    net.load_state_dict(state)\n",
            )
        ],
        [("    net.load_state_dict(state)", "    rank or net.load_state_dict(state)")],
        "rank or net.load_state_dict",
        {"weights_agree": WRONG},
    ),
    "early stopping": Kind(
        [before(SHOW, "        if total[0] < 0:\n            break\n")],
        [("total[0] < 0", "rank == 1 and epoch == 1")],
        "",
        {"script_ends": WRONG},
        "rank 1 left the loop over the epochs after 2",
    ),
    "the same order": Kind(
        [
            before(
                "\ndef main():",
                "\ndef forever(loader):\n    for epoch in range(9):\n"
                "        loader.sampler.set_epoch(epoch)\n        yield from loader\n\n",
            ),
            before(READY, "    batches = forever(loader)\n"),
            (EPOCH, ""),
            (
                "for inputs, targets in loader:",
                "for inputs, targets in (next(batches) for _ in 'six st'):",
            ),
        ],
        [
            (
                "forever(loader)\n    for epoch in range(3)",
                "__import__('itertools').cycle(loader)\n    for epoch in range(3)",
            )
        ],
        "batches = ",
        {"order_changes": WRONG},
        "are repeated in the same order",
    ),
    "frozen in workers": Kind(
        stream("torch.zeros(()).share_memory_()", "2 * worker.id + rank :: 4"),
        [("torch.zeros(()).share_memory_()", "0")],
        "for inputs, targets in loader",
        {"order_changes": WRONG},
        "the persistent workers do not see",
    ),
    "split by worker": Kind(
        stream("torch.zeros(()).share_memory_()", "2 * worker.id + rank :: 4"),
        [
            ("2 * worker.id + rank :: 4", "worker.id :: 2"),
            ("int(self.epoch)", "int(self.epoch) + 9 * rank"),
        ],
        "for inputs, targets in loader",
        {"ranks_share_data": WRONG},
    ),
    "gathered without a gradient": Kind(
        [*TOWERS, PASSES_ON],
        [("torch.cat(torch.distributed.nn.all_gather(out))", LOSES), LOSE],
        "dist.all_gather(parts, out)",
        {"gradients_pass_collectives": WRONG},
    ),
    "summed, not divided": Kind(
        [],
        [(PRINTED, "{total[0] / 48:.4f}")],
        "print(f",
        {"printed_loss_is_of_all": UNSURE},
        "is the sum over the ranks",
    ),
    "of rank 0, after a collective": Kind(
        [],
        [(PRINTED, "{loss.item():.5f}")],
        "print(f",
        {"printed_loss_is_of_all": UNSURE},
        "is the loss of rank 0",
    ),
    "a mean of means": Kind(
        [("DataLoader(data, 8", "DataLoader(data, 10")],
        [("loss.item() * len(inputs), len(inputs)]", "loss.item(), 1.0]")],
        "print(f",
        {"printed_loss_is_of_all": UNSURE},
        "a mean over batches of unequal size",
    ),
    "an average on rank 0": Kind(
        AVERAGE,
        [("            average.update", "            rank or average.update")],
        "average(x[96:])",
        {"evaluated_models_agree": WRONG},
    ),
    "the same data, reduced by hand": Kind(
        BY_HAND,
        [("loss = cross_entropy(model(inputs), targets)", "loss = cross_entropy(model(x), y)")],
        "optimizer.step()",
        {"gradients_are_averaged": WRONG},
        "before they are all-reduced",
    ),
    "clipped while scaled": Kind(
        [*SCALER, UNSCALED],
        [("            scaler.unscale_(optimizer)\n", "")],
        "nn.utils.clip_grad_norm_",
        {"clipping_sees_gradients": WRONG},
    ),
    "a schedule too fast": Kind(
        [
            before(
                READY, "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1)\n"
            ),
            after(STEP, "            schedule.step()\n"),
        ],
        [("            schedule.step()\n", "            schedule.step()\n" * 2)],
        "schedule.step()",
        {"rates_are_equal": UNSURE},
    ),
    "a GPU that is not there": Kind(
        SYNCED, [("torch.cuda.set_device(rank)", "x.cuda(7)")], "x.cuda(7)", {"own_gpu": WRONG}
    ),
    "no set_device": Kind(
        [*SYNCED, before(SHOW, "        x.cuda()\n")],
        [("        torch.cuda.set_device(rank)\n", "        x.to(rank)\n")],
        "x.cuda()",
        {"own_gpu": WRONG},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind(tmp_path, monkeypatch, name):
    fork_ranks(monkeypatch)
    kind = KINDS[name]
    right = write(tmp_path / "right.py", BASE, kind.right)
    wrong = write(tmp_path / "wrong.py", right.read_text(encoding="utf-8"), kind.wrong)
    run, verdicts = judged(right, timeout=60)
    assert told(verdicts) == {}, (run.output, verdicts)
    run, verdicts = judged(wrong, timeout=60)
    assert told(verdicts) == kind.told, (run.output, verdicts)
    first = verdicts[next(iter(kind.told))]
    assert kind.say in first.text
    assert not kind.line or line_of(first).startswith(kind.line), first


def test_a_port_in_a_file(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
    (tmp_path / "settings.yaml").write_text(f"epochs: 3\nport: {free_port()}\n", encoding="utf-8")
    read = "open('settings.yaml').read().split()[-1]"
    ranks = "rank=int(environ['RANK']), world_size=2"
    meet = f'    from os import environ\n    at = f"tcp://localhost:{{{read}}}"\n'
    meet += f'    dist.init_process_group("gloo", init_method=at, {ranks})\n'
    script = write(tmp_path / "train.py", BASE, [('    dist.init_process_group("gloo")\n', meet)])
    _, verdicts = judged(script)
    assert told(verdicts) == {"one_group": FRAGILE}
    assert verdicts["one_group"].where == "settings.yaml:2"


def test_slow_is_no_hang(tmp_path):
    """Whether it has begun to train or still imports PyTorch."""
    sleep = before(STEP, "            __import__('time').sleep(3)\n")
    _, verdicts = judged(write(tmp_path / "train.py", BASE, [sleep]), timeout=12)
    assert (verdicts["script_ends"].status, failed(verdicts)) == (UNSURE, [])


def test_an_option_for_the_local_rank_with_a_default(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
    text = '    options = argparse.ArgumentParser()\n    options.add_argument("--local_rank", '
    for keyword, says in (("default=0", {}), ("required=True", {"script_ends": WRONG})):
        lines = f"    import argparse\n\n{text}{keyword})\n    options.parse_args()\n"
        change = before("    dist.init_process_group", lines)
        _, verdicts = judged(write(tmp_path / "train.py", BASE, [change]))
        assert told(verdicts) == says


def test_ranks_that_share_a_model_read_the_same(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
    parallel = """    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(net, dist.init_device_mesh("cpu", (size,)), plan)
"""
    changes = [(WRAP, parallel), NO_SAMPLER, (SUM, "        dist.all_reduce(total)\n")]
    _, verdicts = judged(write(tmp_path / "train.py", BASE, changes))
    assert told(verdicts) == {}
    assert verdicts["ranks_share_data"].status == NONE


def test_a_comparison_with_numbers_that_are_not_finite(tmp_path, monkeypatch):
    """The other drills compare weights as the drill that kills does."""
    fork_ranks(monkeypatch)
    script = write(tmp_path / "train.py", BASE, [before(DATA, '    x[:96] = float("nan")\n')])
    with planned(script) as plan:
        verdicts = perform("world-size", plan)
    assert WRONG in {verdict.status for _, verdict in verdicts}
    assert "do not rely on it" in conclude("world-size", verdicts)
