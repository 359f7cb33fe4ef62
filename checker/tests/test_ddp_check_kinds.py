"""Each kind of fault is told, with its line; its right counterpart draws nothing.

A script is base.py with changes. To add a kind: what both scripts need, what makes one of
them wrong, the line that the report must name, and what the report shows.
"""

import random
import re
import textwrap
from typing import NamedTuple

import pytest
from checking import BASE, SPAWNED, after, before, judged, line_of, named, observed, told
from ddp_check import events
from ddp_check.drills import conclude, perform
from ddp_check.plan import LAUNCHERS, TORCHRUN, planned
from ddp_check.report import changes, exit_code, ranked
from ddp_check.rules import judge
from ddp_check.rules.base import NOT_APPLICABLE, PASS, SLOW, UNSEEN, UNSURE, WRONG
from support.scripts import write

pytestmark = [pytest.mark.usefixtures("own_folder", "fork_ranks"), pytest.mark.slow]

# ---------------------------------------------------------------- changes

EVALUATE = "\ndef evaluate("
ITEM = "return self.x[index], self.y[index]"
DATA = "    sampler = DistributedSampler(data)\n"
LOADER = "    loader = DataLoader(data, 8, sampler=sampler)\n"
WRAP = "    model = DDP(net)\n"
READY = "    for epoch in range(first, 3):\n"
EPOCH = "        sampler.set_epoch(epoch)\n"
LOOP = "        for inputs, targets in loader:\n"
TRAIN = "            loss = cross_entropy(model(inputs), targets)\n"
ZERO = "            optimizer.zero_grad()\n"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
SUM = "        dist.all_reduce(total)\n"
PRINTED = "{total[0] / total[1]:.4f}"
SHOW = "        if rank == 0:\n"
LEAVE = "    dist.destroy_process_group()\n"
SAVE = BASE[BASE.index("            state =") : BASE.index("        right =")]
UNEVALUATED = ("evaluate(net, test)", "0")
EVENLY_DIVIDED = "evaluate(net, Subset(test.dataset, test.indices[:20]))\n"
NORMALIZED = ("nn.ReLU()", "nn.BatchNorm1d(8)")
STOPS = [before(SHOW, "        if total[0] < 0:\n            break\n"), UNEVALUATED]
ALONE = [  # rank 0 evaluates
    after(SHOW, "                [net(inputs) for inputs, _ in DataLoader(test, 8)]\n"),
    after(SHOW, "            with torch.no_grad():\n"),
    ("DataLoader(data, 8", "DataLoader(data, 10"),
    UNEVALUATED,
]
LATE = [
    UNEVALUATED,
    NORMALIZED,
    (
        "    dist.barrier()\n",
        """    if rank == 0:
        time.sleep(1)
        net.eval()
        with torch.no_grad():
            [net(inputs) for inputs, _ in DataLoader(test, 8)]
""",
    ),
]
SAME_SEED = ("manual_seed(rank)", "manual_seed(7)")
SEEDS_APART = "    torch.manual_seed(rank)\n"
OWN_MODELS = [
    (WRAP, "    model = net\n"),
    after(DATA, SEEDS_APART),
    ("sampler=sampler", "sampler=range(rank, 96, 2)"),
]
SAME_ORDER = ("sampler=sampler", "sampler=torch.randperm(96).tolist()")
NOT_FINITE = [before(DATA, '    x[data.indices[5]] = float("nan")\n')]
CLEANED = "            [value.grad.nan_to_num_(nan=0.01) for value in net.parameters()]\n"
DROPOUT = [("nn.ReLU()", "nn.Dropout(0.1)")]
STREAM = [
    before(
        EVALUATE,
        """
class Stream(torch_data.IterableDataset):
    def __init__(self, points):
        self.points, self.epoch = points, torch.zeros(()).share_memory_()

    def __iter__(self):
        worker, rank = torch_data.get_worker_info(), dist.get_rank()
        order = torch.randperm(96, generator=torch.Generator().manual_seed(int(self.epoch)))
        for index in order[2 * worker.id + rank :: 4].tolist():
            yield self.points[index]

""",
    ),
    (LOADER, "    loader = DataLoader(Stream(data), 8, num_workers=2, persistent_workers=True)\n"),
    (EPOCH, "        loader.dataset.epoch += 1\n"),
]
TURNS = [
    before(
        EVALUATE,
        """
class Turns:
    turn = 0

    def __len__(self):
        return 48

    def __iter__(self):
        self.turn += 1
        order = torch.randperm(96, generator=torch.Generator().manual_seed(7 + self.turn))
        return iter(order[dist.get_rank() :: 2].tolist())

""",
    ),
    (LOADER, "    loader = DataLoader(data, 8, sampler=Turns())\n"),
]
OWN_ORDER = ("int(self.epoch)", "int(self.epoch) + 9 * rank")
DEALT = [
    (ITEM, "row = (index + dist.get_rank()) % 117\n        return self.x[row], row"),
    ("nn.Linear(8, 4)", "nn.Linear(8, 117)"),
    SAME_ORDER,
]
DEALT_BATCHES = """rows = (torch.arange(8) + index + 8 * dist.get_rank()) % 117
        return self.x[rows], self.y[rows]"""
RANDOM_SAMPLES = [(ITEM, "return (noise := torch.randn(4)), noise.argmax()")]
SEEDED = [
    (ITEM, "torch.manual_seed(index)\n        return self.x[index] + torch.randn(4), 3"),
    (LOADER, LOADER.replace("sampler)", "sampler, num_workers=2)")),
    SAME_SEED,
    UNEVALUATED,
]
AUGMENTED = [
    ("import os\n", "import os\nimport random\n\nimport numpy\n"),
    (ITEM, "return self.x[index] + random.random() + torch.rand(4), self.y[index]"),
    after("    torch.manual_seed(rank)\n", "    random.seed(rank)\n    numpy.random.seed(0)\n"),
    before(LOOP, "        numpy.random.permutation(9)  # a choice that the ranks share\n"),
    UNEVALUATED,
]
DICTIONARIES = [
    (
        LOADER,
        """    def named(rows):
        x, y = torch_data.default_collate(rows)
        return {"text": ["a"] * len(x), "x": x, "y": y}

    loader = DataLoader(data, 8, sampler=sampler, collate_fn=named)
""",
    ),
    (
        LOOP + TRAIN,
        """        for batch in loader:
            inputs = batch["x"]
            loss = cross_entropy(model(input=inputs), batch["y"])
""",
    ),
]
FOREVER = "(one for epoch in range(9) if not sampler.set_epoch(epoch) for one in loader)"
CYCLED = [
    before(READY, f"    batches = {FOREVER}\n"),
    (EPOCH, ""),
    (LOOP, "        for inputs, targets in (next(batches) for _ in range(6)):\n"),
    UNEVALUATED,
]
DRAWN = [  # as nanoGPT does: no DataLoader
    (EPOCH, ""),
    (LOOP, LOOP.replace("loader", "((x, x.argmax(dim=1)) for x in torch.randn(6, 8, 4))")),
    UNEVALUATED,
]
ACCUMULATED = [
    (LOOP, "        for number, (inputs, targets) in enumerate(loader, 1):\n"),
    (
        TRAIN + ZERO + BACKWARD + STEP,
        """            last = number % 3 == 0
            with nullcontext() if last else model.no_sync():
                loss = cross_entropy(model(inputs), targets) / 3
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
""",
    ),
]
ALWAYS_SYNC = ("nullcontext() if last else model.no_sync()", "nullcontext()")
JOIN = [
    (LOADER, "    loader = DataLoader(data, 8, sampler=range(rank, 96 - 40 * rank, 2))\n"),
    (EPOCH, ""),
    (LOOP, f"        with model.join():\n  {LOOP}"),
    before(SUM, "        with torch.no_grad():\n            net(x)\n"),
    UNEVALUATED,
]
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
HEAD = [
    after(WRAP, "    head = DDP(nn.Linear(4, 4))\n"),
    ("model.parameters()", "[*model.parameters(), *head.parameters()]"),
    ("entropy(model(inputs)", "entropy(head(model(inputs))"),
]
SHARDED = [
    (WRAP, "    from torch.distributed.fsdp import fully_shard\n\n    model = fully_shard(net)\n"),
    (SAVE, ""),
    UNEVALUATED,
]
SCHEDULED = "            schedule.step()\n"
SCHEDULE = [
    before(READY, "    Lambda = torch.optim.lr_scheduler.LambdaLR\n"),
    before(READY, "    schedule = Lambda(optimizer, lambda count: 0.9**count)\n"),
    after(STEP, SCHEDULED),
]
SLOWER = (
    '{**(state := optimizer.state_dict()), "param_groups": [{**state["param_groups"][0], "lr": 1}]}'
)
ONE_BUFFER = "[torch.empty_like(mine)] * dist.get_world_size()"
MESH = '    mesh = dist.init_device_mesh("cuda", (size, 1), mesh_dim_names="ab")\n'
SCHEDULERS = """    Lambda = torch.optim.lr_scheduler.LambdaLR
    warm, cold, late = (Lambda(optimizer, lambda n: 1) for _ in "wcl")
    both = torch.optim.lr_scheduler.ChainedScheduler([warm, cold])
"""
OWN_SCHEDULE = """
class Linear(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, total):
        self.total = total
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * (1 - self.last_epoch / self.total) for rate in self.base_lrs]

"""
PLATEAU = [
    r"from step .+ \(schedule.step",
    [
        before(READY, "    Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau\n"),
        before(READY, "    schedule = Plateau(optimizer, patience=0)\n"),
        before(SHOW, "        schedule.step(total[0].item())\n"),
        UNEVALUATED,
    ],
]
LOADED = [
    r"\(rank or net.load_state_dict",
    [after(WRAP, "    net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()})\n")],
]
LOOSELY = "    net.load_state_dict(same, strict=False)\n"
AVERAGE = [
    before(READY, "    average = torch.optim.swa_utils.AveragedModel(net)\n"),
    after(STEP, "            average.update_parameters(net)\n"),
    ("evaluate(net, test)", "evaluate(net, test) + evaluate(average, test)"),
]
SCALER = [
    before(READY, '    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)\n'),
    (
        TRAIN,
        '            with torch.autocast("cpu", dtype=torch.float16):\n'
        "                loss = cross_entropy(model(inputs), targets)\n",
    ),
    (
        BACKWARD + STEP,
        "            scaler.scale(loss).backward()\n            scaler.unscale_(optimizer)\n"
        "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "            scaler.step(optimizer)\n            scaler.update()\n",
    ),
]
UNSCALED = ("            scaler.unscale_(optimizer)\n", "")
SECOND = "    scale = nn.Parameter(torch.ones(4))\n    second = torch.optim.SGD([scale], 0.1)\n"
CLIPPED = """            scale.square().sum().backward()
            nn.utils.clip_grad_norm_(scale, 1.0)
            second.step(), second.zero_grad()
"""
CLIPS = "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
DEALT_BY_HAND = """        generator = torch.Generator().manual_seed(epoch)
        for part in torch.randperm(96, generator=generator)[rank::2].split(8):
            inputs, targets = x[part], x[part].argmax(1)
"""
TOWERS = [
    (LOADER, LOADER.replace("sampler)", "sampler, drop_last=True)")),
    (
        TRAIN,
        "            out = model(inputs)\n"
        "            every = torch.cat(torch.distributed.nn.all_gather(out))\n"
        "            targets = torch.arange(len(out)) + len(out) * rank\n"
        "            loss = cross_entropy(out @ every.T, targets)\n",
    ),
]
LOST = [
    ("torch.distributed.nn.all_gather(out)", "lose(out, [])"),
    before(
        EVALUATE,
        """
def lose(out, parts):
    parts += [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, out)
    return parts

""",
    ),
]
LOST_IN_ONE = [
    (
        "            every = torch.cat(torch.distributed.nn.all_gather(out))\n",
        "            every = torch.empty(size * len(out), 4)\n"
        "            dist.all_gather_into_tensor(every, out)\n",
    )
]
BARLOW = [
    before(EVALUATE, "\ndef summed(x):\n    return torch.distributed.nn.all_reduce(x)\n\n"),
    ("targets)\n", "targets) + summed(model(inputs).square().mean(dim=0)).sum()\n"),
]
LENGTH = [
    ("    with torch.no_grad", "    batches = iter(part)\n    with torch.no_grad"),
    ("for inputs, _ in part]", "for inputs, _ in (next(batches) for _ in range(len(part)))]"),
]
IN_DICTIONARIES = [
    ("self.x, self.y = x, x.argmax(dim=1)", 'self.rows = {"x": x, "y": x.argmax(dim=1)}'),
    ("len(self.x)", 'len(self.rows["x"])'),
    (ITEM, 'return self.rows["x"][index], self.rows["y"][index]'),
    ("random_split(Points(x), (96, 21), split)", "Points(x[:96]), Points(x[96:])"),
    ("test.dataset.y[test.indices]", 'test.rows["y"]'),
]
HITS = [  # in blocks, of which the one extra sample is the end
    ("argmax(dim=1) for inputs, _ in", "argmax(dim=1) == inputs.argmax(dim=1) for inputs, _ in"),
    ("stack(parts, dim=1).flatten()", "cat(parts)"),
    ("(guesses == test.dataset.y[test.indices]).sum()", "guesses.sum()"),
]
GATHERED_IN_LOOP = [
    before("    with torch.no_grad", "    every = []\n"),
    (
        "        mine = torch.cat([model(inputs).argmax(dim=1) for inputs, _ in part])\n"
        "    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(parts, mine)\n"
        "    guesses = torch.stack(parts, dim=1).flatten()[: len(test)]\n",
        """        for inputs, _ in part:
            mine = model(inputs).argmax(dim=1)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            every.append(torch.stack(parts, 1).flatten())
    guesses = torch.cat(every)[: len(test)]
""",
    ),
]
INFINITE = 'torch.full((4, 4), float("-inf")).triu(1)'
INFINITE_MASK = before("    first = 0\n", f'    net.register_buffer("mask", {INFINITE})\n')
MASKED = [before(WRAP, '    net.register_buffer("mask", torch.ones(4, 4).tril())\n')]
LOGGED = [
    ("import os\n", "import logging\nimport os\n"),
    before("    torch.manual_seed(0)\n", '    logging.basicConfig(filename="log", level="INFO")\n'),
    ("print(f", "logging.info(f"),
]
USES = "            mine.append(model(inputs).argmax(dim=1))\n"
LEAVES = "            if len(mine) == 2:\n                break\n"
BREAKS = [
    before("    with torch.no_grad", "    mine = []\n"),
    (
        "        mine = torch.cat([model(inputs).argmax(dim=1) for inputs, _ in part])\n",
        f"        for inputs, _ in part:\n{USES}{LEAVES}    mine = torch.cat(mine)\n",
    ),
]
FEWER_SAMPLES = "    sampler.drop_last, sampler.num_samples, sampler.total_size = True, 12, 24\n"
FEWER = ("y[test.indices]", "y[test.indices][: len(guesses)]")
OWN = [
    ("self.x, self.y = x,", "self.own, self.x, self.y = torch.Generator(), x,"),
    (ITEM, "return self.x[index] + torch.rand(4, generator=self.own), self.y[index]"),
    after(DATA, "    data.dataset.own.manual_seed(dist.get_rank())\n"),
    *DROPOUT,
]
WAITS = ("            dist.barrier()\n", "")
IN_TURN = [
    before(SHOW, "        for turn in range(size):\n"),
    before(SHOW, "            if turn == rank:\n"),
    before(SHOW, '                open("turns.txt", "w").write(f"{rank}")\n'),
    before(SHOW, "            dist.barrier()\n"),
]
SHARE = [("net, test)\n", 'net, test)\n        rank or print(f"accuracy {right / 21:.4f}")\n')]
CORRECT = "(guesses == test.dataset.y[test.indices])"
KEPT = ("[: len(test)]", "")
REST = [
    ("shuffle=False)", "shuffle=False, drop_last=True)"),
    ("y[test.indices]", "y[test.indices][: len(guesses)]"),
    (
        "flatten()[: len(test)]",
        """flatten()
    left = DataLoader(Subset(test, range(20, 21)), 8)
    with torch.no_grad():
        guesses = torch.cat([guesses, *(model(inputs).argmax(dim=1) for inputs, _ in left)])""",
    ),
]
SYNCED = [("gloo", "nccl"), ("nn.ReLU()", "nn.SyncBatchNorm(8)")]
GPUS = [
    (
        '    dist.init_process_group("gloo")\n',
        """    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device(f"{torch.accelerator.current_accelerator()}:{local}")
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
""",
    ),
    (LOADER, LOADER.replace("sampler)", "sampler, pin_memory=True)")),
    (
        WRAP,
        """    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(net.to(rank), device_ids=[rank])
    model.register_comm_hook(state=None, hook=default_hooks.bf16_compress_hook)
""",
    ),
    before(READY, '    scaler = torch.amp.GradScaler("cuda")\n'),
    ("torch.zeros(2)", "torch.zeros(2, device=device)"),
    (
        TRAIN,
        """            inputs, targets = inputs.cuda(non_blocking=True), targets.to(rank)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(model(inputs), targets)
""",
    ),
    (
        BACKWARD + STEP,
        "            scaler.scale(loss).backward()\n"
        "            scaler.step(optimizer)\n            scaler.update()\n",
    ),
    ("len(inputs)])\n", "len(inputs)]).to(rank)\n"),
    ("[model(inputs).argmax", "[model(inputs.cuda()).argmax"),
    ("(guesses ==", "(guesses.cpu() =="),
    before(
        LEAVE,
        """    torch.load("saved.pt", map_location=f"cuda:{rank}")
    torch.cuda.init()
    int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0])
    seeded = torch.Generator(device="cuda").manual_seed(0)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.randn(4, device=rank, generator=seeded)
    ended.record()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] == 0
    assert isinstance(seeded, torch.Generator) and begun.elapsed_time(ended) >= 0
    assert torch.histc(torch.arange(4, device="cuda"), bins=4).tolist() == [1, 1, 1, 1]
    current = torch.cuda.current_device()
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == current
    torch.set_default_device(device)
    torch.cuda.nvtx.range("read")(torch.zeros)(1)
    torch.set_default_device(None)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state().cpu())
    torch.cuda.set_rng_state_all([state.cpu() for state in torch.cuda.get_rng_state_all()])
    thread = threading.Thread(target=lambda: moved.append(x.cuda()))
    moved = []
    thread.start()
    thread.join()
    dist.all_reduce(moved[0], group=dist.new_group(backend="nccl"))
""",
    ),
    ("import sys\n", "import sys\nimport threading\n"),
]
TRANSLATED = {
    *("torch.cuda.set_device()", "torch.cuda.synchronize()", "torch.cuda.init()", ".cuda()"),
    *("pin_memory", "device_ids", "device_id", '"cuda:0"', '"cuda"'),
    *("torch.Generator(device)", "a stream or an event"),
}

