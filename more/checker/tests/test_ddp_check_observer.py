"""What the observer asks of PyTorch and of the script, and that it never breaks a script."""

import importlib.util
import sys

import pytest
from checking import BASE, before, judged, passed, reported
from ddp_check import events
from ddp_check.imports import AfterImport
from ddp_check.plan import planned
from support.scripts import write

pytestmark = pytest.mark.usefixtures("own_folder")
IS_RANK_0 = "import os\nos.environ['RANK'] = '0'\n"


def test_this_pytorch_has_what_is_patched(tmp_path):
    """If it fails with a new PyTorch, find out what replaces the function that it names."""
    script = write(tmp_path / "script.py", f"{IS_RANK_0}import torch.distributed.checkpoint\n")
    with planned(script, launcher="python", translate="yes") as plan:
        run = plan.undisturbed
    assert run.returncode == 0, run.output
    assert run.all(events.Start)
    assert [event.error for event in run.all(events.Trouble)] == []


def test_a_sitecustomize_of_the_machine_runs_too(tmp_path, monkeypatch):
    machine = tmp_path / "machine"
    machine.mkdir()
    write(machine / "sitecustomize.py", "import sys\n\nsys.plum = 'blue'\n")
    monkeypatch.setenv("PYTHONPATH", str(machine))
    script = write(tmp_path / "script.py", f"{IS_RANK_0}import sys, torch\nsys.plum\n")
    with planned(script, launcher="python") as plan:
        run = plan.undisturbed
    assert run.returncode == 0, run.output
    assert run.all(events.Start)


def test_a_lookup_is_no_import(tmp_path, monkeypatch):
    """As `find_spec("torch")` before `import torch`, which Accelerate's examples do."""
    (tmp_path / "plum.py").write_text("colour = 'blue'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    finder = AfterImport("plum", lambda: calls.append(sys.modules["plum"].colour))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for _ in range(2):
        assert importlib.util.find_spec("plum").name == "plum"
    assert calls == []
    import plum  # noqa: F401

    assert calls == ["blue"]
    assert finder not in sys.meta_path


HOSTILE = '''
import pickle
import signal
import tempfile
from torch.utils._python_dispatch import TorchDispatchMode

class Hostile:
    """Raises when it is asked for anything, lies about its length, and equals nothing."""

    def __getattribute__(self, name):
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise RuntimeError(f"do not ask for {name}")

    def __len__(self):
        return 1 << 40

    def __eq__(self, other):
        return torch.tensor([True, False])

    def __hash__(self):
        raise RuntimeError("do not hash")

    def __bool__(self):
        raise RuntimeError("do not ask for the truth")


class Pathless:
    """A file that does not tell its name."""

    name = property(lambda self: 1 / 0)

    def write(self, content):
        return len(content)

    def flush(self):
        pass


class Loud(torch.Tensor):
    calls = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Loud.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Recorder(TorchDispatchMode):
    """Records what is computed, as a profiler would."""

    calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Endless(Hostile):
    """Every attribute is another such object; `del` and loops never come to an end."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name) if name.startswith("__") else Endless()

    def __iter__(self):
        raise RuntimeError("do not iterate")


class Batches(Hostile):
    def __len__(self):
        return 6

    def __iter__(self):
        rank, epoch = dist.get_rank(), int(os.environ["EPOCH"])
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch)).tolist()
        yield from torch.tensor(order).view(12, 8)[rank::2].tolist()

'''
SURROUNDED = [
    before("\nclass Points", HOSTILE),
    (
        "self.x, self.y = x,",
        "self.hostile, self.endless, self.x, self.y = Hostile(), Endless(), x,",
    ),
    (
        "    loader = DataLoader(data, 8, sampler=sampler)\n",
        """
    def collate(rows):
        return [*torch_data.default_collate(rows), Hostile(), Endless()]

    loader = DataLoader(data, batch_sampler=Batches(), collate_fn=collate)
""",
    ),
    ("        sampler.set_epoch(epoch)\n", '        os.environ["EPOCH"] = str(epoch)\n'),
    ("for inputs, targets in loader", "for inputs, targets, hostile, endless in loader"),
    ("cross_entropy(model(inputs)", "cross_entropy(model(inputs, original=hostile)"),
    ("    net = nn.Sequential(", "    net = Calm("),
    before(
        "\ndef main",
        """
class Calm(nn.Sequential):
    def __eq__(self, other):
        return torch.tensor([True, False])

    __hash__ = nn.Module.__hash__

    def forward(self, inputs, original=None):
        return super().forward(inputs)

""",
    ),
    before("            torch.save(", '            torch.save({"a": {}}, Pathless())\n'),
    (
        "            loss.backward()\n",
        """            with torch.device("meta"):
                loss.backward()
""",
    ),
    before(
        "    dist.barrier()\n",
        """    inputs, layer = torch.ones(1, 4), nn.Linear(4, 4)
    assert torch.jit.trace(net.eval(), inputs)(inputs).equal(net(inputs))
    torch.optim.SGD(nn.LazyLinear(2).parameters())
    with Recorder() as recorder, torch.no_grad():
        layer(inputs)
    assert recorder.calls == ["t", "addmm"], recorder.calls
    loud = inputs.as_subclass(Loud)
    with torch.no_grad():
        net(loud)
    assert Loud.calls == ["linear", "relu", "linear"], Loud.calls
    pickle.dumps([torch.load, torch.save])
    signal.signal(signalnum=signal.SIGTERM, handler=signal.SIG_DFL)
    torch.optim.lr_scheduler.StepLR(optimizer, 9)
    dist.destroy_process_group(dist.new_group())
    os.chdir(made := tempfile.mkdtemp())
    os.rmdir(made)
    dist.all_reduce(torch.ones(1))
""",
    ),
]


@pytest.mark.slow
def test_nothing_that_a_script_holds_can_break_it(tmp_path, fork_ranks):
    """Nor does an object that fails cost the report what is known of the others."""
    run, verdicts = judged(write(tmp_path / "train.py", BASE, SURROUNDED))
    assert run.returncode == 0, run.output
    assert run.all(events.Trouble) == []
    assert run.all(events.Scheduled) == []
    assert reported(verdicts) == {}
    assert passed(verdicts) >= {"ranks_share_data", "order_changes", "gradients_are_averaged"}


STEP = "            optimizer.step()\n"
FAILS_FIRST = """\
            try:
                optimizer.step(lambda: 1 / 0)
            except ZeroDivisionError:
                pass
"""
SENT = "    dist.broadcast_object_list([torch.ones(2)])\n"


@pytest.mark.slow
def test_steps_that_fail_hide_no_others_and_what_is_sent_is_no_save(tmp_path, fork_ranks):
    changes = [before(STEP, FAILS_FIRST), before("    dist.barrier()\n", SENT)]
    run, _ = judged(write(tmp_path / "train.py", BASE, changes))
    assert run.returncode == 0, run.output
    steps = len(run.of_lowest_rank(events.Step))
    assert steps == 2 * 18  # three epochs of six
    assert len(run.all(events.Save)) == 3
