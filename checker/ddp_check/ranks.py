"""How values of ranks are compared, and told."""


def differing_ranks(values_by_rank):
    """Return the lowest rank and the first whose value differs from its own, or None."""
    (rank, value), *others = values_by_rank.items()
    return next(((rank, other) for other, theirs in others if theirs != value), None)


def of_lowest_rank(values_by_rank):
    """Return the value of the lowest rank, or an empty list if there are no ranks."""
    return next(iter(values_by_rank.values()), [])


def short(where):
    """Return a line of the script without its folder."""
    return where.rpartition("/")[2]


def counted(number, noun):
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
