"""Changes for `scripts.edited` that make the training set misbehave."""


def bad_data(lines):
    """Return changes with which `lines`, which see `index`, run before a sample is read."""
    body = "".join(f"        {line}\n" for line in lines.splitlines())
    data = f"""\
class BadData(TensorDataset):
    def __getitem__(self, index):
{body}        return super().__getitem__(index)


def load_datasets():
"""
    return (
        ("    return TensorDataset(shifted,", "    return BadData(shifted,"),
        ("def load_datasets():\n", data),
    )
