"""Each kind of fault is told, with its line; its right counterpart draws nothing.

A script is base.py with changes. A kind names the public script or thread that it stands for. To
add one: what both scripts need, what makes one of them wrong, the line that the report must name,
and what the report shows.
"""

import re
import textwrap
from typing import NamedTuple

import pytest
from checking import BASE, SPAWNED, after, before, judged, line_of, named, observed, reported
from ddp_check.drills import conclude, perform
from ddp_check.plan import planned
from ddp_check.report import changes, exit_code, ranked, summary
from ddp_check.rules import judge
from ddp_check.rules.base import FRAGILE, NOT_APPLICABLE, PASS, SLOW, UNSEEN, UNSURE, WRONG
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
SHOW = "        if rank == 0:\n"
LEAVE = "    dist.destroy_process_group()\n"
SAVE = BASE[BASE.index("            state =") : BASE.index("        right =")]
UNEVALUATED = ("evaluate(net, test)", "0")
NORMALIZED = ("nn.ReLU()", "nn.BatchNorm1d(8)")
SAME_SEED = ("manual_seed(rank)", "manual_seed(7)")
SAME_ORDER = ("sampler=sampler", "sampler=torch.randperm(96).tolist()")
NOT_FINITE = [before(DATA, '    x[data.indices[5]] = float("nan")\n')]
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
SEEDED = [
    (ITEM, "torch.manual_seed(index)\n        return self.x[index] + torch.randn(4), 3"),
    (LOADER, LOADER.replace("sampler)", "sampler, num_workers=2)")),
    SAME_SEED,
    UNEVALUATED,
]
AUGMENTED = [
    ("import os\n", "import os\nimport random\n\nimport numpy\n"),
    (
        ITEM,
        "noise = random.random() + torch.rand(4) + numpy.random.rand()\n"
        "        return self.x[index] + noise.float(), self.y[index]",
    ),
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
MESH = '    mesh = dist.init_device_mesh("cuda", (size, 1), mesh_dim_names="ab")\n'
PLATEAU = [
    r"from step .+ \(schedule.step",
    [
        before(READY, "    Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau\n"),
        before(READY, "    schedule = Plateau(optimizer, patience=0)\n"),
        before(SHOW, "        schedule.step(total[0].item())\n"),
        UNEVALUATED,
    ],
]
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
MASKED = [before(WRAP, '    net.register_buffer("mask", torch.ones(4, 4).tril())\n')]
IN_TURN = [
    before(SHOW, "        for turn in range(size):\n"),
    before(SHOW, "            if turn == rank:\n"),
    before(SHOW, '                open("turns.txt", "w").write(f"{rank}")\n'),
    before(SHOW, "            dist.barrier()\n"),
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
    current = torch.cuda.current_device()
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == current
    torch.set_default_device(device)
    torch.cuda.nvtx.range("read")(torch.zeros)(1)
    torch.set_default_device(None)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state().cpu())
    torch.cuda.set_rng_state_all([state.cpu() for state in torch.cuda.get_rng_state_all()])
    dist.all_reduce(x.cuda(), group=dist.new_group(backend="nccl"))
""",
    ),
]
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
MASKED_MEAN = (  # over those of the inputs that count, whose number differs from rank to rank
    TRAIN,
    """            kept = inputs[:, 0] > 0
            loss = cross_entropy(model(inputs)[kept], targets[kept])
""",
)
ESTIMATE = """
def estimate(model, loader):
    with torch.no_grad():
        for count, (inputs, _) in enumerate(loader):
            if count == 3:
                break
            model(inputs)

"""
FOLD = """        part = Subset(data, range(fold, 64 + fold))
        sampler = DistributedSampler(part)
        loader = DataLoader(part, 8, sampler=sampler)
"""

# ---------------------------------------------------------------- kinds


class Kind(NamedTuple):
    reported: dict  # what the report shows of the wrong script: {rule: status}
    wrong: list  # changes to the right script
    say: str = r"\(optimizer.step\(\)\)"  # what the first rule says, and the line that it names
    right: list = []  # noqa: RUF012  # changes to the base


RANDOM = {"random_numbers_differ": WRONG}
FINITE, SHARED = {"values_are_finite": WRONG}, {"ranks_share_data": WRONG}
ORDER = {"order_changes": WRONG}
GRADIENTS, RATES = {"gradients_are_averaged": WRONG}, {"rates_are_equal": WRONG}
WEIGHTS = {"weights_agree": WRONG}
ENDS = {"script_ends": WRONG}
LOADS, EVALUATES = r"\(for inputs, targets in loader", r"\(mine = torch.cat"
KINDS = {
    # https://github.com/ecmwf/WeatherGenerator/issues/2724
    "not finite": Kind(FINITE, NOT_FINITE, r"on rank ., the loss is not finite \(optimizer.step"),
    # https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    "skipped steps": Kind(
        FINITE,
        [("scaler.step(optimizer)", "optimizer.step()")],
        r"from step 1 on; on rank ., the gradient of .+ is not finite \(optimizer.step",
        SCALER,
    ),
    # https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    "clipped while scaled": Kind(
        {"clipping_comes_last": WRONG},
        [("            scaler.unscale_(optimizer)\n", "")],
        r"\(nn.utils.clip_grad_norm_\(model",
        SCALER,
    ),
    # ------------------------------------------------------------ data
    # https://github.com/codeharris/multi-gpu-ddp/blob/62a4644/src/train.py#L52
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
    # https://github.com/huggingface/accelerate/blob/main/examples/nlp_example.py
    "dictionaries": Kind(SHARED, [SAME_ORDER], r"\(for batch in loader", DICTIONARIES),
    # https://github.com/karpathy/nanoGPT/blob/master/train.py
    "no DataLoader": Kind({**SHARED, "random_numbers_differ": UNSURE}, [SAME_SEED], right=DRAWN),
    # https://github.com/pytorch/examples/tree/main/distributed/FSDP2
    "sharded parameters": Kind(SHARED, [SAME_ORDER], LOADS, SHARDED),
    # https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series
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
    # https://github.com/huggingface/datasets/issues/5360
    "split by worker": Kind(
        SHARED, [("2 * worker.id + rank :: 4", "worker.id :: 2"), OWN_ORDER], LOADS, STREAM
    ),
    # https://github.com/TensorAuto/OpenTau/pull/498
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
    # https://github.com/clovaai/voxceleb_trainer/issues/98
    "the order of its own sampler": Kind(
        {"order_changes": UNSURE},
        [("7 + self.turn", "7")],
        rf"own sampler is to do.+{LOADS}",
        TURNS,
    ),
    # https://github.com/ByteDance-Seed/VeOmni/pull/940
    "frozen in workers": Kind(
        ORDER, [("torch.zeros(()).share_memory_()", "0")], f"workers do not see .+{LOADS}", STREAM
    ),
    # https://github.com/huggingface/transformers/issues/37932
    "seeded by the index": Kind(
        RANDOM, [("torch.manual_seed(index)", "0")], f"in DataLoader workers.+ {LOADS}", SEEDED
    ),
    # https://github.com/huggingface/pytorch-image-models/issues/1519
    "same dropout": Kind({"random_numbers_differ": UNSURE}, [SAME_SEED], right=DROPOUT),
    # ------------------------------------------------------------ gradients and weights
    # https://github.com/modelscope/FunASR/pull/3472
    "no_sync": Kind(
        {**GRADIENTS, **WEIGHTS},
        [before(LOOP, "        model.require_backward_grad_sync = False\n")],
        r"under no_sync \(optimizer.step",
    ),
    # https://github.com/karpathy/nanochat/pull/33
    "accumulated": Kind({"gradients_are_averaged": SLOW}, [ALWAYS_SYNC], "3 backward", ACCUMULATED),
    # https://github.com/NVIDIA-NeMo/Automodel/pull/2468
    "a rank that skips steps": Kind(
        {**GRADIENTS, **WEIGHTS},
        [(STEP, "            if rank == 0 or loss < 1.3:\n    " + STEP)],
        r"18 steps on rank 0 and \d+ steps on rank 1: does each rank decide by itself",
        [UNEVALUATED],
    ),
    # https://github.com/moojink/openvla-oft/issues/160
    "one of two models": Kind(
        {**GRADIENTS, **WEIGHTS},
        [("head(model", "head.module(model")],
        r"first that of weight of model 2; the model is called without .+\(loss = cross_e",
        HEAD,
    ),
    # https://github.com/huggingface/datasets/issues/6437
    "join": Kind(ENDS, [("with model.join():", "if True:")], "", JOIN),
    # https://github.com/kohya-ss/sd-scripts/issues/924
    "no wrapper": Kind(
        {**WEIGHTS, **GRADIENTS}, [(WRAP, "    model = net\n")], "no model is wrapped"
    ),
    # https://github.com/OFA-Sys/Chinese-CLIP/issues/54
    "gathered without a gradient": Kind(
        {"gradients_pass_collectives": UNSURE}, LOST, r"\(dist.all_gather\(parts, out", TOWERS
    ),
    "never zeroed": Kind(
        GRADIENTS, [(ZERO, "")], r"takes the gradients of those before it.+ \(optimizer.step"
    ),
    # https://github.com/Parskatt/RoMa/issues/32
    "a few samples in an order of each rank's own": Kind(
        {"ranks_share_data": UNSURE},
        [("sampler=sampler", "sampler=torch_data.RandomSampler(data, num_samples=40)")],
        "of 80 samples are seen by several ranks",
        [UNEVALUATED],
    ),
    # https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
    "without the first broadcast": Kind(
        WEIGHTS,
        [after(DATA, "    torch.manual_seed(rank)\n")],
        "before step 1, the weights differ .+ broadcast them at the start",
        BUCKETS,
    ),
    # https://github.com/lucidrains/DALLE-pytorch/issues/268
    "a plateau with a loss of its own": Kind(
        RATES,
        [("step(total[0].item())", "step(loss.item())"), ("patience=0", "patience=9")],
        r"the scheduler gets another value on each rank.+\(schedule.step",
        PLATEAU[1],
    ),
    # https://github.com/huggingface/datasets/issues/6437
    "more batches on one rank": Kind(
        ENDS,
        [("range(rank, 96, 2)", "range(rank, 96 - 40 * (1 - rank), 2)")],
        "in epoch 1, rank 0 has 4, and rank 1 at least 5.+ \\(for inputs, targets",
        [("sampler=sampler", "sampler=range(rank, 96, 2)"), UNEVALUATED],
    ),
    # https://github.com/Lightning-AI/pytorch-lightning/issues/379
    "early stopping": Kind(
        ENDS,
        [("total[0] < 0", "rank == epoch == 1")],
        "rank 0 is at .+, in _engine_run_backward; rank 1 is at .+, in barrier",
        [before(SHOW, "        if total[0] < 0:\n            break\n"), UNEVALUATED],
    ),
    # ------------------------------------------------------------ evaluation
    # https://github.com/The-AI-Summer/pytorch-ddp/blob/a2bdb16/train_ddp.py#L89
    "in training mode": Kind(
        {"evaluation_mode": WRONG},
        [("model.eval()", "0")],
        EVALUATES,
        [*DROPOUT, after("model.eval()\n", "    model[1].train()  # Monte Carlo dropout\n")],
    ),
    # https://github.com/The-AI-Summer/pytorch-ddp/blob/a2bdb16/train_ddp.py#L89
    "cut, perhaps": Kind(
        {"each_sample_is_evaluated_once": UNSURE},
        [
            ("[: len(test)]", ""),
            ("(guesses == test.dataset.y[test.indices]).sum().item()", "sum(map(int, guesses))"),
        ],
        EVALUATES,
    ),
    # https://github.com/pyannote/pyannote-audio/issues/591
    "its own part": Kind(
        {"result_is_of_all": UNSURE},
        [("    dist.all_reduce(right)\n", "")],
        "rank 0 evaluates 10 of 20 samples, and no collective follows",
        ADDED,
    ),
    # ------------------------------------------------------------ output
    "the wrapper as a whole": Kind(
        {"plain_names": FRAGILE},
        [("**state, ", '**state, "whole": model, ')],
        r"the DDP wrapper itself is saved.+\(torch.save",
    ),
    # https://github.com/MLI-lab/DeepDeWedge/pull/41
    "in turn": Kind(
        {"one_rank_writes": WRONG},
        [("            dist.barrier()\n", "")],
        r"ranks 0, 1 write turns.txt at the same time \(open",
        IN_TURN,
    ),
    # https://github.com/espnet/espnet/pull/2287
    "a configuration that all ranks write": Kind(
        {"one_rank_writes": UNSURE},
        [("rank or open", "open")],
        r"write args.json at the same time: do they write the same\? \(open",
        [
            before(READY, '    rank or open("args.json", "w").write("{}")\n'),
            before(LEAVE, '    if rank == 0:\n        open("args.json", "w").write("{}")\n'),
        ],
    ),
    # ------------------------------------------------------------ GPUs
}


RIGHT = {  # changes to the base: rules that pass, or have nothing to look at
    "weights averaged after each step": (
        [LOCAL[0], after(STEP, textwrap.indent(LOCAL[1][1].removesuffix(SUM), "    "))],
        {"weights_agree": PASS, "gradients_are_averaged": NOT_APPLICABLE},
    ),
    "statistics of BatchNorm, over the training data": (
        [
            NORMALIZED,
            UNEVALUATED,
            before("    dist.bar", "    torch.optim.swa_utils.update_bn(loader, model)\n"),
        ],
        {"evaluation_mode": UNSEEN},
    ),
    "a validation at the top of each step, left by a break": (
        [
            after(LOOP, "            estimate(net, DataLoader(test, 4))\n"),
            before(EVALUATE, ESTIMATE),
        ],
        {"ranks_share_data": PASS},
    ),
    # https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series
    "a batch that is looked at before each epoch": (
        [before(EPOCH, "        size_of_batch = len(next(iter(loader))[0])\n")],
        {"order_changes": PASS, "ranks_share_data": PASS},
    ),
    "an estimate on random batches of each rank": (
        [
            before(SHOW, "        estimate(net, DataLoader(test, 4, shuffle=True))\n"),
            before(EVALUATE, ESTIMATE),
            UNEVALUATED,
        ],
        {},
    ),
    # https://github.com/rasbt/LLMs-from-scratch/blob/main/appendix-A
    "two samples, which each rank evaluates": (
        [
            before(SHOW, "        estimate(net, DataLoader(Subset(test, [0, 1]), 1))\n"),
            before(EVALUATE, ESTIMATE),
            UNEVALUATED,
        ],
        {"result_is_of_all": UNSEEN},
    ),
    # https://github.com/pytorch/examples/blob/main/imagenet/main.py
    "the rest of the samples, which each rank evaluates": (
        [
            ("shuffle=False)", "shuffle=False, drop_last=True)"),
            ("[test.indices])", "[test.indices[:20]])"),
            before(SHOW, "        estimate(net, DataLoader(Subset(test, [20]), 1))\n"),
            before(EVALUATE, ESTIMATE),
        ],
        {"each_sample_is_evaluated_once": PASS},
    ),
    # https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
    "parts that the script deals out anew in each epoch": (
        [
            before(EPOCH, "        order = torch.randperm(96, generator=split)[rank::size]\n"),
            before(EPOCH, "        loader = DataLoader(Points(x[order]), 8)\n"),
        ],
        {"ranks_share_data": UNSEEN, "order_changes": PASS},
    ),
    "two data sets in turn": (
        [
            before(
                EPOCH, "        loader = DataLoader(Points(x + epoch % 2), 8, sampler=sampler)\n"
            ),
            ("set_epoch(epoch)", "set_epoch(epoch // 2)"),
        ],
        {"order_changes": PASS},
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
    "weights that are saved once, at the end": (
        [before(LEAVE, '    rank or torch.save(net.state_dict(), "final.pt")\n')],
        {"one_rank_writes": UNSEEN},
    ),
    "in buckets": (BUCKETS, {"gradients_are_averaged": UNSEEN}),
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
    assert reported(verdicts) == {}, (run.output, verdicts)
    assert {rule: verdicts[rule].status for rule in statuses} == statuses


@pytest.mark.parametrize("name", KINDS)
def test_kind(name, tmp_path):
    kind = KINDS[name]
    right = write(tmp_path / "right.py", BASE, kind.right)
    run = observed(right)
    verdicts = named(judge(run))
    assert reported(verdicts) == {}, (run.output, verdicts)
    assert {verdicts[name].status for name in kind.reported} <= {PASS, UNSEEN, NOT_APPLICABLE}
    wrong = write(tmp_path / "wrong.py", right.read_text(encoding="utf-8"), kind.wrong)
    run, verdicts = judged(wrong, timeout=20)
    assert reported(verdicts) == kind.reported, (run.output, verdicts)
    first = ranked(verdicts.values())[0]  # the cause
    assert first.rule == next(iter(kind.reported))
    assert re.search(kind.say, f"{first.text} ({line_of(first)})")


def test_calls_for_gpus_are_translated(tmp_path):
    """A script that asks for GPUs is run unchanged first."""
    ask = "import torch\nhas = torch.cuda.is_available()\n"
    asks = write(tmp_path / "asks.py", ask + write(tmp_path / "a.py", BASE, GPUS).read_text())
    with planned(asks) as plan:
        assert exit_code(plan, judge(plan.undisturbed)) == 0
        assert plan.undisturbed.translate
        (line,) = changes(plan)
    assert re.search("(?i)^Without a GPU, the script ended with: .*(cuda|nvidia)", line)


PLACES = """import torch
BACKEND = "nccl"
def place(value, rank):
    torch.cuda.set_device(rank)
    value = value.cuda(rank)
    with torch.cuda.device(rank):
        assert value.is_cuda and value.get_device() == torch.cuda.current_device()
    return value.to(torch.device("cuda", value.get_device()))
"""


def test_gpus_may_be_used_in_another_file(tmp_path):
    (tmp_path / "places.py").write_text(PLACES, encoding="utf-8")
    changes = [("import os\n", "import os\nfrom places import *\n"), ('"gloo"', "BACKEND")]
    changes.append(before(TRAIN, "            inputs = place(inputs, rank)\n"))
    run, verdicts = judged(write(tmp_path / "train.py", BASE, changes))
    assert (reported(verdicts), run.translate) == ({}, True)


def test_ranks_that_share_a_model_read_the_same(tmp_path):
    parallel = """    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(net, dist.init_device_mesh("cpu", (size,)), plan)
"""
    changes = [(WRAP, parallel), SAME_ORDER, (SAVE, ""), UNEVALUATED]
    _, verdicts = judged(write(tmp_path / "train.py", BASE, changes))
    assert reported(verdicts) == {}
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
}


@pytest.mark.parametrize("name", HANGS)
def test_hang(tmp_path, monkeypatch, name):
    """It does not last until the time is up."""
    monkeypatch.setattr("ddp_check.plan.LOOK_EVERY", 0.5)
    monkeypatch.setattr("ddp_check.plan.HANGS_AFTER", 4)
    change, say, status = HANGS[name]
    timeout = 10 if status == UNSURE else 60
    run, verdicts = judged(write(tmp_path / "train.py", BASE, [change]), timeout=timeout)
    assert (run.seconds < timeout) == (status == WRONG)
    assert reported(verdicts) == {"script_ends": status}
    assert re.search(say, verdicts["script_ends"].text)


# ---------------------------------------------------------------- drills

LONG = [("range(first, 3)", "range(first, 8)"), after(STEP, "            time.sleep(0.05)\n")]
READS = BASE[BASE.index('    if os.path.exists("saved.pt")') : BASE.index("    model = DDP")]
READS_ALONE = READS.replace("net.load", "rank or net.load")
BY_ARGUMENT = [("if os.path.exists", "if sys.argv[1:] and os.path.exists")]
OTHER_NAMES = ('state_dict(saved["net"])', "state_dict({})")
NOT_RESTORED = "the optimizer is restored, and the random numbers are not"
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


class Drilled(NamedTuple):
    drill: str
    training: list  # changes to the base
    says: str
    status: str = WRONG
    resuming: list = []  # noqa: RUF012  # more changes, which matter after an interruption
    again: list | None = None  # arguments of the restart


DRILLED = {
    "dropout": Drilled("kill", [*LONG, *DROPOUT], NOT_RESTORED, UNSURE),
    "by argument": Drilled(
        "kill", LONG, "has it no resume, or does it need --restart-args", UNSURE, BY_ARGUMENT
    ),
    "with its argument": Drilled(
        "kill", [*LONG, *DROPOUT], NOT_RESTORED, UNSURE, BY_ARGUMENT, ["again"]
    ),
    "no scheduler": Drilled("kill", [*SCHEDULE, *LONG], "is the scheduler restored"),
    "loaded by one rank": Drilled(
        "kill",
        LONG,
        "does each rank load the same state here",
        WRONG,
        [(READS + WRAP, WRAP + READS_ALONE)],
    ),
    "other names": Drilled("kill", LONG, "Sequential: Missing key", WRONG, [OTHER_NAMES]),
    "an epoch too early": Drilled(
        "kill",
        LONG,
        "it begins at step 0|although .* of them were saved",
        WRONG,
        [('["epochs"]', '["epochs"] - 1')],
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
    "its own batches": Drilled(
        "world-size", LENGTHS, "the script makes its batches itself, and the drill cannot", UNSEEN
    ),
    "several DataLoaders": Drilled(
        "world-size",
        [
            before(READY, "    apart = DataLoader(x, 8, sampler=range(rank, 96, size))\n"),
            (LOOP, "        for (inputs, targets), _ in zip(loader, apart):\n"),
        ],
        "a step takes samples from several DataLoaders",
        UNSEEN,
    ),
    "SyncBatchNorm": Drilled("world-size", SYNCED, "", PASS),
    "BatchNorm, dropout and augmentation": Drilled(
        "world-size",
        [NORMALIZED, *AUGMENTED, (STEP, f"            nn.Dropout(0.5)(x)\n{STEP}")],
        "",
        PASS,
    ),
    "BatchNorm on rank 0 alone": Drilled(
        "world-size", [before(READY, "    rank or nn.BatchNorm1d(4)(x)\n")], "", PASS
    ),
    "noise": Drilled(
        "world-size",
        [(TRAIN, TRAIN.replace("(inputs)", "(inputs + torch.randn(4))")), UNEVALUATED],
        r"each step draws random numbers \(torch\).+ leave them out .+\(loss = cross_entropy",
        UNSEEN,
    ),
    "noise of a generator of its own": Drilled(
        "world-size",
        [
            before(READY, "    own = torch.Generator().manual_seed(rank)\n"),
            (TRAIN, TRAIN.replace("(inputs)", "(inputs + torch.randn(4, generator=own))")),
            UNEVALUATED,
        ],
        r"a generator of the script draws numbers.+\(loss = cross_entropy",
        UNSEEN,
    ),
    "a constant mask": Drilled(
        "world-size", [*CAUSAL, MASKED_MEAN], "mean over a number of elements that differs", UNSURE
    ),
    "a constant mask, right": Drilled("world-size", CAUSAL, "", PASS),
    "no save": Drilled("kill", [(SAVE, "            pass\n")], "no rank saves with", UNSEEN),
    "saved too late": Drilled("kill", LAST, "the first save comes after the last step", UNSEEN),
    "reduced again": Drilled(
        "world-size",
        [BY_HAND[1], ("                value.grad /= size\n", "")],
        "step 1: the gradients are the sum over the ranks, 2 times the mean",
    ),
    "divided again, beside constant buffers": Drilled(
        "world-size",
        [*MASKED, ("loss.backward()", "(loss / size).backward()")],
        "step 1: the gradients are 1/2 of the mean: is the loss a sum over",
    ),
    "a sum divided by the batch size": Drilled(
        "world-size",
        [
            before(READY, "    batch_size = 8\n"),
            ("loss.backward()", "(loss * len(inputs) / batch_size).backward()"),
        ],
        "It is right to divide the sum by the batch size of one rank",
        UNSURE,
    ),
    "gathered without a gradient": Drilled(
        "world-size", [*TOWERS, *LOST], "a collective returns no gradient to the loss", UNSEEN
    ),
    "unseeded data": Drilled("world-size", [UNSEEDED], "the data differs from run to run", UNSEEN),
    "infinite": Drilled("world-size", NOT_FINITE, "is not finite"),
}


HEADLINES = {  # status of a drill: what the report says first
    **dict.fromkeys((PASS, NOT_APPLICABLE), "nothing wrong"),
    UNSEEN: "nothing wrong in what was seen",
    UNSURE: "nothing is proven wrong",
    WRONG: "wrong",
}


@pytest.mark.parametrize("name", DRILLED)
def test_drill(tmp_path, name):
    drill, training, says, status, resuming, again = DRILLED[name]
    whole = write(tmp_path / "whole.py", BASE, training)
    script = write(tmp_path / "train.py", whole.read_text(encoding="utf-8"), resuming)
    translate = "yes" if training == SYNCED else "auto"
    with planned(script, restart_args=again, translate=translate) as plan:
        if drill != "world-size":
            plan.undisturbed = observed(whole)
        verdicts = perform(drill, plan)
    found = [verdict for verdict in verdicts if verdict.status != PASS] or verdicts
    assert found[0].status == status, found
    assert re.search(says, f"{found[0].text} ({line_of(found[0])})")
    assert summary(plan, verdicts) == HEADLINES[status]
    conclusion = {PASS: "you may rely on it", WRONG: "do not rely on it"}.get(status, "not shown: ")
    assert conclude(drill, verdicts).startswith(f"{drill}: {conclusion}")
