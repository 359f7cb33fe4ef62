"""The pair of scripts does what the front page says; so do the lines for other kinds of script."""

import re
import textwrap
from ast import literal_eval

import pytest
from checking import fork_ranks, named, own_folder, passed, reported  # noqa: F401
from ddp_check.drills import perform
from ddp_check.plan import planned
from ddp_check.rules import judge
from ddp_check.rules.base import NOT_APPLICABLE, PASS, UNSEEN
from support.jobs import finished
from support.results import printed_by
from support.scripts import ROOT, forked, on_each_rank, write

FOLDER = ROOT / "convert"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
DDP = (FOLDER / "train_ddp.py").read_text(encoding="utf-8")
SHORT = ("epochs=10", "epochs=3")
SEED = "    torch.manual_seed(seed)\n"
NAMES = (SEED, f"    rank, world_size = dist.get_rank(), dist.get_world_size()\n{SEED}")
UNSAVED = ("            save(model.module, optimizer, epoch)\n", "")
DOUBLE = [  # rounding then changes nothing that is seen
    ("dtype=torch.float32", "dtype=torch.float64"),
    (SEED, f"    torch.set_default_dtype(torch.float64)\n{SEED}"),
]


def test_it_learns_on_one_gpu(tmp_path):
    job = finished(forked(FOLDER / "train.py", nprocs=0), tmp_path)
    assert float(re.findall(r"([\d.]+)%", job.stdout)[-1]) > 93


def test_two_ranks_print_what_one_with_twice_the_batch_prints(tmp_path):
    printed = []
    for ranks, batch in ((1, 64), (2, 32)):
        changes = [*DOUBLE, UNSAVED, ("batch_size=32", f"batch_size={batch}")]
        path = write(tmp_path / "train_ddp.py", DDP, changes)
        printed.append(finished(forked(path, nprocs=ranks), tmp_path).stdout)
    assert printed[0] == printed[1]
    assert printed[0].count("epoch") == 10


def test_two_seeds_differ_in_order_and_dropout(tmp_path):
    """So do the dropout masks of two ranks with the same seed."""
    line = "        loss_sum, samples = 0.0, 0\n"
    show = on_each_rank("[*sampler][:99], nn.functional.dropout(torch.ones(99)).tolist()")
    found = []
    for seed in (0, 1):
        settings = ("epochs=10, seed=0", f"epochs=1, seed={seed}")
        changes = settings, (line, f"{line}        {show}"), UNSAVED
        job = finished(forked(write(tmp_path / "train_ddp.py", DDP, changes)), tmp_path)
        found += [literal_eval(*printed_by(job, rank)) for rank in (0, 1)]
    for values in zip(*found):  # the orders, then the masks
        assert len({*map(tuple, values)}) == 4


def test_each_seed_in_the_lines_to_copy_depends_on_the_seed_of_the_run():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    seeds = re.findall(r"seed\((.+?)\)", "".join(blocks))
    assert len(seeds) >= 4
    assert all(seed.startswith("seed + ") for seed in seeds), seeds


@pytest.mark.slow
def test_the_checker_finds_nothing_wrong(own_folder, fork_ranks, tmp_path):  # noqa: F811
    with planned(write(tmp_path / "train_ddp.py", DDP, [SHORT])) as plan:
        verdicts = named(judge(plan.undisturbed))
        drills = {name: perform(name, plan) for name in ("kill", "sigterm", "world-size")}
    assert reported(verdicts) == {}
    seen = {"ranks_share_data", "weights_agree", "one_rank_writes", "each_sample_is_evaluated_once"}
    assert seen <= passed(verdicts)
    assert [verdict.status for verdict in drills.pop("sigterm")] == [NOT_APPLICABLE]
    found = [verdict for verdicts in drills.values() for verdict in verdicts]
    assert {verdict.status for verdict in found} == {PASS}, found


