"""The answers in lookup/questions.md work as they are printed."""

import importlib
import io
import itertools
import json
import math
import re
import socket
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
import torch
import yaml
from pretended import SHIM
from support.gpus import GPUS
from support.jobs import Job, environment, finished, free_port, run
from support.positions import KILLED, ON_RANK_1, at
from support.results import same_bits
from support.scripts import LONG, ON_PATH, SMALL, edited, forked, load, page
from torch import nn
from torch.distributed.run import determine_local_world_size
from torch.utils.data import ConcatDataset, DataLoader

SLOW = pytest.mark.slow
COMMANDS = pytest.mark.weekly
PREFIX = torch.nn.modules.utils.consume_prefix_in_state_dict_if_present
TRAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(loss)
print(f"rank {dist.get_rank()}: {loss.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
RANKS = ["rank 0: 3.0", "rank 1: 3.0"]
WITHOUT_TORCH = 'import os\n\nprint("rank " + os.environ["RANK"] + "\\n", end="")\n'


def blocks(question, language):
    """Return the blocks of code in the answer to a question, which may be cut short."""
    (answer,) = re.findall(
        rf"^## {re.escape(question)}.*\n((?:(?!## ).*\n)*)", page("lookup/questions"), re.M
    )
    return re.findall(rf"^```{language}\n(.*?)^```$", answer, re.M | re.S)


def typed(command, cwd, env=None):
    """Run a command as a reader would type it; return the Result."""
    return finished(["bash", "-c", command], cwd, {**ON_PATH, **(env or {})})


def printed(job):
    return sorted(filter(None, job.stdout.splitlines()))


# ---------------------------------------------------------------- GPUs


def test_some_of_the_gpus(tmp_path):
    all_of_them, two = blocks("How do I train on all GPUs", "bash")[0].splitlines()
    visible = {"CUDA_VISIBLE_DEVICES": re.match(r"CUDA_VISIBLE_DEVICES=(\S+) ", two)[1]}
    assert two.endswith(all_of_them)
    program = "from torch.distributed.run import determine_local_world_size as count\n"
    job = finished(
        [sys.executable, "-c", f"{program}print(count('gpu'))"], tmp_path, SHIM | visible
    )
    assert job.stdout == "2\n"


@pytest.mark.skipif(GPUS, reason="there are GPUs to count")
def test_no_gpu_to_count():
    with pytest.raises(ValueError, match="Cuda is not available"):
        determine_local_world_size("gpu")


@SLOW
def test_which_gpu_is_slow(tmp_path):
    (program,) = blocks("Which GPU or node is slow", "python")
    (tmp_path / "slow.py").write_text(program, encoding="utf-8")
    lines = finished(forked(tmp_path / "slow.py"), tmp_path).stdout.splitlines()
    found = [
        re.fullmatch(rf"(\d+\.\d{{3}}) s  {socket.gethostname()} GPU (\d)", at) for at in lines
    ]
    assert sorted(at[2] for at in found) == ["0", "1"]
    assert float(found[0][1]) <= float(found[1][1])


# ---------------------------------------------------------------- debuggers


@COMMANDS
def test_breakpoint(tmp_path):
    line = blocks("How do I use pdb", "python")[0]
    text = TRAIN.replace("dist.all_reduce", f"{line}dist.all_reduce")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    (tmp_path / "typed").write_text("up\np loss * 100\nc\n", encoding="utf-8")
    command = blocks("How do I use pdb", "bash")[0].rstrip()
    job = typed(f"{command} < typed", tmp_path)
    assert "tensor(100.)" in job.stdout
    assert "tensor(200.)" not in job.stdout
    for line in RANKS:
        assert line in job.stdout


class Editor:
    """Speaks the Debug Adapter Protocol, as editors do."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.numbers = itertools.count(1)
        self.messages = []

    @classmethod
    def connected(cls, port):
        end = time.monotonic() + 300
        while True:
            try:
                stream = socket.create_connection(("localhost", port), timeout=300).makefile("rwb")
                return cls(stream, stream)
            except OSError:
                assert time.monotonic() < end, f"nobody listens on {port}"
                time.sleep(0.1)

    def send(self, command, **arguments):
        number = next(self.numbers)
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self.writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.writer.flush()
        return number

    def wait_for(self, **wanted):
        """Return the body of the first message, old or new, that has these entries."""
        for message in itertools.chain(list(self.messages), iter(self.receive, None)):
            if wanted.items() <= message.items():
                self.messages.remove(message)
                return message.get("body", {})
        raise EOFError

    def receive(self):
        size = 0
        while line := self.reader.readline().strip():
            size = int(line.split(b":")[1])
        self.messages.append(json.loads(self.reader.read(size)))
        assert self.messages[-1].get("success", True), self.messages[-1]
        return self.messages[-1]

    def ask(self, command, **arguments):
        return self.wait_for(request_seq=self.send(command, **arguments))

    def start(self, configuration, path, line):
        """Start or attach with a breakpoint."""
        self.ask("initialize", adapterID="debugpy")
        self.send(configuration["request"], **configuration)
        self.wait_for(event="initialized")
        self.ask("setBreakpoints", source={"path": str(path)}, breakpoints=[{"line": line}])
        self.send("configurationDone")

    def value(self, expression):
        """Wait for the breakpoint, evaluate an expression there, and continue."""
        thread = self.wait_for(event="stopped")["threadId"]
        frame = self.ask("stackTrace", threadId=thread)["stackFrames"][0]
        found = self.ask("evaluate", expression=expression, frameId=frame["id"])["result"]
        self.send("continue", threadId=thread)
        return found


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    return path


@pytest.fixture
def launch_json():
    return json.loads(blocks("How do I debug a rank", "json")[0])["configurations"]


LINE = TRAIN.splitlines().index("dist.all_reduce(loss)") + 1
LOSSES = ["tensor(1.)", "tensor(2.)"]


@COMMANDS
def test_attach(train, launch_json):
    """One rank listens on each port."""
    attach, port = launch_json[1], int(free_port())
    assert attach["connect"]["port"] == 5678 + 1
    command = blocks("How do I debug a rank", "bash")[0].replace("5678", str(port))
    with Job(["bash", "-c", command], train.parent, ON_PATH) as job:
        editors = [Editor.connected(port + rank) for rank in (0, 1)]
        for editor in editors:
            editor.start(attach, train, LINE)
        assert [editor.value("loss") for editor in editors] == LOSSES
        assert job.wait().returncode == 0
        assert printed(job) == RANKS


@COMMANDS
def test_launch(train, launch_json):
    """The editor starts torchrun, and is told of each rank."""
    launch = launch_json[0] | {"console": "internalConsole", "cwd": str(train.parent)}
    adapter = subprocess.Popen(
        [sys.executable, "-m", "debugpy.adapter"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    try:
        editor = Editor(adapter.stdout, adapter.stdin)
        editor.start(launch | {"python": [sys.executable]}, train, LINE)
        ranks = []
        for _ in LOSSES:
            attach = editor.wait_for(event="debugpyAttach")
            ranks.append(Editor.connected(attach["connect"]["port"]))
            ranks[-1].start(attach, train, LINE)
        assert sorted(rank.value("loss") for rank in ranks) == LOSSES
        editor.wait_for(event="terminated")
    finally:
        adapter.terminate()
        adapter.communicate()


# ---------------------------------------------------------------- data, metrics, inference


def defined(code, head="import torch\n", **names):
    """Run printed code; return what it defines."""
    exec(compile(head + code, "printed", "exec"), names)
    return names


def test_batches_of_similar_length():
    code = blocks("How do I batch samples of similar length", "python")[0]
    batches = defined(code)["SimilarLengths"]
    lengths = [(7 * number) % 103 for number in range(103)]
    left_out = set()
    for epoch in range(20):
        ranks = [batches(lengths, 4, rank, 3) for rank in range(3)]
        for rank in ranks:
            rank.epoch = epoch
        steps = list(zip(*ranks, strict=True))
        assert len(steps) == len(ranks[0]) == 103 // 12
        for step in steps:
            of_all = sorted(lengths[sample] for batch in step for sample in batch)
            assert all(len(batch) == 4 for batch in step)
            assert of_all[-1] - of_all[0] == 11
        seen = {sample for step in steps for batch in step for sample in batch}
        assert len(seen) == 96
        left_out |= {lengths[sample] for sample in range(103) if sample not in seen}
    assert {0, 102} < left_out  # not always the longest


def test_one_copy_of_the_data_set(tmp_path):
    code = blocks("How do the processes share one copy", "python")[0]
    mapped = defined(
        code, "import numpy as np\nimport torch\nfrom torch.utils.data import Dataset\n"
    )
    rows = torch.rand(5, 3)
    np.save(tmp_path / "rows.npy", rows.numpy())
    data = mapped["Mapped"](tmp_path / "rows.npy")
    assert isinstance(data.rows, np.memmap)
    assert torch.equal(torch.stack([data[index] for index in range(len(data))]), rows)


def test_inference_in_the_order_of_the_data_set(tmp_path, monkeypatch):
    predict, put_together = blocks("How do I run inference on several GPUs", "python")
    samples = torch.rand(11, 3)
    model = nn.Linear(3, 2)
    head = "import os\nimport torch\nfrom torch.utils.data import DataLoader, Subset\n"
    monkeypatch.chdir(tmp_path)
    for rank in range(3):
        for name, value in (("RANK", rank), ("LOCAL_RANK", 0), ("WORLD_SIZE", 3)):
            monkeypatch.setenv(name, str(value))
        defined(predict, head, dataset=samples, model=model)
    predictions = defined(put_together, ranks=3)["predictions"]
    with torch.inference_mode():
        wanted = model.cpu()(samples)
    assert torch.allclose(predictions, wanted)


@SLOW
def test_save_every_n_steps(tmp_path, trained):
    """A rank is killed after ten steps of an epoch; the resumed run ends with the same bits."""
    save = blocks("How do I save every N steps", "python")[0].replace("500 == 499", "5 == 4")
    counted = "            self.samples_run += len(targets) * dist.get_world_size()  # equal batches on all ranks\n"
    changes = [at(1, 12, KILLED, ON_RANK_1), (counted, f"{counted}{save}")]
    path = edited(tmp_path, "05", *changes)
    assert run(forked(path, *LONG), tmp_path).returncode != 0
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (1, 10 * 128)
    assert same_bits(finished(forked(path, *LONG), tmp_path), trained("05", *LONG))


def test_a_checkpoint_of_several_gpus_on_one(tmp_path, monkeypatch):
    code = blocks("How do I load a checkpoint from several GPUs", "python")[0]
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    monkeypatch.chdir(tmp_path)
    for prefix in "", "module.":
        state = {f"{prefix}{name}": tensor for name, tensor in saved.state_dict().items()}
        torch.save({"MODEL_STATE": state}, "checkpoint.pt")
        nn.init.zeros_(model.weight)
        defined(code, "import torch\nfrom torch import nn\n", model=model)
        assert torch.equal(model.weight, saved.weight)


@COMMANDS
def test_a_metric_and_a_mean_over_all_ranks(tmp_path):
    """Ranks with different numbers of samples: AUC, and the gradient of the mean over tokens."""
    metric = blocks("How do I evaluate: validation loss", "python")[0]
    mean = blocks("Are gradients, and the loss, summed", "python")[1]
    where = blocks("Are all GPUs used by my job", "python")[0].replace(
        "torch.cuda.current_device()", "0"
    )
    seed = """\
import socket
import numpy as np
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 10)
all_scores, all_labels = np.arange(10) * 7 % 10, np.arange(10) % 2
scores, labels = all_scores[mine], all_labels[mine]
"""
    end = """\
    assert np.isclose(roc_auc_score(labels, scores), roc_auc_score(all_labels, all_scores))