IN_DOUBLE = before("    rank, size =", "    torch.set_default_dtype(torch.float64)\n")
NOISY_POINTS = """
class Noisy(Points):
    def __getitem__(self, index):
        return self.x[index] + torch.rand(4), self.y[index]

"""
CENTERED = """class Centered(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("center", torch.zeros(4))

    def forward(self, inputs):
        dist.all_reduce(total := inputs.mean(dim=0))
        self.center = 0.9 * self.center + 0.05 * total
        return self.inner(inputs - self.center)

"""
CODEBOOK = [
    before("\ndef main():", f"\n{CENTERED}"),
    before("    model = DDP(net)\n", "    net = Centered(net)\n"),
    UNEVALUATED,
]
HALF_HOOK = """
def halve(_, bucket):
    half = bucket.buffer().half()
    half = half / dist.get_world_size()
    sent = dist.all_reduce(half, async_op=True).get_future()
    return sent.then(lambda sent: bucket.buffer().copy_(sent.value()[0]))

"""
HOOKED = [  # gradients are reduced as soon as each is there
    (
        WRAP,
        """    model = net

    def reduce(value):
        value.grad /= size
        dist.all_reduce(value.grad)

    for value in model.parameters():
        value.register_post_accumulate_grad_hook(reduce)
""",
    ),
]
IN_ANOTHER_ORDER = "in [*model.parameters()][:: 1 - 2 * rank]:\n                dist"
BUCKETS = [
    (WRAP, "    model = net\n"),
    after(
        BACKWARD,
        """            gradients = [value.grad for value in model.parameters()]
            for bucket in (gradients[:2], gradients[2:]):
                flat = torch.cat([one.flatten() for one in bucket])
                dist.all_reduce(flat)
                parts = (flat / size).split([one.numel() for one in bucket])
                for one, part in zip(bucket, parts):
                    one.copy_(part.view_as(one))
""",
    ),
]
CHOSEN = [  # the best weights until now
    ('        rank or print(f"accuracy {right / 20:.4f}")\n', ""),
    before(READY, "    best = {}\n"),
    before(
        "        open(",
        """        if rank == 0 and right > max(best, default=-1):
            best = {right: net.state_dict()}
            torch.save(best, "new.pt")
            os.replace("new.pt", "best.pt")
""",
    ),
]
SAMPLES_OF_ALL = [  # the sum over the ranks is the mean over all samples
    BY_HAND[0],
    (BY_HAND[1][0], BY_HAND[1][1].replace("                value.grad /= size\n", "")),
    (BACKWARD, "            (loss / size).backward()\n"),
]
LENGTHS = [  # batches that are padded to a length of their own
    (
        LOADER,
        """    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [order[at : at + 8] for at in range(8 * rank, 96, 8 * size)]

    def padded(rows):
        x, y = torch_data.default_collate(rows)
        return x, y, torch.zeros(len(x), 1 + int(y.sum()))

    loader = DataLoader(data, batch_sampler=rows, collate_fn=padded)
""",
    ),
    (LOOP, LOOP.replace("targets in", "targets, _ in")),
]
TIME_FIRST = [  # as pad_sequence returns a batch, unless it is told otherwise
    (
        LOADER,
        """    def time_first(rows):
        x, y = torch_data.default_collate(rows)
        return x.T, y

    loader = DataLoader(data, 8, sampler=sampler, collate_fn=time_first)
""",
    ),
    (TRAIN, TRAIN.replace("inputs", "inputs.T")),
]
EVEN = [("randn(117", "randn(116"), ("(96, 21)", "(96, 20)")]  # no sample is left over
ADDED = [  # each rank counts its own part, and the counts are added up
    (
        BASE[BASE.index("    parts = [") : BASE.index("\n\ndef main")],
        """    model.train()
    wanted = test.dataset.y[test.indices][dist.get_rank() :: 2]
    right = (mine == wanted).sum()
    dist.all_reduce(right)
    return right.item()
""",
    ),
    *EVEN,
    ("net, test)\n", 'net, test)\n        rank or print(f"accuracy {right / 20:.4f}")\n'),
]
NOISE = [
    ("model(inputs), targets", "model(inputs + 0.1 * torch.randn(8, 4)), targets"),
    after(LOOP, "            next(iter(DataLoader(test, 7)))\n"),
    UNEVALUATED,
]
MASKED_MEAN = (  # over those of the inputs that count, whose number differs from rank to rank
    TRAIN,
    """            kept = inputs[:, 0] > 0
            loss = cross_entropy(model(inputs)[kept], targets[kept])
""",
)
SKIPS = """
    class Skips(nn.Sequential):
        steps = 0

        def forward(self, inputs):
            self.steps += 1
            found = self[0](inputs)
            return found if (self.steps + dist.get_rank()) % 2 else self[1](found)

    model = DDP(Skips(net, nn.Linear(4, 4)), find_unused_parameters=True)
"""
TEACHER = """    teacher = nn.Linear(4, 4)
    alone = torch.optim.SGD(teacher.parameters(), lr=0.1)
    for inputs, targets in DataLoader(data, 8) if rank == 0 else ():
        cross_entropy(teacher(inputs), targets).backward()
        alone.step()
    for value in teacher.parameters():
        dist.broadcast(value.data, 0)
"""
BROADCAST = "    for value in net.parameters():\n        dist.broadcast(value.data, 0)\n"
ESTIMATE = """
def estimate(model, loader):
    with torch.no_grad():
        for count, (inputs, _) in enumerate(loader):
            if count == 3:
                break
            model(inputs)

"""
MEAN_OF_RANKS = """
def mean(loss):
    dist.all_reduce(loss)
    loss = loss / dist.get_world_size()
    return loss

"""
THRESHOLD = """            each = cross_entropy(model(inputs), targets, reduction="none")
            every = [torch.zeros(8) for _ in range(size)]
            dist.all_gather(every, each)
            loss = (each * (each >= torch.cat(every).median())).mean()
"""
FOLD = """        part = Subset(data, range(fold, 64 + fold))
        sampler = DistributedSampler(part)
        loader = DataLoader(part, 8, sampler=sampler)
"""
CROSS = "nn.functional.binary_cross_entropy(model(inputs).sigmoid(), inputs.sigmoid())"
AUTOENCODER = [("cross_entropy(model(inputs), targets)", CROSS)]
BY_SLICES = [
    before(
        "        right = eval",
        """        with torch.no_grad():
            mine = torch.stack([x for x, _ in test])[rank::size]
            error = net(mine).square().sum() / len(mine) / size
        dist.all_reduce(error)
        rank or print(f"test error {error:.4f}")
""",
    ),
    UNEVALUATED,
]
SHARES = [  # of each rank, added up and divided by their number
    (
        "net, test)\n",
        """net, test)
        share = torch.tensor([1 - right / 21, 1])
        dist.all_reduce(share)
        rank or print(f"accuracy {share[0] / share[1]:.4f}")
""",
    ),
]
ADDED_UP = ("share[0] / share[1]", "share[0]")
BY_OBJECTS = [
    before(
        "        right = eval",
        """        wanted, parts = torch.stack([x for x, _ in test])[:20, 0], [None] * size
        dist.all_gather_object(parts, wanted[rank::size])
        error = (torch.stack(parts, dim=1).flatten() - wanted).abs().mean()
""",
    ),
    UNEVALUATED,
]
TWIN = [
    before(READY, "    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))\n"),
    after(STEP, "            twin.load_state_dict(net.state_dict())\n"),
    before(LOOP, "        with torch.no_grad():\n            [each(x) for each in (net, twin)]\n"),
    UNEVALUATED,
]
CONSTANT = [("randn(117, 4)", "ones(117, 4)"), UNEVALUATED]
RATE = [(SHOW, SHOW + """            print(f"lr {optimizer.param_groups[0]['lr']:.4f}")\n""")]


