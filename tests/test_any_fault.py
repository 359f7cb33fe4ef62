"""Random faults at random moments: the same command, typed again, ends as if there were none."""

import os
import random
import signal
import time

import pytest
from support.jobs import RESTARTS, Job, finished, kill
from support.results import same_bits
from support.scripts import FOUR_EPOCHS, command

STARTS = 50  # of each step
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
    "Ctrl-C": lambda job, rank: os.killpg(job.process.pid, signal.SIGINT),
}


def disturb(job, duration, draw):
    """Disturb a run once or twice, at random moments; return the faults, ranks and moments."""
    done, start = [], time.monotonic()
    for moment in sorted(draw.uniform(0, duration) for _ in range(draw.choice([1, 2]))):
        fault, rank = draw.choice([*FAULTS]), draw.randrange(2)
        time.sleep(max(0, start + moment - time.monotonic()))
        if rank in (ranks := job.workers()) and job.process.poll() is None:
            FAULTS[fault](job, ranks[rank])
            done.append((fault, rank, round(moment, 1)))
    return done


@pytest.mark.weekly("fifty starts of a step, with a random fault or two in each")
@pytest.mark.parametrize("step", ["03", "04"])
def test_whatever_happens_the_same_command_again_ends_with_the_same_bits(trained, tmp_path, step):
    print(f"DDP_LADDER_SEED={SEED} draws these faults again")
    draw = random.Random(SEED)
    start, starts = command(step, *FOUR_EPOCHS, torchrun=("--max-restarts=1",)), 0
    begun = time.monotonic()
    finished(start, tmp_path, RESTARTS)
    duration = time.monotonic() - begun
    while starts < STARTS:
        folder, history, code = tmp_path / str(starts), [], None
        folder.mkdir()
        while code != 0:
            (folder / "checkpoint.pt.interrupted").unlink(missing_ok=True)  # as a batch file does
            with Job(start, folder, RESTARTS) as job:
                history.append(disturb(job, duration, draw))
                code = job.result(180).returncode
        assert same_bits(job, trained("03", *FOUR_EPOCHS)), (history, job)
        assert [path.name for path in folder.glob("[!.]*")] == ["checkpoint.pt"], history
        starts += len(history)
