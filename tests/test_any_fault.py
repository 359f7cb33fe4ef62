"""Random faults at random moments: the same command, typed again, ends as if there were none."""

import os
import random
import signal
import time

import pytest
from support.jobs import RESTARTS, Job, finished, kill
from support.results import same_bits
from support.scripts import FOUR_EPOCHS, command

SEED = int(os.environ.get("DDP_LADDER_SEED", random.randrange(1_000_000)))


def freeze(job, rank):
    kill(rank, signal.SIGSTOP)
    time.sleep(3)
    kill(rank, signal.SIGCONT)


def tell_twice(job, rank):
    kill(job.process, signal.SIGTERM)
    time.sleep(0.5)
    kill(job.process, signal.SIGTERM)


FAULTS = {  # each is a function of a run and of one of its ranks
    "killed": lambda job, rank: kill(rank),
    "all killed": lambda job, rank: [kill(process) for process in job.processes()],
    "frozen": freeze,
    "torchrun told": lambda job, rank: kill(job.process, signal.SIGTERM),
    "torchrun told twice": tell_twice,
    "told": lambda job, rank: kill(rank, signal.SIGTERM),
    "Ctrl-C": lambda job, rank: kill(job.process, signal.SIGINT),
}


def disturb(job, draw, duration):
    """Let a random fault happen to a random rank, if it is still running, at a random moment."""
    time.sleep(draw.uniform(0, duration))
    fault, rank = draw.choice([*FAULTS]), draw.choice([0, 1])
    if rank in (ranks := job.workers()):
        print(f"{fault}: rank {rank} in {job.cwd}")
        FAULTS[fault](job, ranks[rank])


@pytest.mark.weekly("twenty-five trainings of a step, with random faults until each has ended")
@pytest.mark.parametrize("step", ["03", "04"])
def test_whatever_happens_the_same_command_again_ends_with_the_same_bits(trained, tmp_path, step):
    print(f"DDP_LADDER_SEED={SEED} draws these faults again")
    draw, begun = random.Random(SEED), time.monotonic()
    start = command(step, *FOUR_EPOCHS, torchrun=("--max-restarts=1",))
    finished(start, tmp_path, RESTARTS)
    duration = time.monotonic() - begun
    for number in range(25):
        folder, code = tmp_path / str(number), None
        folder.mkdir()
        while code != 0:
            (folder / "checkpoint.pt.interrupted").unlink(missing_ok=True)  # as a batch file does
            with Job(start, folder, RESTARTS) as job:
                for _ in range(draw.choice([1, 2])):
                    disturb(job, draw, duration)
                code = job.wait(180).wait_until_gone().returncode
        assert same_bits(job, trained("03", *FOUR_EPOCHS)), job
        assert [path.name for path in folder.glob("[!.]*")] == ["checkpoint.pt"]