# ---------------------------------------------------------------- kinds


class Kind(NamedTuple):
    told: dict  # what the report shows of the wrong script: {rule: status}
    wrong: list  # changes to the right script
    say: str = r"\(optimizer.step\(\)\)"  # what the first rule says, and the line that it names
    right: list = []  # noqa: RUF012  # changes to the base


RANDOM = {"random_numbers_differ": WRONG}
FINITE, SHARED = {"values_are_finite": WRONG}, {"ranks_share_data": WRONG}
ORDER, SINGLE = {"order_changes": WRONG}, {"each_sample_is_evaluated_once": WRONG}
GRADIENTS, RATES = {"gradients_are_averaged": WRONG}, {"rates_are_equal": WRONG}
WEIGHTS, EVALUATED = {"weights_agree": WRONG}, {"evaluated_models_agree": WRONG}
PRINTED_LOSS, GPU = {"printed_loss_is_of_all": UNSURE}, {"own_gpu": WRONG}
ENDS = {"script_ends": WRONG}
LOADS, EVALUATES = r"\(for inputs, targets in loader", r"\(mine = torch.cat"
KINDS = {
    "not finite": Kind(FINITE, NOT_FINITE, r"on rank ., the loss is not finite \(optimizer.step"),
    "not finite, and cleaned": Kind(
        {"values_are_finite": UNSURE},
        [*NOT_FINITE, after(BACKWARD, CLEANED)],
        "a loss is not finite, and no gradient that a step takes",
    ),
    "skipped steps": Kind(
        FINITE,
        [("scaler.step(optimizer)", "optimizer.step()")],
        r"from step 1 on; on rank ., the gradient of .+ is not finite \(optimizer.step",
        SCALER,
    ),
    "clipped while scaled": Kind(
        {"clipping_comes_last": WRONG},
        [UNSCALED],
        r"\(nn.utils.clip_grad_norm_\(model",
        [*SCALER, before(READY, SECOND), before(UNSCALED[0], CLIPPED)],
    ),
    # ------------------------------------------------------------ data
    "dealt by the data set": Kind(
        SHARED,
        [("index + dist.get_rank()", "index")],
        f"each rank trains on the same 96 samples {LOADS}",
        DEALT,
    ),
    "a full batch without a sampler": Kind(
        SHARED,
        [("DataLoader(data, 96, sampler=sampler)", "DataLoader(data, 96, shuffle=True)")],
        f"each rank trains on the same 96 samples {LOADS}",
        [("DataLoader(data, 8", "DataLoader(data, 96")],
    ),
    "more replicas than ranks": Kind(
        SHARED,
        [("Sampler(data)", "Sampler(data, num_replicas=4, rank=rank)"), (FEWER_SAMPLES, "")],
        f"DistributedSampler divides the samples among 4 ranks, and there are 2 {LOADS}",
        [after(DATA, FEWER_SAMPLES)],
    ),
    "batches with the time first": Kind(
        SHARED,
        [("sampler=sampler", "shuffle=True")],
        f"each rank trains on the same 96 samples {LOADS}",
        TIME_FIRST,
    ),
    "batches out of order": Kind(
        SHARED,
        [SAME_ORDER],
        f"each rank trains on the same 96 samples {LOADS}",
        [
            (ITEM, f"time.sleep(index * (3 - 2 * dist.get_rank()) % 5 / 1000)\n        {ITEM}"),
            (LOADER, LOADER.replace("sampler)", "sampler, num_workers=2, in_order=False)")),
            UNEVALUATED,
        ],
    ),
    "random samples": Kind({**SHARED, **RANDOM}, [SAME_SEED, SAME_ORDER], LOADS, RANDOM_SAMPLES),
    "random samples, which may be views of the same ones": Kind(
        {"ranks_share_data": UNSURE},
        [SAME_ORDER],
        f"are the samples new for each rank.+{LOADS}",
        RANDOM_SAMPLES,
    ),
    "the same batches, augmented": Kind(
        SHARED,
        [SAME_ORDER],
        f"each rank trains on the same 96 samples {LOADS}",
        [(ITEM, ITEM.replace("self.x[index]", "self.x[index] + torch.rand(4)")), UNEVALUATED],
    ),
    "a part of each batch": Kind(
        {"ranks_share_data": UNSURE},
        [("model(inputs), targets", "model(inputs[rank::2]), targets[rank::2]"), SAME_ORDER],
        f"does each take its part of each batch.+{LOADS}",
        [UNEVALUATED],
    ),
    "dictionaries": Kind(SHARED, [SAME_ORDER], r"\(for batch in loader", DICTIONARIES),
    "no DataLoader": Kind({**SHARED, "random_numbers_differ": UNSURE}, [SAME_SEED], right=DRAWN),
    "drawn from one stream, a rank ahead": Kind(
        SHARED,
        [SAME_SEED, before(READY, "    rank or torch.randn(6, 8, 4)\n")],
        "12 of 18 batches are the same on all ranks, in other steps",
        DRAWN,
    ),
    "one of two loaders in a loop": Kind(
        SHARED,
        [SAME_ORDER],
        r"each rank trains on the same \d+ samples \(for \(inputs, targets\), _ in zip",
        [
            before(READY, "    apart = DataLoader(x, 8, sampler=range(rank, 96, 2))\n"),
            (LOOP, "        for (inputs, targets), _ in zip(loader, apart):\n"),
        ],
    ),
    "sharded parameters": Kind(SHARED, [SAME_ORDER], LOADS, SHARDED),
    "processes of its own": Kind(
        SHARED,
        [SAME_ORDER],
        LOADS,
        [
            *SPAWNED,
            ("file://{os.getcwd()}/met", "tcp://localhost:{os.getenv('PORT', 29713)}"),
            before(EVALUATE, "\nclass Options:\n    port: int = 29713\n"),
            before(EVALUATE, '\nif "MASTER_PORT" not in os.environ:\n    port = 29713\n'),
        ],
    ),
    "split by worker": Kind(
        SHARED, [("2 * worker.id + rank :: 4", "worker.id :: 2"), OWN_ORDER], LOADS, STREAM
    ),
    "not split by worker": Kind(
        {"ranks_share_data": UNSURE},
        [("2 * worker.id + rank :: 4", "rank :: 2")],
        f"2 times on each sample.+{LOADS}",
        STREAM,
    ),
    "a stream drawn with replacement": Kind(
        {"ranks_share_data": UNSURE},
        [
            (
                "order[2 * worker.id + rank :: 4]",
                "torch.cat([order[worker.id :: 2], order[rank:][:8]])",
            )
        ],
        f"the same 96 samples: does each draw with replacement.+{LOADS}",
        STREAM,
    ),
    "an order of its own": Kind(
        SHARED,
        [("Generator().manual_seed(0)).to", "Generator().manual_seed(rank)).to")],
        r"each has a part of an order of its own \(for inputs, targets, _ in",
        LENGTHS,
    ),
    "the same noise": Kind(RANDOM, [SAME_SEED], "in the training loop, several for each", NOISE),
    "a loader that each step begins anew": Kind(
        {"order_changes": WRONG},
        [(LOOP, "        for _ in loader:\n            inputs, targets = next(iter(loader))\n")],
        r"have the same order, each left after 1 step; set_epoch gets 2 last",
        [("DataLoader(data, 8", "DataLoader(data, 16")],
    ),
    "the same choice for each batch": Kind(
        {"random_numbers_differ": UNSURE},
        [SAME_SEED],
        "numbers in the training loop: should they",
        [*NOISE, ("randn(8, 4)", "randint(2, (1,))"), IN_DOUBLE],
    ),
    "samples that are others on each rank": Kind(
        {"ranks_share_data": UNSURE},
        [("return self.x[index],", "return self.x[index] + dist.get_rank(),")],
        r"of \d+ samples that several ranks have seen, in different epochs, are not the same",
        [UNEVALUATED],
    ),
    "what hash() returns": Kind(
        {"ranks_share_data": UNSURE},
        [(ITEM, ITEM.replace("self.x[index]", "self.x[index] + hash('a') % 2"))],
        "the script calls hash",
    ),
    "an epoch that is begun again": Kind(
        {"order_changes": UNSURE},
        [("(1, 9), ", "(1, 4), (1, 9), ")],
        r"the 32 samples of pass 2 come again in the next one.+ \(for inputs, targets in iter",
        [
            (READY, "    for epoch, count in [(0, 9), (1, 9), (2, 9)]:\n"),
            (LOOP, LOOP.replace("loader", "itertools.islice(loader, count)")),
        ],
    ),
    "split by rank": Kind(
        SHARED,
        [("Generator().manual_seed(0)", "Generator().manual_seed(rank)")],
        f"the split differs from rank to rank {LOADS}",
    ),
    "the same order": Kind(
        ORDER,
        [(FOREVER, "itertools.cycle(loader)")],
        r"are repeated in the same order.+ \(batches = ",
        CYCLED,
    ),
    "a generator that is seeded anew": Kind(
        ORDER,
        [(EPOCH, "        loader.generator.manual_seed(7)\n")],
        f"is the sampler seeded anew before each.+{LOADS}",
        [
            (
                LOADER,
                """    part = Subset(data, range(rank, 96, 2))
    loader = DataLoader(part, 8, shuffle=True, generator=torch.Generator().manual_seed(rank))
""",
            )
        ],
    ),
    "the same order of a data set that keeps what it has loaded": Kind(
        ORDER,
        [(EPOCH, "")],
        f"set_epoch is never called {LOADS}",
        [(ITEM, f"vars(self).setdefault('kept', {{}})[index] = self.x[index]\n        {ITEM}")],
    ),
    "the order of its own sampler": Kind(
        {"order_changes": UNSURE},
        [("7 + self.turn", "7")],
        rf"own sampler is to do.+{LOADS}",
        TURNS,
    ),
    "the same order of other data": Kind(
        {"order_changes": UNSURE},
        [(EPOCH, "        data.dataset.x *= 1.1\n")],
        f"of data that has changed: is it all new.+{LOADS}",
    ),
    "frozen in workers": Kind(
        ORDER, [("torch.zeros(()).share_memory_()", "0")], f"workers do not see .+{LOADS}", STREAM
    ),
    "seeded by the index": Kind(
        RANDOM, [("torch.manual_seed(index)", "0")], f"in DataLoader workers.+ {LOADS}", SEEDED
    ),
    "equal seeds of random": Kind(
        {"random_numbers_differ": UNSURE},
        [("random.seed(rank)", "random.seed(7)")],
        rf"equal seeds of random; add .+ {LOADS}",
        AUGMENTED,
    ),
    "same dropout": Kind({"random_numbers_differ": UNSURE}, [SAME_SEED], right=DROPOUT),
    # ------------------------------------------------------------ gradients and weights
    "no_sync": Kind(
        {**GRADIENTS, **WEIGHTS},
        [before(LOOP, "        model.require_backward_grad_sync = False\n")],
        r"under no_sync \(optimizer.step",
    ),
    "in evaluation mode after an epoch in training mode": Kind(
        {"training_mode": UNSURE},
        [after(EPOCH, "        epoch == 2 and model.eval()\n")],
        "step 13 is in evaluation mode: is that intended",
    ),
    "accumulated": Kind({"gradients_are_averaged": SLOW}, [ALWAYS_SYNC], "3 backward", ACCUMULATED),
    "a mean over what a mask leaves": Kind(
        {"gradients_are_averaged": UNSURE},
        [MASKED_MEAN],
        "a mean over another number of elements, first .+ and ",
    ),
    "a rank that skips steps": Kind(
        {**GRADIENTS, **WEIGHTS},
        [(STEP, "            if rank == 0 or loss < 1.3:\n    " + STEP)],
        r"18 steps on rank 0 and \d+ steps on rank 1: does each rank decide by itself",
        [UNEVALUATED],
    ),
    "unfrozen after wrapping": Kind(
        {**GRADIENTS, **WEIGHTS},
        [after(WRAP, "    net[2].requires_grad_(True)\n")],
        r"first that of 2.weight, which DDP does not reduce.+\(model = DDP",
        [before(WRAP, "    net[2].requires_grad_(False)\n")],
    ),
    "a layer put in after wrapping": Kind(
        ENDS, [after(WRAP, "    net[2] = nn.Linear(8, 4)\n")], "2.weight came into the model after"
    ),
    "one of two models": Kind(
        {**GRADIENTS, **WEIGHTS},
        [("head(model", "head.module(model")],
        r"first that of weight of model 2; the model is called without .+\(loss = cross_e",
        HEAD,
    ),
    "reduced again": Kind(
        {"gradients_are_averaged": SLOW},
        [BY_HAND[1]],
        r"this changes nothing \(dist.all_reduce\(va",
    ),
    "two optimizers, reduced again": Kind(
        GRADIENTS,
        [before(STEP, "            [dist.all_reduce(value.grad) for value in net.parameters()]\n")],
        "2 times their mean: DDP has averaged them before",
        [
            ("AdamW(model.parameters()", "AdamW(net[0].parameters()"),
            before(READY, "    second = torch.optim.SGD(net[2].parameters(), lr=0.01)\n"),
            after(STEP, "            second.step()\n            second.zero_grad()\n"),
        ],
    ),
    "join": Kind(ENDS, [("with model.join():", "if True:")], "", JOIN),
    "the same data, reduced by hand": Kind(
        GRADIENTS, [("model(inputs), targets", "model(x), x.argmax(dim=1)")], "before they", BY_HAND
    ),
    "reduced copies": Kind(
        {**GRADIENTS, **WEIGHTS},
        [
            (
                "all_reduce(value.grad)\n                value.grad /=",
                "all_reduce(2 * value.grad)  #",
            )
        ],
        r"is it written back to .grad\? \(dist.all_reduce",
        BY_HAND,
    ),
    "clipped before they are reduced": Kind(
        {"clipping_comes_last": WRONG},
        [(CLIPS + STEP, STEP), after(BACKWARD, CLIPS)],
        r"each rank clips its own, of norm .+ and .+ averaged afterwards \(.+clip_grad",
        [*BY_HAND, before(STEP, CLIPS)],
    ),
    "local steps that end without a mean": Kind(
        {"weights_agree": UNSURE},
        [("dist.all_reduce(value.data)", "epoch == 2 or dist.all_reduce(value.data)")],
        "but end with others: average them after the last step",
        LOCAL,
    ),
    "local steps": Kind(
        {**WEIGHTS, **GRADIENTS}, [("dist.all_reduce(value.data)", "0")], "no model is wrapp", LOCAL
    ),
    "gathered without a gradient": Kind(
        {"gradients_pass_collectives": WRONG}, LOST, r"\(dist.all_gather\(parts, out", TOWERS
    ),
    "targets as if each rank were rank 0": Kind(
        {"gathered_parts_are_apart": WRONG},
        [(" + len(out) * rank", "")],
        r"add the rank times their number to the targets \(loss = cross_entropy\(out @",
        TOWERS,
    ),
    "gathered into a tensor without a gradient": Kind(
        {"gradients_pass_collectives": UNSURE},
        LOST_IN_ONE,
        r"\(dist.all_gather_into_",
        [*TOWERS, SYNCED[0]],
    ),
    "summed without a gradient": Kind(
        {"gradients_pass_collectives": UNSURE},
        [("return torch.distributed.nn.all_reduce(x)", "dist.all_reduce(x)\n    return x")],
        r"the gradient is 1/2 of the right one.+\(dist.all_reduce\(x",
        BARLOW,
    ),
    "never zeroed": Kind(
        GRADIENTS, [(ZERO, "")], r"takes the gradients of those before it.+ \(optimizer.step"
    ),
    "a layer that is replaced after the optimizer has it": Kind(
        WEIGHTS,
        [before(WRAP, "    net[2] = nn.Linear(8, 4)\n")],
        "the optimizer has 2 parameters of a model that is not wrapped",
        [
            (WRAP, ""),
            ("AdamW(model.parameters(), lr=0.01)\n", "AdamW(net.parameters(), lr=0.01)\n" + WRAP),
        ],
    ),
    "the loss divided by the number of ranks": Kind(
        GRADIENTS, [(BACKWARD, "            (loss / size).backward()\n")], r"\(\(loss / size\).back"
    ),
    "the loss added up over the ranks": Kind(
        GRADIENTS,
        [(BACKWARD, BACKWARD.replace("loss", "torch.distributed.nn.all_reduce(loss)"))],
        "the loss is added up over the ranks: a step takes 2 times",
    ),
    "summed by hand, not divided": Kind(
        GRADIENTS,
        [("                value.grad /= size\n", "")],
        r"are the sum over the ranks, 2 times their mean: divide .+\(dist.all_reduce\(value",
        [
            *BY_HAND,
            ("nn.ReLU()", "nn.PReLU()"),  # of one element
            ("loss = cross_", "loss = 0.5 * cross_"),
        ],
    ),
    "summed by hand, beside a sum for each step": Kind(
        {"gradients_are_averaged": UNSURE},
        [("                value.grad /= size\n", "")],
        "unless each loss is divided by a number that the ranks have added up",
        [*BY_HAND, after(STEP, "            dist.all_reduce(loss.detach().clone())\n")],
    ),
    "summed by hooks, not divided": Kind(
        GRADIENTS, [("value.grad /= size", "0")], r"are the sum over the ranks", HOOKED
    ),
    "folds of their own, whose results are objects": Kind(
        {"weights_agree": UNSURE},
        [*OWN_MODELS, before(SUM, "        dist.all_gather_object([None] * size, epoch)\n")],
        "parameters of its own, from weights of its own: is that intended",
        [UNEVALUATED],
    ),
    "a table of which each rank has a part": Kind(
        {"weights_agree": UNSURE},
        [
            after(WRAP, "    table = nn.Linear(4, 4)\n"),
            ("AdamW(model.parameters()", "AdamW([*model.parameters(), *table.parameters()]"),
            (TRAIN, TRAIN.replace("inputs", "table(inputs)")),
            after(BACKWARD, "            dist.all_reduce(inputs)\n"),
        ],
        "parameters of its own, from weights of its own: is that intended",
        [UNEVALUATED],
    ),
    "only one rank trains": Kind(
        {"weights_agree": UNSURE},
        [(WRAP, "    model = net\n"), (LOOP, LOOP.replace("loader", "loader if rank else ()"))],
        "only rank 1 trains: is that intended",
        [UNEVALUATED],
    ),
    "trials of their own": Kind(
        {"weights_agree": UNSURE},
        [before(WRAP, TEACHER.replace(" if rank == 0 else ()", "").replace("0.1", "0.1 + rank"))],
        r"before, each rank has trained a model that is not wrapped.+\(model = DDP",
    ),
    "noise of its own in gradients": Kind(
        {**GRADIENTS, **WEIGHTS},
        [after(BACKWARD, "            net[0].bias.grad += torch.randn(8)\n")],
        "first that of 0.bias; were they changed after DDP had averaged them",
    ),
    "gradients past DDP": Kind(
        {**GRADIENTS, **WEIGHTS},
        [
            (
                BACKWARD,
                "            values = [*net.parameters()]\n"
                "            for value, grad in zip(values, torch.autograd.grad(loss, values)):\n"
                "                value.grad = grad\n",
            )
        ],
        "no backward.. has given them: torch.autograd.grad",
    ),
    "a hook that sums up in half precision": Kind(
        GRADIENTS,
        [("half / dist.get_world_size()", "half / 1")],
        "are the sum over the ranks, 2 times their mean",
        [
            before("\ndef evaluate(", HALF_HOOK),
            after(WRAP, "    model.register_comm_hook(None, halve)\n"),
        ],
    ),
    "weights of one rank after each epoch": Kind(
        {**WEIGHTS, **GRADIENTS},
        [
            (WRAP, "    model = net\n"),
            before(SUM, textwrap.indent(BROADCAST, "    ")),
        ],
        "no model is wrapped in DistributedDataParallel: each rank trains its own",
        [UNEVALUATED],
    ),
    "an order of its own, without a DataLoader": Kind(
        {"ranks_share_data": UNSURE},
        [("manual_seed(epoch)", "manual_seed(9 * rank + epoch)")],
        r"of the first \d+ samples of each rank are those of others, too",
        [(LOADER, ""), (LOOP, DEALT_BY_HAND), UNEVALUATED],
    ),
    "more batches on one rank, without a DataLoader": Kind(
        ENDS,
        [("* 6:", "* (5 + rank):")],
        r"rank 0 calls all_reduce, and rank 1 trains on: does it have more batches",
        [
            (LOOP, "        for inputs, targets in [(x[rank::15], x[rank::15].argmax(1))] * 6:\n"),
            UNEVALUATED,
        ],
    ),
    "a few samples in an order of each rank's own": Kind(
        {"ranks_share_data": UNSURE},
        [("sampler=sampler", "sampler=torch_data.RandomSampler(data, num_samples=40)")],
        "each draws from all of them in an order of its own",
        [UNEVALUATED],
    ),
    "over a part of the ranks": Kind(
        {**GRADIENTS, **WEIGHTS},
        [("DDP(net)", "DDP(net, process_group=dist.new_subgroups(1)[0])")],
        r"DDP averages over a process group of 1 rank \(.+process_group=",
    ),
    "candidates of their own": Kind(
        {"evaluated_models_agree": UNSURE},
        [before(LOOP, "        nn.init.constant_(net[0].weight, rank)\n")],
        "0.weight of Sequential differs from rank to rank: is that intended",
        [(WRAP, "    model = net\n"), (STEP, "")],
    ),
    "without the first broadcast": Kind(
        WEIGHTS,
        [after(DATA, SEEDS_APART)],
        "before step 1, the weights differ .+ broadcast them at the start",
        BUCKETS,
    ),
    "reduced in another order": Kind(
        {"script_ends": WRONG, "same_collectives": WRONG},
        [("in model.parameters():\n                dist", IN_ANOTHER_ORDER)],
        "rank 0 calls all_reduce of 32 elements",
        BY_HAND,
    ),
    "a plateau with a loss of its own": Kind(
        RATES,
        [("step(total[0].item())", "step(loss.item())"), ("patience=0", "patience=9")],
        r"the scheduler gets another value on each rank.+\(schedule.step",
        PLATEAU[1],
    ),
    "a schedule of one rank": Kind(
        {**RATES, **WEIGHTS},
        [(SCHEDULED, SCHEDULED.replace("sch", "rank or sch"))],
        r"from step 2 on.+takes 18 steps on rank 0 and 0 steps on rank 1.+\(rank or schedule.step",
        SCHEDULE,
    ),
    "a schedule of its own class, for the steps of one process": Kind(
        {"schedule_is_finished": UNSURE},
        [("3 * len(loader)", "3 * len(data) // 8")],
        r"it takes 18 steps of 36.+\(schedule.step",
        [
            before(EVALUATE, OWN_SCHEDULE),
            before(READY, "    schedule = Linear(optimizer, 3 * len(loader))\n"),
            SCHEDULE[2],
        ],
    ),
    "a plateau of one rank": Kind(
        {"rates_are_equal": UNSURE},
        [
            ("        schedule.step(", "        rank or schedule.step("),
            ("patience=0", "patience=9"),
        ],
        r"takes 3 steps on rank 0 and 0 steps on rank 1.+\(rank or schedule.step",
        PLATEAU[1],
    ),
    "learning rates": Kind(
        {**RATES, **WEIGHTS}, [("step(total[0].", "step(-epoch * rank * total[0].")], *PLATEAU
    ),
    "loaded after wrapping": Kind(
        WEIGHTS, [("    net.load_state_dict({k", "    rank or net.load_state_dict({k")], *LOADED
    ),
    "a state of each rank's own, loaded after wrapping": Kind(
        WEIGHTS,
        [("{k: 2 * v", "{k: (2 + rank) * v")],
        r"does each rank load the same state here.+ \(net.load_state_dict",
        LOADED[1],
    ),
    "a state that does not fit": Kind(
        {"loaded_names_fit": WRONG},
        [("{k: v", "{f'module.{k}': v")],
        r"nothing is loaded: the model has no module.0.weight, nor any other \(net.load_state",
        [before(WRAP, "    same = {k: v for k, v in net.state_dict().items()}\n" + LOOSELY)],
    ),
    "a buffer of its own": Kind(
        {"weights_agree": UNSURE},
        [("dist.all_reduce(total := inputs.mean(dim=0))", "total = 2 * inputs.mean(dim=0)")],
        r"the buffer center differs .+ \(optimizer.step",
        CODEBOOK,
    ),
    "more batches on one rank": Kind(
        ENDS,
        [("range(rank, 96, 2)", "range(rank, 96 - 40 * (1 - rank), 2)")],
        r"after . steps, rank 0 calls all_reduce, and rank 1 trains on.+\(dist.all_reduce",
        [("sampler=sampler", "sampler=range(rank, 96, 2)"), UNEVALUATED],
    ),
    "a batch that one rank skips": Kind(
        ENDS,
        [before(TRAIN, "            if rank and targets[0] == 0:\n                continue\n")],
        r"trains on: rank 1 has taken . steps? with 6 batches",
        [UNEVALUATED],
    ),
    "a schedule that one rank restores": Kind(
        {**RATES, **WEIGHTS},
        [("    optimizer.load_state_dict({", "    rank or optimizer.load_state_dict({")],
        r"not all ranks load the state of their optimizer \(wrong.py:",
        [before(READY, f"    optimizer.load_state_dict({SLOWER})\n"), UNEVALUATED],
    ),
    "early stopping": Kind(
        ENDS, [("total[0] < 0", "rank == epoch == 1")], "^after 2 epochs.+rank 1 left", STOPS
    ),
    "early stopping beside buffers": Kind(
        ENDS, [("total[0] < 0", "rank < epoch == 1")], "rank 0 left the loop", [*STOPS, NORMALIZED]
    ),
    "weights that agree before the first change": Kind(
        {**WEIGHTS, **GRADIENTS},
        [("dist.all_reduce(value.grad)", "value.grad *= size")],
        right=[*BY_HAND, *SCHEDULE, ("0.9**count", "count / 9")],  # at first, the rate is 0
    ),
    "a sum of rank 0 between two steps": Kind(
        ENDS,
        [after(STEP, "            rank < epoch and dist.all_reduce(torch.ones(9))\n")],
        r"^after 7 steps, rank 0 calls all_reduce, and rank 1 does not, .+ \(rank < epoch and",
    ),
    "an evaluation with a gather on rank 0": Kind(
        ENDS,
        [("right = evaluate(net, test)", "right = 0 if rank else evaluate(net, test)")],
        r"^after 1 epoch, in step 6, rank 0 left.+; rank 0 alone calls all_gather \(wrong",
    ),
    # ------------------------------------------------------------ evaluation
    "an average": Kind(
        EVALUATED,
        [("  average.", "  rank or average.")],
        r"\(average\(x",
        [
            *AVERAGE[:2],
            before(LOOP, "        with torch.no_grad():\n            average(x)\n"),
            *DRAWN,
        ],
    ),
    "a second model, evaluated in the same line": Kind(
        {"evaluated_models_agree": UNSURE},
        [("twin.load_state_dict", "rank or twin.load_state_dict")],
        r"0.weight of Sequential differs from rank to rank: is that intended\? \(\[each",
        TWIN,
    ),
    "a buffer": Kind(
        EVALUATED,
        [("DDP(net)", "DDP(net, broadcast_buffers=False)")],
        f"1.running_mean of Sequential differs .+ {EVALUATES}",
        [
            NORMALIZED,
            ("evaluate(net, test)", "evaluate(model, test)"),
            before(READY, "    teacher = nn.BatchNorm1d(4).requires_grad_(False)\n"),
            after(STEP, "            with torch.no_grad():\n                teacher(inputs)\n"),
        ],
    ),
    "in training mode": Kind(
        {"evaluation_mode": WRONG},
        [("model.eval()", "0")],
        EVALUATES,
        [*DROPOUT, after("model.eval()\n", "    model[1].train()  # Monte Carlo dropout\n")],
    ),
    "cut in order": Kind(
        SINGLE, [("stack(parts, dim=1).flatten()", "cat(parts)")], "in blocks", IN_DICTIONARIES
    ),
    "gathered into one tensor, cut in order": Kind(
        SINGLE,
        [
            (
                "all_gather(tensor_list=parts, tensor=mine)",
                "all_gather_into_tensor(out := torch.cat(parts), mine)",
            ),
            ("torch.stack(parts, dim=1).flatten()", "out"),
        ],
        "in blocks",
        [("all_gather(parts, mine)", "all_gather(tensor_list=parts, tensor=mine)")],
    ),
    "not cut, in order": Kind(
        SINGLE,
        [("stack(parts, dim=1).flatten()", "cat(parts)")],
        r"in another order than the labels.+: \d+ of 20 agree, and 20 if the ranks take turns",
        [*EVEN, ("[model(inputs)", "[inputs")],
    ),
    "read in order, which are all that is gathered": Kind(
        {"each_sample_is_evaluated_once": UNSURE},
        [("stack(parts, dim=1).flatten()", "cat(parts)"), KEPT],
        f"is it put in the order of the data set.+ {EVALUATES}",
        [
            *EVEN,
            ("(guesses == test.dataset.y[test.indices]).sum().item()", "sum(guesses.tolist())"),
        ],
    ),
    "not cut, in order, without a DataLoader": Kind(
        SINGLE,
        [("stack(parts, dim=1).flatten() - wanted", "cat(parts) - wanted")],
        r"in another order than the labels.+ \(error = ",
        BY_OBJECTS,
    ),
    "gathered as one number": Kind(
        SINGLE,
        [("_ in part])\n", "_ in part]).sum().reshape(1)\n")],
        "counts 22 samples, 21 of them distinct, of 21",
        HITS,
    ),
    "cut, after as many batches as there are": Kind(
        SINGLE,
        [KEPT, ("guesses == test.dataset.y[test.indices]", "guesses == 0")],
        "counts 22 samples, 21 of them distinct, of 21: nothing is cut off after the gather",
        LENGTH,
    ),
    "gathered in the loop, cut behind it": Kind(
        SINGLE,
        [KEPT, ("guesses == test.dataset.y[test.indices]", "guesses == 0")],
        "counts 22 samples, 21 of them distinct, of 21: nothing is cut off after the gather",
        [*GATHERED_IN_LOOP, before("        right = ", f"        {EVENLY_DIVIDED}")],
    ),
    "cut, perhaps": Kind(
        {"each_sample_is_evaluated_once": UNSURE},
        [
            KEPT,
            ("(guesses == test.dataset.y[test.indices]).sum().item()", "sum(map(int, guesses))"),
        ],
        EVALUATES,
    ),
    "its own part": Kind(
        {"result_is_of_all": WRONG, "each_sample_is_evaluated_once": UNSURE},
        [
            ("    dist.all_reduce(right)\n", ""),
            *BREAKS,
            (USES + LEAVES, LEAVES + USES),
            ("mine) == 2", "mine) == 1"),
            ("mine == wanted", "mine == wanted[:8]"),
            ("{right / 20", "{right / 8"),
        ],
        r"rank 0 has evaluated 8 of 16 samples.+\(rank or print",
        ADDED,
    ),
    "its own loss": Kind(
        {"result_is_of_all": UNSURE},
        [("    dist.all_reduce(right)\n", ""), ("accuracy {right / 20", "val loss {right / 7")],
        r"rank 0 has evaluated 10 of 20 samples.+: is it its own, or .+ \(rank or print",
        ADDED,
    ),
    "the best model by its own part": Kind(
        {"result_is_of_all": UNSURE},
        [("    dist.all_reduce(right)\n", "")],
        r"before it saves: does it choose by its own part\? \(torch.save\(best",
        [*ADDED, *CHOSEN],
    ),
    "the rest": Kind(
        {"each_sample_is_evaluated_once": UNSURE},
        [("range(20, 21)", "range(0)")],
        "it sees 20 of 21 samples: is that intended",
        REST,
    ),
    # ------------------------------------------------------------ output
    "in turn": Kind(
        {"one_rank_writes": WRONG},
        [WAITS],
        r"ranks 0, 1 write turns.txt at the same time \(open",
        IN_TURN,
    ),
    "a temporary file of all ranks": Kind(
        {"one_rank_writes": WRONG},
        [("rank or open", "open")],
        r"ranks 0, 1 write guesses at the same time \(open",
        [after(LEAVE, '    rank or open(os.environ["TMPDIR"] + "/guesses", "w")\n')],
    ),
    "a part of a sharded model": Kind(
        {"one_rank_writes": WRONG},
        [("value.full_tensor()", "value")],
        r"rank 0 alone saves, and only its own part of 0.weight.+ \(torch.save",
        [
            *SHARDED,
            before(
                LEAVE,
                """    whole = {key: value.full_tensor() for key, value in net.state_dict().items()}
    if rank == 0:
        torch.save(whole, "new.pt")
        os.replace("new.pt", "whole.pt")
""",
            ),
        ],
    ),
    "read before it is written": Kind(
        {"one_rank_writes": WRONG},
        [("    dist.barrier()\n", "")],
        r"rank 1 reads saved.pt, which rank 0 writes, and nothing makes it wait.+\(again = ",
        [before(LEAVE, '    again = torch.load("saved.pt", weights_only=True)\n'), UNEVALUATED],
    ),
    "a configuration that all ranks write": Kind(
        {"one_rank_writes": UNSURE},
        [("rank or open", "open")],
        r"write args.json at the same time: do they write the same\? \(open",
        [
            before(READY, '    rank or open("args.json", "w").write("{}")\n'),
            before(LEAVE, '    if rank == 0:\n        open("args.json", "w").write("{}")\n'),
        ],
    ),
    "by one rank after the other": Kind(
        {"one_rank_writes": UNSURE},
        [("if rank == 0 * epoch", "if rank == epoch")],
        r"write notes.txt after other steps.+\(open\(",
        [before(SHOW, "        if rank == 0 * epoch:\n            open('notes.txt', 'w')\n")],
    ),
    "an accuracy of batches": Kind(
        {"accuracy_is_of_samples": UNSURE},
        [(f"{CORRECT}.sum()", f"sum(one.double().mean() * 7 for one in {CORRECT}.split(8))")],
        r"is no share of 21 samples, 0\.\d+ is: .+\(rank or print",
        SHARE,
    ),
    "a sum that is kept": Kind(
        {"sums_begin_anew": WRONG},
        [("        total = torch.zeros(2)\n", ""), before(READY, "    total = torch.zeros(2)\n")],
        r"the sum of all 2 ranks stays in the tensor.+\(dist.all_reduce\(total",
    ),
    "one buffer for the parts of all ranks": Kind(
        {"gathered_parts_are_apart": WRONG},
        [("[torch.empty_like(mine) for _ in range(dist.get_world_size())]", ONE_BUFFER)],
        r"all parts go into one tensor, which keeps the last rank's.+\(dist.all_gather\(parts",
    ),
    "accuracies added up": Kind(
        {"accuracy_is_of_samples": WRONG},
        [ADDED_UP],
        r"is the sum over the ranks, of .+ and .+: divide it by 2.+\(rank or print",
        SHARES,
    ),
    "the mean of what each rank's samples have": Kind(
        {"accuracy_is_of_samples": UNSURE},
        [("accuracy {", "F1 {")],
        r"is the mean of .+ and .+, each of one rank's samples.+\(rank or print",
        SHARES,
    ),
    "losses added up": Kind(
        PRINTED_LOSS,
        [ADDED_UP],
        "is each already divided by what all ranks have",
        [*SHARES, ("accuracy {", "loss {")],
    ),
    "summed, not divided": Kind(
        {"printed_loss_is_of_all": WRONG},
        [(PRINTED, "{total[0] / 48:.4f}")],
        r"is the sum over the ranks.+ \(print",
    ),
    "of rank 0, after a collective": Kind(
        PRINTED_LOSS, [(PRINTED, "{loss.item():.5f}")], r"is the loss of rank 0.+ \(print"
    ),
    "of rank 0, divided": Kind(
        PRINTED_LOSS, [(PRINTED, "{loss.item() / size:.5f}")], "without those of the others"
    ),
    "of rank 0, which evaluates alone": Kind(
        PRINTED_LOSS, [(SUM, "")], r"is the loss of rank 0.+ \(print", ALONE
    ),
    "of rank 0, beside SyncBatchNorm": Kind(
        PRINTED_LOSS,
        [(SUM, ""), (PRINTED, "{loss.item():.2f}")],
        r"no collective comes before this loss.+ \(print",
        [*SYNCED, UNEVALUATED],
    ),
    "a mean of means": Kind(
        PRINTED_LOSS,
        [("loss.item() * len(inputs), len(inputs)]", "loss.item(), 1.0]")],
        r"a mean over batches of unequal size.+ \(print",
        [("DataLoader(data, 8", "DataLoader(data, 10")],
    ),
    "logged by all ranks": Kind(
        {"one_rank_prints": UNSURE},
        [before(SHOW, '        logging.info(f"epoch {epoch + 1}, loss 0.69")\n')],
        r"\(logging.info",
        LOGGED,
    ),
    "a generator of the data set": Kind(
        RANDOM,
        [("_seed(dist.get_rank())", "_seed(7)")],
        rf"equal seeds of generator; .+ {LOADS}",
        OWN,
    ),
    "left by break": Kind(
        {"each_sample_is_evaluated_once": UNSURE},
        [(USES + LEAVES, LEAVES + USES), ("mine) == 2:", "mine) == 1:"), FEWER],
        r"it sees 16 of 21 samples.+ \(for inputs, _ in part",
        BREAKS,
    ),
    "an error between two epochs": Kind(
        ENDS,
        [before(SUM, '        if rank < epoch:\n            raise ValueError("no room")\n')],
        r"^ValueError: no room \(raise ValueError",
    ),
    "evaluated by hand": Kind(
        {"result_is_of_all": UNSURE},
        [("dist.all_reduce(error)", "0")],
        r'each rank evaluates other data.+"test error \d.+ \(rank or print',
        BY_SLICES,
    ),
    "rank 0 evaluates when the others have ended": Kind(
        ENDS, [("[net(inputs)", "[model(inputs)")], r"Buffers wait for all .+ \(\[model", LATE
    ),
    # ------------------------------------------------------------ GPUs
    "a GPU that is not there": Kind(
        GPU, [("targets.to(rank)", "targets.cuda(7)")], r"\(inputs, targets = ", GPUS
    ),
    "no set_device": Kind(
        GPU, [("    torch.cuda.set_device(local)\n", "")], r"\(inputs, targets = ", GPUS
    ),
    "a GPU that the script hides": Kind(
        GPU,
        [before("    local = ", '    os.environ["CUDA_VISIBLE_DEVICES"] = "0"\n')],
        r"rank 1 uses GPU 1, but the script sets CUDA_VISIBLE_DEVICES=0 ",
        GPUS,
    ),
    "a layer too wide": Kind(ENDS, [("Linear(8, 4)", "Linear(9, 4)")], r"\(loss = cross_e", GPUS),
    "a graph": Kind(
        {"script_ends": UNSURE}, [("cuda.init()", "cuda.CUDAGraph()")], "CUDAGraph", GPUS
    ),
}


