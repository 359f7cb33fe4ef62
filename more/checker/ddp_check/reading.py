"""Reads the events that the processes of a run have reported."""

from ddp_check import events


class Reader:
    """Reads the files of a folder. A later call reads only what was added since the last one."""

    def __init__(self, folder):
        self.folder = folder
        self.read = {}  # path -> (number of bytes that were read, events in these bytes)

    def processes(self):
        """Return the process ID and the events of each rank: {rank: (pid, events)}."""
        processes = []
        for path in self.folder.glob("*.jsonl"):
            lines = self.events_in(path)
            join = next((event for event in lines if isinstance(event, events.Join)), None)
            rank = str(getattr(join or next(iter(lines), None), "rank", None))
            if rank.isdigit():  # RANK may be missing or empty
                processes.append((int(rank), not join, lines[0].time, int(path.stem), lines))
        by_rank = {}
        # A rank's children inherit RANK. The rank itself joined the group, or is the earliest.
        for rank, _, _, pid, lines in sorted(processes, key=lambda process: process[:3]):
            by_rank.setdefault(rank, (pid, lines))
        return by_rank

    def events_in(self, path):
        """Return all events of a process."""
        begin, lines = self.read.get(path, (0, []))
        with open(path, "rb") as file:
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]  # the last line may be incomplete
        if whole:
            lines = [*lines, *map(events.read, whole.decode("utf-8").split("\n"))]
            begin += len(whole) + 1
        self.read[path] = begin, lines
        return lines


def read_events(folder):
    """Return the process ID and the events of each rank: {rank: (pid, events)}."""
    return Reader(folder).processes()