KINDS = {  # beginning of an entry's title -> diff that makes train_ddp.py a script of that kind
    "It has no epochs": """
+import itertools
+PRINTED
 def main(epochs=10, seed=0):

+    batches = endless(loader)
     start = 0

-        sampler.set_epoch(epoch)  # otherwise, every epoch has the same order

-        for batch in loader:
+        for batch in itertools.islice(batches, 23):
""",
    "It slices its batches": """
-    loader = DataLoader(train_set, batch_size=32, sampler=sampler)  # 32 per rank
+    images, labels = train_set[:]

-        for batch in loader:
-            images, labels = (part.to(device) for part in batch)
-            loss = cross_entropy(model(images), labels)
+        PRINTED
+            loss = cross_entropy(model(images[indices]), labels[indices])
""",
    "It trains on one graph": """
-    loader = DataLoader(train_set, batch_size=32, sampler=sampler)  # 32 per rank
-    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
+    features, labels = data.tensors
+    edges = (torch.cdist(features, features) < 1).float()
+    train_nodes = train_set.indices[:-1]  # an odd number of them
+    model = Graph(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

-        for batch in loader:
-            images, labels = (part.to(device) for part in batch)
-            loss = cross_entropy(model(images), labels)
+        for _ in range(2):
+            PRINTED

+class Graph(nn.Sequential):
+    def forward(self, features, edges=None):
+        return super().forward(features if edges is None else edges @ features)
+
+
 def evaluate(model, data, device):
""",
    "Its sampler draws": """
-from torch.utils.data import DataLoader, TensorDataset, random_split
+from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, random_split

-    sampler = torch.utils.data.DistributedSampler(train_set, seed=seed)  # shuffles and splits
+    weights = torch.arange(1440) % 3
+    PRINTED

-        sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
""",
    "The loss is a mean over tokens": """
-            loss = cross_entropy(model(images), labels)
+            labels = labels.where(labels > 2, -100)
+            logits = model(images)
+            PRINTED
""",
    "Everything is global": """
-def main(epochs=10, seed=0):
+dist.init_process_group("gloo")
+epochs, seed = 3, 0
+if epochs:

-if __name__ == "__main__":
+PRINTED
+if False:
""",
    "It acts on the validation loss": """
     start = 0
+    best = 0.0
+    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)

         dist.all_reduce(total)  # the sums over all ranks
+        PRINTED
""",
    "Its optimizer takes a closure": """
-    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
+    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

-            loss = cross_entropy(model(images), labels)
-            optimizer.zero_grad()
-            loss.backward()
-            optimizer.step()
-            loss_sum += loss.item() * len(labels)
+            PRINTED
+            loss_sum += optimizer.step(closure).item() * len(labels)
""",
    "It changes a buffer": """
-    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
+    model = Counting(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
+    model.register_buffer("counts", torch.zeros(10))

             samples += len(labels)
+        assert model.module.counts.sum() == 1440 * (epoch + 1)

+class Counting(nn.Sequential):
+    def forward(self, images):
+        logits = super().forward(images)
+        counts = torch.bincount(logits.argmax(dim=1), minlength=10).float()
+        PRINTED
+        return logits
+
+
 def evaluate(model, data, device):
""",
    "It has a batch_sampler": """
-    sampler = torch.utils.data.DistributedSampler(train_set, seed=seed)  # shuffles and splits
-    loader = DataLoader(train_set, batch_size=32, sampler=sampler)  # 32 per rank

-        sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
+        torch.manual_seed(seed + epoch)
+        batches = [indices.tolist() for indices in torch.randperm(1440).split(32)]
+        PRINTED

-        for batch in loader:
-            images, labels = (part.to(device) for part in batch)
+        for batch in batches:
+            images, labels = train_set[batch]
""",
}


def changes(diff, printed):
    """Yield the old and the new lines of each hunk, with the page's lines in place of PRINTED."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = f"{hunk}\n".splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        indent = re.search("^( *)PRINTED\n", new, re.MULTILINE)
        if indent:
            new = new.replace(indent[0], textwrap.indent(printed, indent[1]))
        yield old, new


@pytest.mark.slow
@pytest.mark.parametrize("title", KINDS)
def test_the_checker_calls_the_lines_right_for(title, own_folder, fork_ranks, tmp_path):  # noqa: F811
    (entry,) = re.findall(rf"^### {title}.*\n((?:(?!##+ ).*\n)*)", PAGE, re.MULTILINE)
    printed = "".join(re.findall(r"^```python\n(.*?)^```$", entry, re.MULTILINE | re.DOTALL))
    path = write(tmp_path / "train_ddp.py", DDP, [NAMES, *changes(KINDS[title], printed)])
    write(path, path.read_text(encoding="utf-8").replace(*SHORT))
    with planned(path) as plan:
        verdicts = named(judge(plan.undisturbed))
        drilled = perform("world-size", plan) if "tokens" in title else []
    assert plan.undisturbed.returncode == 0, plan.undisturbed.output
    assert all(verdict.status == PASS for verdict in drilled), drilled
    assert reported(verdicts) == {}, verdicts
    assert "graph" not in title or verdicts["ranks_share_data"].status == UNSEEN
    assert "weights_agree" in passed(verdicts)