READ = before(ZERO, "            lose(loss, parts := [])\n            parts[0].mul_(2).numpy()\n")
RIGHT = {  # changes to the base: rules that pass, or have nothing to look at
    "weights averaged after each step": (
        [LOCAL[0], after(STEP, textwrap.indent(LOCAL[1][1].removesuffix(SUM), "    "))],
        {"weights_agree": PASS, "gradients_are_averaged": NOT_APPLICABLE},
    ),
    "weights averaged after unequal numbers of steps": (
        [
            *LOCAL,
            ("sampler=sampler", "sampler=range(rank, 96 - 40 * rank, 2)"),
            (EPOCH, ""),
            before(
                "    dist.bar",
                "    optimizer.step()\n"
                "    [dist.all_reduce(value.data.div_(size)) for value in net.parameters()]\n",
            ),
            UNEVALUATED,
        ],
        {"weights_agree": PASS, "gradients_are_averaged": NOT_APPLICABLE},
    ),
    "a gathered loss is changed and read": ([LOST[1], READ], {"gradients_pass_collectives": PASS}),
    "a validation in the middle of an epoch": (
        [after(LOOP, "            next(iter(DataLoader(test, 7)))\n"), UNEVALUATED],
        {"random_numbers_differ": UNSEEN},
    ),
    "classes that weigh differently": (
        [("targets)\n", "targets, weight=torch.tensor([0.1, 1, 5, 1]))\n")],
        {"gradients_are_averaged": PASS},
    ),
    "whole batches that the data set deals": (
        [
            (ITEM, DEALT_BATCHES),
            (LOADER, "    loader = DataLoader(data, None, sampler=torch.randperm(96).tolist())\n"),
            UNEVALUATED,
        ],
        {"ranks_share_data": PASS},
    ),
    "statistics of BatchNorm, over the training data": (
        [
            NORMALIZED,
            UNEVALUATED,
            before("    dist.bar", "    torch.optim.swa_utils.update_bn(loader, model)\n"),
        ],
        {"evaluation_mode": UNSEEN},
    ),
    "steps without a gradient": (
        [(TRAIN, TRAIN + "            loss = loss * (epoch < 2)\n")],
        {"gradients_are_averaged": PASS},
    ),
    "a schedule for a longer run": (
        [
            before(READY, "    Cosine = torch.optim.lr_scheduler.CosineAnnealingLR\n"),
            before(READY, "    schedule = Cosine(optimizer, 1000)\n"),
            SCHEDULE[2],
        ],
        {"schedule_is_finished": UNSEEN},
    ),
    "a parameter that is reduced by hand": (
        [
            after(WRAP, "    scale = nn.Parameter(torch.ones(4))\n"),
            ("AdamW(model.parameters()", "AdamW([*model.parameters(), scale]"),
            ("entropy(model(inputs)", "entropy(scale * model(inputs)"),
            after(
                BACKWARD,
                "            dist.all_reduce(scale.grad)\n            scale.grad /= size\n",
            ),
        ],
        {"weights_agree": PASS},
    ),
    "each rank evaluates its part, and rank 0 prints a time": (
        [
            *ADDED,
            ("    dist.all_reduce(right)\n", ""),
            ('(f"accuracy {right / 20:.4f}")', '("val done in 0.50 s")'),
        ],
        {"result_is_of_all": UNSEEN},
    ),
    "constant data": (CONSTANT, {"ranks_share_data": PASS}),
    "steps without an optimizer": (
        [
            (STEP, "            [w.data.sub_(w.grad) for w in net.parameters()]\n"),
            before(SUM, "        with torch.no_grad():\n            rank < epoch and net(x)\n"),
        ],
        {"evaluated_models_agree": PASS},
    ),
    "a log for each rank": (
        [
            ("import os\n", "import logging\nimport os\n"),
            before(
                "    torch.manual_seed(0)\n",
                '    logging.basicConfig(filename=f"rank{rank}.log", level="INFO")\n',
            ),
            before(SUM, '        logging.info(f"epoch {epoch} loss {loss.item():.4f}")\n'),
        ],
        {},
    ),
    "a default device, and a progress bar on rank 0": (
        [
            before(READY, '    torch.set_default_device("cpu")\n'),
            before("        mine = ", "        part = iter(part) if dist.get_rank() else part\n"),
        ],
        {"each_sample_is_evaluated_once": PASS},
    ),
    "a model made between two steps": (
        [SAME_SEED, before(SUM, "        torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)\n")],
        {"random_numbers_differ": UNSEEN},
    ),
    "a validation at the top of each step, left by a break": (
        [
            after(LOOP, "            estimate(net, DataLoader(test, 4))\n"),
            before(EVALUATE, ESTIMATE),
        ],
        {"ranks_share_data": PASS},
    ),
    "an estimate on random batches of each rank": (
        [
            before(SHOW, "        estimate(net, DataLoader(test, 4, shuffle=True))\n"),
            before(EVALUATE, ESTIMATE),
            UNEVALUATED,
        ],
        {"each_sample_is_evaluated_once": UNSEEN},
    ),
    "a moving average that is saved": (
        [
            *AVERAGE,
            before("            torch.save(", "            state |= average.state_dict()\n"),
        ],
        {"plain_names": PASS},
    ),
    "a model that is sharded over a mesh of GPUs": (
        [
            (WRAP, MESH + SHARDED[0][1].replace("(net)", "(net, mesh=mesh)")),
            ('"gloo"', '"nccl"'),
            *SHARDED[1:],
        ],
        {"ranks_share_data": PASS},
    ),
    "frozen and unused parameters in the optimizer": (
        [
            after(WRAP, "    frozen = nn.Linear(4, 4).requires_grad_(False)\n"),
            after(WRAP, "    unused = nn.Linear(4, 4)\n"),
            (
                "AdamW(model.parameters()",
                "AdamW([*model.parameters(), *frozen.parameters(), *unused.parameters()]",
            ),
        ],
        {"weights_agree": PASS},
    ),
    "a loss that is halved, and another's mean over the ranks": (
        [
            (TRAIN, TRAIN.replace("cross", "(1 + 1) * cross").replace("targets)", "targets) / 2")),
            before(EVALUATE, MEAN_OF_RANKS),
        ],
        {"gradients_are_averaged": PASS},
    ),
    "a loss divided by the samples of all ranks": (
        [
            *BY_HAND[:1],
            (BACKWARD, BY_HAND[1][1].replace("                value.grad /= size\n", "")),
            (TRAIN, TRAIN.replace("targets)", 'targets, reduction="sum") / 16')),
            ("loss.item() * len(inputs)", "2 * loss.item() * len(inputs)"),
        ],
        {"gradients_are_averaged": PASS},
    ),
    "a loss divided by the samples of all ranks, and DDP's mean undone": (
        [
            before(TRAIN, "            dist.all_reduce(count := torch.tensor(len(inputs)))\n"),
            (TRAIN, TRAIN.replace("targets)", 'targets, reduction="sum") / count')),
            after(BACKWARD, "            [value.grad.mul_(size) for value in net.parameters()]\n"),
            ("loss.item() * len(inputs)", "2 * loss.item() * len(inputs)"),
        ],
        {"gradients_are_averaged": PASS},
    ),
    "a loss divided before it is added up": (
        [(BACKWARD, "            torch.distributed.nn.all_reduce(loss / size).backward()\n")],
        {"gradients_are_averaged": PASS},
    ),
    "noise in the evaluation alone, the same on all ranks": (
        [
            before(EVALUATE, NOISY_POINTS),
            before(
                "        right = eval",
                """        torch.manual_seed(7)
        with torch.no_grad():
            [net(inputs) for inputs, _ in DataLoader(Noisy(x), 8)]
""",
            ),
        ],
        {"random_numbers_differ": UNSEEN},
    ),
    "batches kept in memory, in one order": (
        [
            before(LOADER, "    sampler.shuffle = False\n"),
            (
                LOADER,
                LOADER.replace(
                    "DataLoader(data, 8, sampler=sampler)",
                    "[*DataLoader(data, 8, sampler=sampler)]",
                ),
            ),
        ],
        {"order_changes": UNSEEN},
    ),
    "trials of one epoch": (
        [
            (
                EPOCH,
                """        net = nn.Linear(4, 4)
        model = DDP(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
""",
            )
        ],
        {"order_changes": UNSEEN},
    ),
    "the sum of as many batches' losses as there are ranks": (
        [
            ("DataLoader(data, 8", "DataLoader(data, 24"),
            ("loss.item() * len(inputs), len(inputs)]", "loss.item(), 1.0]"),
            (PRINTED, "{total[0] / size:.4f}"),
        ],
        {},
    ),
    "weights that are saved once, at the end": (
        [before(LEAVE, '    rank or torch.save(net.state_dict(), "final.pt")\n')],
        {"one_rank_writes": UNSEEN},
    ),
    "a negative number that is added up in one and the same tensor": (
        [
            before(READY, "    metric = torch.zeros(1)\n"),
            after(STEP, "            dist.all_reduce(metric.fill_(-loss.item()))\n"),
        ],
        {"sums_begin_anew": PASS},
    ),
    "gradients that are cleared before a second backward pass": (
        [
            after(
                BACKWARD,
                "            optimizer.zero_grad()\n"
                "            cross_entropy(model(inputs), targets).backward()\n",
            )
        ],
        {"gradients_are_averaged": PASS},
    ),
    "BatchNorm in a module around DDP": (
        [
            NORMALIZED,
            ("evaluate(net, test)", "evaluate(nn.Sequential(model), test)"),
        ],
        {"evaluated_models_agree": PASS},
    ),
    "a file that is opened to be read and written": (
        [before(READY, '    open("notes.txt", "a").close()\n    open("notes.txt", "r+").read()\n')],
        {},
    ),
    "a stream that is longer than it says": (
        [
            *STREAM,
            before("    def __iter__(self):\n", "    def __len__(self):\n        return 9\n\n"),
            ("import sys\n", 'import sys\nimport warnings\n\nwarnings.simplefilter("error")\n'),
        ],
        {"script_ends": PASS},
    ),
    "two GPUs for each rank": (
        [
            ('"gloo"', '"nccl"'),
            before(READY, "    x.cuda(2 * rank), x.cuda(2 * rank + 1)\n"),
        ],
        {"own_gpu": PASS},
    ),
    "an infinite mask that is a parameter": (
        [
            before(
                WRAP,
                '    net.mask = nn.Parameter(torch.tensor(float("-inf")), requires_grad=False)\n',
            )
        ],
        {"values_are_finite": PASS},
    ),
    "a threshold of what is gathered": (
        [(TRAIN, THRESHOLD)],
        {"gradients_pass_collectives": PASS},
    ),
    "a teacher that rank 0 trains alone": (
        [before(WRAP, TEACHER)],
        {"gradients_are_averaged": PASS, "weights_agree": PASS, "ranks_share_data": PASS},
    ),
    "random numbers of GPUs": (
        [
            after(LOOP, "            inputs = inputs + torch.randn_like(inputs)\n"),
            ("manual_seed(rank)", "manual_seed(7), torch.cuda.manual_seed(7 + rank)"),
            *GPUS,
        ],
        {"random_numbers_differ": UNSEEN},
    ),
    "a loss of several batches": (
        [*ACCUMULATED, (PRINTED, "{3 * total[0] / total[1]:.4f}")],
        {"printed_loss_is_of_all": PASS},
    ),
    "all samples are right": (
        [*ADDED, ("mine == wanted", "mine < 9"), ("accuracy {", "loss 0.50, accuracy {")],
        {"result_is_of_all": PASS},
    ),
    "each rank evaluates all samples in one batch": (
        [
            (ADDED[0][0], "    model.train()\n    return (mine == test[:][1]).sum()\n"),
            ("8, sampler=DistributedSampler(test, shuffle=False)", "30"),
            *SHARE,
        ],
        {"result_is_of_all": UNSEEN},
    ),
    "all ranks see one graph, and train on parts of it": (
        [
            *DRAWN,
            ("for x in torch.randn(6, 8, 4)", "for _ in range(6)"),
            (TRAIN, TRAIN.replace("inputs), targets", "inputs)[rank::2], targets[rank::2]")),
        ],
        {"ranks_share_data": UNSEEN},
    ),
    "a call that no backward pass follows": (
        [
            before(TRAIN, "            model(inputs)\n            scale.sum().backward()\n"),
            before(READY, SECOND),
        ],
        {"gradients_are_averaged": PASS},
    ),
    "a mean over micro-batches": (
        [
            *ACCUMULATED,
            ("number % 3", "number % 2"),
            ("targets) / 3", "targets)"),
            after(
                "            if last:\n",
                "                [w.grad.div_(2) for w in net.parameters()]\n",
            ),
        ],
        {"gradients_are_averaged": PASS},
    ),
    "a learning rate is printed": ([*RATE, (SUM, ""), (PRINTED, "{0}")], {}),
    "in buckets": (BUCKETS, {"gradients_are_averaged": PASS}),
    "hooked": (HOOKED, {"gradients_are_averaged": PASS, "weights_agree": PASS}),
    "the sum of parts": (SAMPLES_OF_ALL, {"gradients_are_averaged": PASS}),
    "an accuracy of tokens": (
        [
            ("x.argmax(dim=1)\n", "(x > 0).float()\n"),
            ("cross_entropy(model(inputs), targets)", "(model(inputs) - targets).square().mean()"),
            ("model(inputs).argmax(dim=1)", "model(inputs) > 0.5"),
            ("flatten()", "flatten(0, 1)"),
            ("net, test)\n", 'net, test)\n        rank or print(f"accuracy {right / 84:.4f}")\n'),
        ],
        {"accuracy_is_of_samples": UNSEEN},
    ),
    "a layer that a rank skips in some steps": (
        [(WRAP, SKIPS)],
        {"unused_search_is_needed": PASS},
    ),
    "two schedulers, and one of two": (
        [before(READY, SCHEDULERS), after(STEP, "            both.step(), late.step()\n")],
        {"rates_are_equal": PASS},
    ),
    "a fused optimizer, which skips steps itself": (
        [*SCALER, ("lr=0.01", "lr=0.01, fused=True")],
        {"values_are_finite": PASS},
    ),
    "sparse gradients": (
        [
            (", 4)\n    split", ", 4).round().long() + 4\n    split"),
            ("nn.Linear(4, 8)", "nn.EmbeddingBag(9, 8, sparse=True)"),
            ("AdamW", "SGD"),
        ],
        {"gradients_are_averaged": PASS},
    ),
    "a loss that is said to be of one rank": (
        [after(BACKWARD, '            rank or print(f"loss of rank 0: {loss.item():.4f}")\n')],
        {"printed_loss_is_of_all": PASS},
    ),
    "a count that grows, and is reduced to one rank": (
        [
            before(READY, "    count = torch.zeros(1)\n"),
            before(SUM, "        dist.reduce(count.fill_(epoch + 1), 0)\n"),
        ],
        {"sums_begin_anew": PASS},
    ),
    "too few samples to share any": (
        [
            (DATA, ""),
            ("8, sampler=sampler", "2, shuffle=True"),
            (EPOCH, ""),
            (LOOP, "        for inputs, targets in islice(loader, 1):\n"),
            ("import itertools", "from itertools import islice"),
        ],
        {"ranks_share_data": UNSEEN},
    ),
    "a frozen layer, and parameters without gradients beside the model": (
        [
            before(
                WRAP,
                "    net[0].requires_grad_(False)\n    more = [*nn.Linear(4, 4).parameters()]\n",
            ),
            ("AdamW(model.parameters(),", "AdamW([*net[2].parameters(), *more],"),
        ],
        {"weights_agree": PASS},
    ),
    "folds whose orders have seeds of their own": (
        [
            (READY, "    for fold, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]:\n" + FOLD),
            ("set_epoch(epoch)", "set_epoch(epoch + fold)"),
        ],
        {"order_changes": PASS},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name, tmp_path):
    changes, statuses = RIGHT[name]
    run = observed(write(tmp_path / "train.py", BASE, changes))
    verdicts = named(judge(run))
    assert told(verdicts) == {}, (run.output, verdicts)
    assert {rule: verdicts[rule].status for rule in statuses} == statuses


@pytest.mark.parametrize("name", KINDS)
def test_kind(name, tmp_path):
    kind = KINDS[name]
    right = write(tmp_path / "right.py", BASE, kind.right)
    run = observed(right)
    verdicts = named(judge(run))
    assert told(verdicts) == {}, (run.output, verdicts)
    assert {verdicts[name].status for name in kind.told} <= {PASS, UNSEEN, NOT_APPLICABLE}
    wrong = write(tmp_path / "wrong.py", right.read_text(encoding="utf-8"), kind.wrong)
    run, verdicts = judged(wrong, timeout=20)
    assert told(verdicts) == kind.told, (run.output, verdicts)
    first = ranked(verdicts.values())[0]  # the cause
    assert first.rule == next(iter(kind.told))
    assert re.search(kind.say, f"{first.text} ({line_of(first)})")


def test_calls_for_gpus_are_translated(tmp_path):
    """A script that asks for GPUs is run unchanged first."""
    path = write(tmp_path / "train.py", BASE, GPUS)
    assert {event.call for event in observed(path).all(events.Translated)} >= TRANSLATED
    assert named(judge(observed(path)))["safe_loads"].status == PASS
    ask = "import torch\nhas = torch.cuda.is_available()\n"
    asks = write(tmp_path / "asks.py", ask + path.read_text(encoding="utf-8"))
    with planned(asks) as plan:
        assert exit_code(plan, judge(plan.undisturbed)) == 0
        lines = changes(plan)
    assert re.search("(?i)^Without a GPU, the script ended with: .*(cuda|nvidia)", lines[0])
    assert lines[1].startswith("Translated for the CPU: torch.cuda.is_available() (asks.py:2), ")


PLACES = """import torch
BACKEND = "nccl"
def place(value, rank):
    torch.cuda.set_device(rank)
    value = value.cuda(INDEX)
    with torch.cuda.device(rank):
        assert value.is_cuda and value.get_device() == torch.cuda.current_device()
    return value.to(torch.device("cuda", value.get_device()))
"""


@pytest.mark.parametrize(("index", "says"), [("rank", {}), ("7", GPU)])
def test_gpus_may_be_used_in_another_file(tmp_path, index, says):
    """gloo's threads are no fault of a script that is for NCCL."""
    (tmp_path / "places.py").write_text(PLACES.replace("INDEX", index), encoding="utf-8")
    changes = [("import os\n", "import os\nfrom places import *\n"), ('"gloo"', "BACKEND")]
    changes.append(before(TRAIN, "            inputs = place(inputs, rank)\n"))
    _, verdicts = judged(write(tmp_path / "train.py", BASE, changes))
    assert told(verdicts) == says
    assert verdicts["own_gpu"].where == ("places.py:5" if says else verdicts["own_gpu"].where)
    assert verdicts["no_thread_left"].status == NOT_APPLICABLE


def test_a_loss_may_be_divided_in_another_file(tmp_path):
    text = "def backward(loss, world_size):\n    (loss / world_size).backward()\n"
    (tmp_path / "engine.py").write_text(text)
    changes = [
        ("import sys\n", "import sys\n\nimport engine\n"),
        (BACKWARD, "            engine.backward(loss, size)\n"),
        UNEVALUATED,
    ]
    _, verdicts = judged(write(tmp_path / "train.py", BASE, changes))
    assert told(verdicts) == GRADIENTS
    assert verdicts["gradients_are_averaged"].where == "engine.py:2"


def test_ranks_that_share_a_model_read_the_same(tmp_path):
    parallel = """    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(net, dist.init_device_mesh("cpu", (size,)), plan)
"""
    changes = [(WRAP, parallel), SAME_ORDER, (SAVE, ""), UNEVALUATED]
    _, verdicts = judged(write(tmp_path / "train.py", BASE, changes))
    assert told(verdicts) == {}
    assert verdicts["ranks_share_data"].status == NOT_APPLICABLE


HANGS = {  # line that a rank does not leave: what the report says, and how sure it is
    "in training": (
        before(SUM, "        while rank:\n            time.sleep(9)\n"),
        r"rank 0 is at train.py:\d+, in all_reduce; rank 1 is at train.py:\d+, in main$",
        WRONG,
    ),
    "while rank 0 reads from the network": (
        before(
            SUM,
            "        from socket import socketpair\n\n        ends = socketpair()\n"
            "        rank or ends[0].makefile().read()\n",
        ),
        "^still busy after",
        UNSURE,
    ),
    "after the group": (
        after(LEAVE, "    while rank:\n        time.sleep(9)\n"),
        r"rank 0 has ended; rank 1 is at train.py:\d+, in main\. All ranks have left the process",
        WRONG,
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_hang(tmp_path, monkeypatch, name):
    """It does not last until the time is up. Collectives that a rank did not reach do not pass."""
    monkeypatch.setattr("ddp_check.plan.LOOK_EVERY", 0.5)
    monkeypatch.setattr("ddp_check.plan.HANGS_AFTER", 4)
    change, say, status = HANGS[name]
    timeout = 10 if status == UNSURE else 60
    run, verdicts = judged(write(tmp_path / "train.py", BASE, [change]), timeout=timeout)
    assert (run.seconds < timeout) == (status == WRONG)
    assert told(verdicts) == {"script_ends": status}
    assert re.search(say, verdicts["script_ends"].text)
    calls = r"\d+" if name == "after the group" else "[01]"
    assert re.match(f"the script did not end; {calls} calls", verdicts["same_collectives"].text)


# ---------------------------------------------------------------- drills

LONG = [("range(first, 3)", "range(first, 8)"), after(STEP, "            time.sleep(0.05)\n")]
READS = BASE[BASE.index('    if os.path.exists("saved.pt")') : BASE.index("    model = DDP")]
READS_ALONE = READS.replace("net.load", "rank or net.load")
FORGETS = ('    if first:\n        optimizer.load_state_dict(saved["optimizer"])\n', "")
BY_ARGUMENT = [("if os.path.exists", "if sys.argv[1:] and os.path.exists")]
LOADED = before(  # data, which a save that is not observed has written
    "    data, test =",
    """    torch.save.__wrapped__(x, f"x{rank}.pt")
    x = torch.load(f"x{rank}.pt", weights_only=True)
""",
)
OTHER_NAMES = ('state_dict(saved["net"])', "state_dict({})")
NOT_RESTORED = "the optimizer is restored, the random numbers"
UNSEEDED = ("    torch.manual_seed(0)\n", "    torch.seed()\n")
SAME_DATA = ("randn(117, 4)", "randn(117, 4, generator=torch.Generator().manual_seed(0))")
WARM_UP = [
    before(READY, "    seen = 0\n    factor = lambda _: (8 + seen) / 64\n"),
    before(READY, "    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)\n"),
    after(STEP, "            seen += size * len(inputs)\n            warm_up.step()\n"),
]
WARM_UP_STEPS = """    steps = 64 // (8 * size)
    factor = lambda count: min(1, (count + 1) / steps)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
"""
DECAY = """    steps = 36 // size
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 - count / steps)
"""
CAUSAL = [  # a buffer that no step changes
    before(
        "\ndef main",
        """
class Causal(nn.Linear):
    def __init__(self, size):
        super().__init__(size, size)
        self.register_buffer("mask", torch.ones(size, size).tril())

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight * self.mask, self.bias)


""",
    ),
    ("nn.ReLU()", "nn.ReLU(), Causal(8)"),
]
LAST = [(SAVE, "            if epoch == 2:\n" + textwrap.indent(SAVE, "    "))]
COMPARED = """    places = [None] * size
    dist.all_gather_object(places, first)
    if len(set(places)) > 1:
        raise RuntimeError(f"the ranks begin at {places}")
"""
READS_AND_TELLS = """    found = [None]
    if rank == 0 and os.path.exists("saved.pt"):
        found = [torch.load("saved.pt", weights_only=True)]
    dist.broadcast_object_list(found)
    if saved := found[0]:
        net.load_state_dict(saved["net"])
        first = saved["epochs"]
"""


class Drilled(NamedTuple):
    drill: str
    training: list  # changes to the base
    says: str
    status: str = WRONG
    resuming: list = []  # noqa: RUF012  # more changes, which matter after an interruption
    again: list | None = None  # arguments of the restart


DRILLED = {
    "dropout": Drilled("kill", [*LONG, *DROPOUT], NOT_RESTORED, UNSURE),
    "random batches": Drilled("kill", [*LONG, *DRAWN], NOT_RESTORED, UNSURE),
    "random alone": Drilled(
        "kill",
        [*LONG, *AUGMENTED, after(EPOCH, "        torch.manual_seed(epoch)\n")],
        f"{NOT_RESTORED} that random draws are not",
        UNSURE,
    ),
    "by argument": Drilled(
        "kill", LONG, "If it needs more arguments to resume", UNSURE, BY_ARGUMENT
    ),
    "by argument, with data that is loaded, too": Drilled(
        "kill", [*LONG, LOADED, *BY_ARGUMENT], "If it needs more arguments to resume", UNSURE
    ),
    "with its argument": Drilled(
        "kill", [*LONG, *DROPOUT], NOT_RESTORED, UNSURE, BY_ARGUMENT, ["again"]
    ),
    "no resume": Drilled("kill", LONG, "it has no resume$", UNSURE, [(READS, ""), FORGETS]),
    "no scheduler": Drilled("kill", [*SCHEDULE, *LONG], "is the scheduler restored"),
    "loaded by one rank": Drilled(
        "kill", LONG, "not all ranks load a state here", WRONG, [(READS + WRAP, WRAP + READS_ALONE)]
    ),
    "other names": Drilled("kill", LONG, "Sequential: Missing key", WRONG, [OTHER_NAMES]),
    "not finite": Drilled("kill", [*LONG, *NOT_FINITE], "not finite, so no run can be compared"),
    "an epoch too early": Drilled(
        "kill", LONG, "although .* of them were saved", WRONG, [('["epochs"]', '["epochs"] - 1')]
    ),
    "no handler": Drilled(
        "sigterm", LONG, r"nothing handles SIGTERM: \d+ steps are lost", NOT_APPLICABLE
    ),
    "warm-up": Drilled("world-size", [UNSEEDED, SAME_DATA, *WARM_UP], "", PASS),
    "warm-up by the samples of one rank": Drilled(
        "world-size",
        [*WARM_UP, ("size * len", "len")],
        "does a schedule count the samples of one rank",
        UNSURE,
    ),
    "warm-up by the batch size": Drilled(
        "world-size",
        [before(READY, WARM_UP_STEPS), after(STEP, "            warm_up.step()\n")],
        "right if they are computed from batch size times number of processes",
        UNSURE,
    ),
    "batches divided by the number of ranks": Drilled(
        "world-size",
        [*ACCUMULATED, ("3 == 0", "(4 // size) == 0"), ("targets) / 3", "targets) / (4 // size)")],
        "the script itself divides its batch",
        PASS,
    ),
    "steps divided by the number of ranks": Drilled(
        "world-size",
        [(READY, DECAY + READY), after(STEP, "            decay.step()\n")],
        "shares out the steps of the schedule",
        UNSURE,
    ),
    "its own batches": Drilled(
        "world-size", LENGTHS, "the script makes its batches itself, and the drill cannot", UNSEEN
    ),
    "SyncBatchNorm": Drilled("world-size", SYNCED, "", PASS),
    "inputs as targets": Drilled("world-size", AUTOENCODER, "", PASS),
    "BatchNorm": Drilled("world-size", [NORMALIZED], r"1.running_mean changes in trai", UNSEEN),
    "dropout, resized": Drilled("world-size", DROPOUT, "run the drill without dropout", UNSEEN),
    "a constant mask": Drilled(
        "world-size", [*CAUSAL, MASKED_MEAN], "a mean over another number of elements"
    ),
    "a constant mask, right": Drilled("world-size", CAUSAL, "", PASS),
    "an infinite mask": Drilled("kill", [*LONG, INFINITE_MASK], "", PASS),
    "no save": Drilled("kill", [(SAVE, "            pass\n")], "no rank saves with", UNSEEN),
    "saved too late": Drilled("kill", LAST, "the first save comes after the last step", UNSEEN),
    "folders of their own": Drilled("own-folders", LONG, "and the others begin anew, with"),
    "folders, compared": Drilled(
        "own-folders",
        LONG,
        "the run ends before its first step: RuntimeError: the ranks begin at",
        PASS,
        [before(WRAP, COMPARED)],
    ),
    "folders, told by rank 0": Drilled(
        "own-folders",
        LONG,
        "what rank 0 has loaded reaches the others",
        PASS,
        [(READS, READS_AND_TELLS)],
    ),
    "reduced again": Drilled(
        "world-size",
        [BY_HAND[1], ("                value.grad /= size\n", "")],
        "2.00 times as large; the gradients are the sum over the ranks",
    ),
    "divided again, beside constant buffers": Drilled(
        "world-size",
        [*MASKED, ("loss.backward()", "(loss / size).backward()")],
        "0.50 times as large; the loss is divided by the number of ranks",
    ),
    "gathered without a gradient": Drilled(
        "world-size", [*TOWERS, *LOST], "both runs lack the gradient of what is gathered", UNSEEN
    ),
    "unseeded data": Drilled("world-size", [UNSEEDED], "the data differs from run to run", UNSEEN),
    "infinite": Drilled("world-size", NOT_FINITE, "is not finite"),
}


@pytest.mark.parametrize("name", DRILLED)
def test_drill(tmp_path, monkeypatch, name):
    drill, training, says, status, resuming, again = DRILLED[name]
    monkeypatch.setattr(random, "randrange", lambda steps: steps - 10)  # late in the run
    whole = write(tmp_path / "whole.py", BASE, training)
    script = write(tmp_path / "train.py", whole.read_text(encoding="utf-8"), resuming)
    translate = "yes" if training == SYNCED else "auto"
    if drill == "own-folders":  # the launcher chooses the folder of each rank
        monkeypatch.setitem(LAUNCHERS, "torchrun", TORCHRUN)
    with planned(script, restart_args=again, translate=translate) as plan:
        if drill != "world-size" and LOADED not in training:  # its line has the name of the script
            plan.undisturbed = observed(whole)
        verdicts = perform(drill, plan)
    found = [verdict for verdict in verdicts if verdict.status != PASS] or verdicts
    assert found[0].status == status, found
    assert re.search(says, found[0].text)
    conclusion = {PASS: "you may rely on it", WRONG: "do not rely on it"}.get(status, "not shown (")
    assert conclude(drill, verdicts).startswith(f"{drill}: {conclusion}")