x, mask = torch.arange(10.0)[:, None], torch.ones(10)[mine]
one, two = nn.Linear(1, 1), nn.Linear(1, 1)
two.load_state_dict(one.state_dict())
model = DDP(one)
token_losses = model(x[mine]).squeeze() ** 2
"""
    check = """\
loss.backward()
dist.broadcast(two.weight.data, 0)
dist.broadcast(two.bias.data, 0)
(two(x) ** 2).mean().backward()
assert torch.allclose(one.weight.grad, two.weight.grad)
dist.barrier()
model = None  # DDP freed after its group can hang
dist.destroy_process_group()
"""
    text = TRAIN.partition("loss = ")[0] + seed + metric + end + mean + check
    text = text.replace("import socket\n", f"import socket\n{where}", 1)
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    job = finished(forked(tmp_path / "train.py"), tmp_path)
    assert job.stdout.count("AUC") == 1
    ranks = re.findall(r"^(rank \d of 2): \S+, GPU 0$", job.stdout, re.M)
    assert sorted(ranks) == ["rank 0 of 2", "rank 1 of 2"]


# ---------------------------------------------------------------- logs


@COMMANDS
def test_logs(tmp_path):
    (tmp_path / "train.py").write_text(WITHOUT_TORCH, encoding="utf-8")
    job = typed(blocks("How do I get one log per rank", "bash")[0], tmp_path)
    assert [line for line in printed(job) if "==>" not in line] == ["rank 0", "rank 1"]


@COMMANDS
def test_wandb_on_each_rank(tmp_path):
    """The files of a run contain its group and name as plain text."""
    one, each = blocks("How do I log metrics of each rank", "python")
    head = TRAIN.partition("loss = ")[0].replace(
        "import torch\n", "import os, socket, torch, wandb\n"
    )
    text = f"{head}step_seconds = 1.5 + dist.get_rank()\n{each}{one}run.finish()\n"
    (tmp_path / "train.py").write_text(f"{text}dist.destroy_process_group()\n", encoding="utf-8")
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    env = {"WANDB_MODE": "offline", "TORCHELASTIC_RUN_ID": "the group", **folders}
    finished(forked(tmp_path / "train.py"), tmp_path, env)
    files = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert len(files) == 2
    assert all(b"the group" in data and socket.gethostname().encode() in data for data in files)
    assert sorted(re.search(rb"rank \d", data)[0] for data in files) == [b"rank 0", b"rank 1"]
    logged = [{*re.findall(rb"step seconds/rank (\d)\D*(\d\.\d)", data)} for data in files]
    assert sorted(logged, key=len) == [set(), {(b"0", b"1.5"), (b"1", b"2.5")}]


@COMMANDS
def test_wandb_sweep(tmp_path):
    """W&B's agent leaves the values that it has drawn in a file; no server is needed to read it."""
    question = "How do I run a W&B sweep with torchrun"
    (config,) = blocks(question, "yaml")
    (text,) = blocks(question, "python")
    assert yaml.safe_load(config)["command"][0] == "torchrun"
    drawn = tmp_path / "drawn.yaml"
    drawn.write_text("wandb_version: 1\nlr: {value: 0.005}\n", encoding="utf-8")
    head = TRAIN.partition("loss = ")[0].replace("import torch\n", "import torch, wandb\n")
    tail = 'print(f"rank {dist.get_rank()}: {lr}\\n", end="")\ndist.destroy_process_group()\n'
    (tmp_path / "train.py").write_text(head + text + tail, encoding="utf-8")
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    env = {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "s", "WANDB_SWEEP_PARAM_PATH": str(drawn)}
    job = finished(forked(tmp_path / "train.py"), tmp_path, {**env, **folders})
    assert [line for line in printed(job) if "rank" in line] == ["rank 0: 0.005", "rank 1: 0.005"]
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1


