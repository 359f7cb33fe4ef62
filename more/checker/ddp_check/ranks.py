"""How values of ranks are compared and put into words."""


def differing_ranks(values_by_rank):
    """Return the lowest rank and the first rank whose value is not equal to its value, or None."""
    items = iter(values_by_rank.items())
    rank, value = next(items, (None, None))
    return next(((rank, other) for other, theirs in items if theirs != value), None)


def differ(objects_by_rank, name):
    """Return the lowest rank and the first rank that differs from it in this attribute, or None."""
    return differing_ranks({rank: getattr(value, name) for rank, value in objects_by_rank.items()})


def grouped(values_by_rank, key):
    """Return {rank: values} as {key: {rank: the values with this key}}; `key` is a function."""
    groups = {}
    for rank, values in values_by_rank.items():
        for value in values:
            groups.setdefault(key(value), {}).setdefault(rank, []).append(value)
    return groups


def of_lowest_rank(values_by_rank):
    """Return the value of the lowest rank, or an empty list if there are no ranks."""
    return next(iter(values_by_rank.values()), [])


def short(where):
    """Return "path/file:line" as "file:line"."""
    return where.rpartition("/")[2]


def counted(number, noun):
    """Return a number with its noun, which is plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
