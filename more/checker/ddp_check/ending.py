"""How a run ended, as far as its output shows."""

import os
import re
import signal
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddp_check.protocol import FRAME, own_frame

LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu|accelerator"  # matches errors due to a missing GPU
# Matches an error that another rank may have caused:
OF_OTHERS = r"(?i)gloo|nccl|connection|timed ?out|reduction|unpickl|\brank|\bpeer|\bstore"
PREFIX = r"(?:\[rank\d+\]: ?)?"  # matches what PyTorch puts before each line of a traceback
CHAINED = r"\s+(?:\[rank\d+\]:\s*)*(?:During handling of|The above exception was)"
# Matches a traceback's last line or an argument parser's error, which `ends_rank` checks further:
ERROR = rf"^{PREFIX}([\w.]+(?:: .+)?|[\w.-]+: error: .+)$(?!{CHAINED})"
REPORT = r"^[EW]\d{4} .*torch/distributed"  # matches the start of torchrun's report of a failure
FIRST_FAILURE = r"Root Cause.*\n(?:.*\n)*?\s+rank\s+: (\d+).*\n\s+exitcode\s+: (-?\d+)"


@dataclass
class Ending:
    """How a run ended."""

    output: str
    cwd: Path  # folder that the script ran in
    returncode: int | None  # None if it was killed after the timeout

    @property
    def printed(self):
        """The output without the launcher's report of a failure."""
        return re.split(REPORT, self.output, maxsplit=1, flags=re.M)[0]

    @property
    def last_line(self):
        """The last line that was printed."""
        return self.printed.strip().rpartition("\n")[2] or "nothing is printed"

    @cached_property
    def errors(self):
        """The matches of the errors that may have ended ranks.

        ERROR skips an error if another follows it, and `ends_rank` skips one that was only printed.
        Errors that PyTorch has marked with a rank are preferred, because nothing has caught them.
        """
        errors = list(filter(ends_rank, re.finditer(ERROR, self.printed, re.M)))
        return list(filter(prefix_of, errors)) or errors

    @property
    def error(self):
        """The match of the error that ended the first rank.

        Errors that are not about other ranks are preferred. If a rank has several errors, the last
        one has ended it, because the script has caught and printed the earlier ones.
        """
        own = [error for error in self.errors if not re.search(OF_OTHERS, error[1])]
        errors = own or self.errors
        of_rank = [error for error in errors if prefix_of(error) == prefix_of(errors[0])]
        return of_rank[-1] if of_rank else None

    @property
    def traceback(self):
        """The lines of the error's traceback, without those of other ranks."""
        first = self.error
        if not first:
            return []
        text = first.string[: first.end()].replace(f"{self.cwd}{os.sep}", "")
        prefix = prefix_of(first)
        lines = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
        starts = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
        if not starts:  # a SyntaxError prints its frame without this line
            starts = [at for at, line in enumerate(lines) if FRAME.match(line)]
        return lines[starts[-1] :] if starts else []

    @property
    def where(self):
        """The innermost line of the script in the error's traceback, as "path:line"."""
        return next(filter(None, map(own_frame, reversed(self.traceback))), "")

    @property
    def text(self):
        """How a failed script has ended, in words, unless it was killed after the timeout."""
        if first := self.error:
            text = first[1]
            next_line = re.match(rf"\s*{PREFIX}\s*(\S.*)", first.string[first.end() :])
            if next_line and text.endswith((":", " ")):  # the message continues on the next line
                text = f"{text.rstrip()} {next_line[1]}"
            usage = re.findall(r"^usage: .+", self.printed, re.M)
            return textwrap.shorten("; ".join([text, *usage[:1]]), 500, placeholder=" …")
        rank, code = self.first_failure
        who = f"rank {rank}" if rank is not None else "it"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"{who} is killed by {names.get(-code, f'signal {-code}')}"
        return f"{who} exits with code {code}: {self.last_line}"

    @property
    def first_failure(self):
        """The rank that failed first, or None if the launcher names none, and its exit code."""
        match = re.search(FIRST_FAILURE, self.output)
        return (int(match[1]), int(match[2])) if match else (None, self.returncode)

    @property
    def lacks_gpus(self):
        """Whether the script failed because there are no GPUs."""
        if not self.returncode:  # the script has not failed
            return False
        # An AssertionError without a message names GPUs only in the line of code above it, such as
        # "assert torch.cuda.is_available()".
        end = self.traceback[-3:] if self.text == "AssertionError" else []
        return bool(re.search(LACKS_GPUS, "\n".join([self.text, *end])))


def ends_rank(error):
    """Return whether a match of ERROR may have ended a rank.

    Such an error ends a traceback, or an argument parser wrote it. The script has printed any
    other match itself: for example, "Error: 0.52", or the reason why it does not use a library.
    """
    if ": error: " in error[1]:
        return True
    frames, lines = [], lines_before(error)
    for line in lines:
        # Stop at the first line that is neither a frame nor in a box drawn by "rich".
        if not re.match(r"\s|╰", line):
            break
        frames.append(line)
    above = next(lines, "")  # the line above the one at which the loop stopped ("Traceback …")
    if above.startswith("Exception ignored in"):  # Python prints such an error and goes on
        return False
    if re.match(r"[\w.]*(Error|Exception)\b", error[1]):
        return bool(frames)  # frames, or lines of a box that "rich" has drawn
    return any(map(FRAME.match, frames))  # StopIteration is an error only below a frame


def lines_before(error):
    """Yield the lines that the same rank printed before an error, the latest first."""
    prefix, end = prefix_of(error), error.start()
    while end:
        begin = error.string.rfind("\n", 0, end - 1) + 1
        line = error.string[begin : end - 1]
        if line.startswith(prefix):
            yield line.removeprefix(prefix)
        end = begin


def prefix_of(error):
    """Return what PyTorch puts before each line of an error that nothing catches, or ""."""
    return re.match(PREFIX, error[0])[0]