# ---------------------------------------------------------------- large data


def write_formats(folder, images, labels):
    """Write each third of the samples in one of the formats."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq

    third = len(labels) // 3
    for number in range(2):  # the first third, in two tar files
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for index in range(third // 2 * number, third // 2 * (number + 1)):
                data = io.BytesIO()
                torch.save((images[index].clone(), labels[index].item()), data)
                member = tarfile.TarInfo(f"{index}.pt")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("images", data=images[third : 2 * third], chunks=(1, 1, 8, 8))
        file["labels"] = labels[third : 2 * third]
    columns = {
        "image": images[2 * third :].flatten(1).tolist(),
        "label": labels[2 * third :].tolist(),
    }
    pq.write_table(pa.table(columns), folder / "data.parquet", row_group_size=1000)


@pytest.fixture
def formats(tmp_path, monkeypatch):
    """The module that the answer's blocks make."""
    for name in ("h5py", "pyarrow"):
        pytest.importorskip(name, reason="pip install -r lookup/requirements.txt")
    *code, _, _ = blocks("My data does not fit", "python")
    (tmp_path / "formats.py").write_text("\n\n".join(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("formats")
    yield module
    del sys.modules["formats"]


@SLOW
def test_data_formats(formats, trained, tmp_path):
    """Step 5 ends with the same weights, with its samples in files and with loader workers."""
    images, labels = load("05").load_datasets()[0].tensors
    assert len(labels) % 6 == 0
    write_formats(tmp_path, images, labels)
    formats.to_arrow(str(tmp_path / "data.parquet"), str(tmp_path / "data.arrow"))
    made = (
        'ConcatDataset([TarShards(["0.tar", "1.tar"]), HDF5("data.h5"), ArrowRows("data.arrow")])'
    )
    head = "    return TensorDataset(shifted, labels[train].repeat(9)), "
    changes = [
        (head, f"    shifted = {made}\n    print(shifted[0], shifted[6000])\n    return shifted, "),
        (
            "\ntold_to_stop =",
            "\nfrom torch.utils.data import ConcatDataset\nfrom formats import *\n\ntold_to_stop =",
        ),
        ("worker_init_fn=outlive", "num_workers=2, worker_init_fn=outlive"),
    ]
    job = finished(forked(edited(tmp_path, "05", *changes), "1", *SMALL), tmp_path)
    assert same_bits(job, trained("05", "1", *SMALL))


@COMMANDS
def test_data_formats_in_spawned_workers(formats, tmp_path):
    """The data set is read before it is sent to the workers."""
    images, labels = load("05").load_datasets()[0].tensors
    images, labels = images[:600], labels[:600]
    write_formats(tmp_path, images, labels)
    formats.to_arrow(str(tmp_path / "data.parquet"), str(tmp_path / "data.arrow"))
    parts = [
        formats.TarShards([str(tmp_path / f"{number}.tar") for number in (0, 1)]),
        formats.HDF5(str(tmp_path / "data.h5")),
        formats.ArrowRows(str(tmp_path / "data.arrow")),
    ]
    data = ConcatDataset(parts)
    for index in (0, 200, 400):
        assert torch.equal(data[index][0], images[index])
    loader = DataLoader(data, 100, num_workers=1, multiprocessing_context="spawn")
    found = [torch.cat(parts) for parts in zip(*loader)]
    assert torch.equal(found[0], images)
    assert torch.equal(found[1], labels)


@SLOW
def test_webdataset(tmp_path, monkeypatch):
    """Each rank gets as many batches as it asks for, and its own samples."""
    wds = pytest.importorskip("webdataset", reason="pip install -r lookup/requirements.txt")
    for number in range(4):
        with wds.TarWriter(str(tmp_path / f"{number:04}.tar")) as shard:
            for index in range(50):
                image = torch.full((1, 8, 8), 50.0 * number + index)
                shard.write({"__key__": f"{index:04}", "image.pth": image, "label.cls": index})
    space = {"wds": wds}
    exec(blocks("My data does not fit", "python")[-2], space)
    drawn = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        loader = space["web_loader"](f"pipe:cat {tmp_path}/{{0000..0003}}.tar", 8, 5)
        batches = list(loader)
        assert [len(images) for images, _ in batches] == [8] * 5
        drawn.append(torch.cat([images[:, 0, 0, 0] for images, _ in batches]).tolist())
    assert drawn[0] != drawn[1]


@SLOW
def test_hugging_face_datasets(tmp_path):
    """Each sample goes to one rank, and is read by one of its loader workers."""
    datasets = pytest.importorskip("datasets", reason="pip install -r lookup/requirements.txt")
    space = {"load_dataset": datasets.load_dataset}
    space["split_dataset_by_node"] = importlib.import_module(
        "datasets.distributed"
    ).split_dataset_by_node
    exec(blocks("My data does not fit", "python")[-1], space)
    for number in range(4):
        lines = [json.dumps({"sample": 5 * number + index}) for index in range(5)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for files in (4, 3):  # a multiple of the ranks, and none
        paths = [str(tmp_path / f"{number}.jsonl") for number in range(files)]
        orders = []
        for epoch in (0, 1):
            shares = [space["streamed"](paths, rank, 2, epoch) for rank in (0, 1)]
            loaders = [DataLoader(share, 2, num_workers=2) for share in shares]
            drawn = [torch.cat([batch["sample"] for batch in loader]) for loader in loaders]
            orders.append(torch.cat(drawn))
            assert sorted(orders[-1].tolist()) == list(range(5 * files))
        assert not torch.equal(*orders)


# ---------------------------------------------------------------- large models, export

LLAMA = """\
import os
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM, LlamaConfig

dist.init_process_group("gloo")
device = torch.device("cpu")
tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
mine = tokens[dist.get_rank() :][:1]
SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


def build_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, **HEADS))


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


"""
LORA = """
parts = model.module.named_parameters()
assert {name for name, part in parts if part.requires_grad and "lora_" not in name} == set()
before = weights(model)
for _ in range(2):
    model(input_ids=mine, labels=mine).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", (weights(model) != before).sum().item() > 0)
both = [torch.empty_like(before) for _ in range(2)]
dist.all_gather(both, weights(model))
print("same", torch.equal(*both))
"""
LOADED = """
again = PeftModel.from_pretrained(build_model(), "adapter")
print("loaded", torch.equal(again(input_ids=mine).logits, model(input_ids=mine).logits))
print("frozen", torch.equal(weights(build_model()), weights(again.unload())))
dist.destroy_process_group()
"""
SHARDED = """
if dist.get_rank() == 0:
    build_model().save_pretrained("start")
dist.barrier()
model, plain = sharded("start"), build_model()
start = weights(plain)
print("half", 2 * sum(part.to_local().numel() for part in model.parameters()) == start.numel())
for each, batch in (model, mine), (plain, tokens):
    optimizer = torch.optim.SGD(each.parameters(), lr=1.0)  # moves by what the gradient is
    each(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
save(model, "trained")
trained = AutoModelForCausalLM.from_pretrained("trained", dtype=torch.float32)
moved, missed = weights(plain) - start, weights(trained) - weights(plain)
print("as one", (missed.norm() < moved.norm() / 50).item())
dist.destroy_process_group()
"""


def on_two_ranks(program, folder, env=None):
    """Run a program; return what both ranks print, which is the same."""
    early = "import torch.distributed.nn\n"  # see pitfalls/late_import.md
    (folder / "program.py").write_text(early + program, encoding="utf-8")
    apart = "--redirects=1 --log-dir=logs"  # or they write into each other's lines
    typed(f"torchrun --standalone --nproc-per-node=2 {apart} program.py", folder, env)
    one, other = (path.read_text("utf-8").splitlines() for path in folder.rglob("stdout.log"))
    assert one == other
    return sorted(one)


@SLOW
def test_accumulation_in_a_few_lines(tmp_path):
    """Two ranks of five batches: steps after four and after one, whose gradient is smaller."""
    (code,) = blocks("How do I accumulate gradients", "python")
    program = f"""\
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, criterion = dist.get_rank(), nn.MSELoss()
torch.manual_seed(0)
x, y = torch.rand(2, 5, 3, 4).double(), torch.rand(2, 5, 3, 1).double()
plain, alone = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
alone.load_state_dict(plain.state_dict())
model, loader = DDP(plain), list(zip(x[rank], y[rank]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{code}
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for part, share in ((slice(0, 4), 1), (slice(4, 5), 1 / 4)):
    (criterion(alone(x[:, part]), y[:, part]) * share).backward()
    optimizer.step()
    optimizer.zero_grad()
print("same", torch.allclose(plain.weight, alone.weight, atol=1e-12))
dist.barrier()
model = None  # DDP freed after its group can hang
dist.destroy_process_group()
"""
    assert on_two_ranks(program, tmp_path) == ["same True"]


def test_steps_of_an_epoch():
    """Five batches in groups of four are two steps, as in the answer on accumulation."""
    steps, _ = blocks("How many steps has an epoch", "python")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
    names = {"loader": range(5), "accumulated": 4, "epochs": 3, "optimizer": optimizer}
    exec(steps, {"math": math, "OneCycleLR": torch.optim.lr_scheduler.OneCycleLR}, names)
    assert names["scheduler"].total_steps == 6


@SLOW
def test_save_and_resume(tmp_path):
    """Two epochs, and one and one more, end with the same bits."""
    (code,) = blocks("How do I save and resume the model", "python")
    program = f"""\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
epochs = int(os.environ["EPOCHS"])
torch.manual_seed(0)
data = TensorDataset(torch.rand(64, 4), torch.rand(64, 1))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def train_one_epoch(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


{code}
print("epochs", epochs - start, "weights", model.weight.tolist())
dist.barrier()
wrapped = None  # DDP freed after its group can hang
dist.destroy_process_group()
"""
    said = []
    for name, epochs in ("whole", 2), ("half", 1), ("rest", 2):
        (tmp_path / name).mkdir()
        if name == "rest":
            (tmp_path / "half" / "checkpoint.pt").rename(tmp_path / "rest" / "checkpoint.pt")
        said.append(
            on_two_ranks(program, tmp_path / name, {"EPOCHS": str(epochs)})[0].split(" ", 3)
        )
    whole, half, rest = said
    assert [line[1] for line in said] == ["2", "1", "1"]
    assert whole[3] == rest[3] != half[3]


@SLOW
def test_told_to_stop_in_a_script_of_your_own(tmp_path):
    """Only rank 1 gets the signal, in its fourth step: both save before the eleventh."""
    (code,) = blocks("How do I save before the Slurm time limit", "python")
    program = f"""\
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loader, epochs = range(30), 3


def train(batch):
    if batch == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def save(epoch, step):
    print("saved at", epoch, step)


{code}
dist.destroy_process_group()
"""
    assert on_two_ranks(program, tmp_path) == ["saved at 0 10"]


@SLOW
def test_a_package_with_and_without_torchrun(tmp_path):
    """The one process without torchrun is a group, too."""
    torchrun, alone = blocks("How do I start a package", "bash")[0].splitlines()
    (setup,) = blocks("How do I start a package", "python")
    (tmp_path / "package").mkdir()
    program = f"""\
import os
import sys

import torch
import torch.distributed as dist

{setup}
ddp_setup()
dist.barrier()
print(f"{{dist.get_rank()}} of {{dist.get_world_size()}} {{sys.argv[1:]}}\\n", end="")
dist.destroy_process_group()
"""
    (tmp_path / "package" / "train.py").write_text(program, encoding="utf-8")
    two = torchrun.replace("--nproc-per-node=4", "--nproc-per-node=2")
    assert two != torchrun
    options = "['--config', 'a.yaml']"
    assert printed(typed(two, tmp_path)) == [f"{rank} of 2 {options}" for rank in range(2)]
    assert printed(typed(alone.partition("#")[0], tmp_path)) == [f"0 of 1 {options}"]


@SLOW
def test_all_ranks_give_the_scheduler_the_same_loss(tmp_path):
    _, code = blocks("How many steps has an epoch", "python")
    program = f"""\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
device, rank = "cpu", dist.get_rank()
optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(3):  # the loss of rank 1 falls, the mean does not
    loss_sum, samples = (4.0 * (1 + epoch), 4) if rank == 0 else (2.0 - epoch, 1)
{"".join("    " + line for line in code.splitlines(keepends=True))}
print("rate", round(scheduler.get_last_lr()[0], 6))
dist.destroy_process_group()
"""
    assert on_two_ranks(program, tmp_path) == ["rate 0.01"]


@SLOW
def test_lora(tmp_path):
    pytest.importorskip("peft", reason="pip install -r lookup/requirements.txt")
    wrap, save = blocks("How do I train LoRA adapters", "python")
    imports = "from peft import LoraConfig, PeftModel, get_peft_model\n"
    said = on_two_ranks(f"{imports}{LLAMA}{wrap}{LORA}{save}{LOADED}", tmp_path)
    assert said == ["frozen True", "loaded True", "same True", "trained True"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000


@SLOW
def test_a_sharded_hugging_face_model(tmp_path):
    """In bfloat16, a step ends near to the one in float32."""
    pytest.importorskip("transformers", reason="pip install -r lookup/requirements.txt")
    shard, save = blocks("How do I shard a Hugging Face model", "python")
    assert on_two_ranks(f"{LLAMA}{shard}\n\n{save}{SHARDED}", tmp_path) == [
        "as one True",
        "half True",
    ]


@SLOW
def test_export_of_the_plain_model(tmp_path):
    (export,) = blocks("How do I export to ONNX", "python")
    program = f"""\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

{export}
dist.init_process_group("gloo")
example, batch = torch.rand(2, 4), torch.rand(5, 4)
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()))
export(model, example, "model.pt2")
print("training", model.training and model.module.training)
loaded = torch.export.load("model.pt2").module()
print("as before", torch.equal(loaded(batch), model.module.eval()(batch)))
for refused in (
    lambda: torch.export.export(model, (example,)),
    lambda: torch.jit.trace(model, example),
    lambda: torch.jit.script(model),
):
    try:
        print(refused())
    except Exception:
        print("refused")
model = None  # DDP freed after its group can hang
dist.destroy_process_group()
"""
    expected = ["as before True", *["refused"] * 3, "training True"]
    assert on_two_ranks(program, tmp_path) == expected


# ---------------------------------------------------------------- continuous integration


@COMMANDS
def test_the_workflow(train):
    """What installs packages, and the actions of others, are left out."""
    workflow = yaml.safe_load(blocks("How do I test DDP code in CI", "yaml")[0])
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands.pop(0).startswith("pip install -r requirements.txt ")
    for command in commands:
        assert printed(typed(command, train.parent, job["env"])) == RANKS


# ---------------------------------------------------------------- from older ways


def test_checkpoint_of_data_parallel():
    old, new = nn.DataParallel(nn.Linear(2, 1)), nn.Linear(2, 1)
    state = old.state_dict()
    assert all(name.startswith("module.") for name in state)
    PREFIX(state, "module.")
    new.load_state_dict(state)
    assert torch.equal(new.weight, old.module.weight)


@COMMANDS
def test_from_launch_to_torchrun(tmp_path):
    old, new = blocks("How do I move from torch.distributed.launch", "diff")[0].splitlines()
    (both,) = blocks("How do I move from torch.distributed.launch", "python")
    appended = blocks("How do I move from torch.distributed.launch", "bash")[0]
    path = tmp_path / "train.py"
    accepts = f"import argparse\n{WITHOUT_TORCH}parser = argparse.ArgumentParser()\n{both}"
    shown = "{os.environ['LOCAL_RANK']} {parser.parse_args().local_rank}\\n"
    shows = f'print(f"{shown}", end="")\n'
    path.write_text(accepts + shows, encoding="utf-8")
    assert {"0 0", "1 1"} <= set(printed(typed(old[1:], tmp_path)))
    assert {"0 None", "1 None"} <= set(printed(typed(new[1:], tmp_path)))
    assert {"0 0", "1 1"} <= set(printed(typed(appended, tmp_path)))
