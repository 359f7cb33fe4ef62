"""Where the rooms are, as paths from the top of the repository. Nothing else here names them."""

CONVERT = "convert"
SLURM = "slurm"
RECIPES = "recipes"
PITFALLS = "pitfalls"
LOOKUP = "lookup"
CHECKER = "checker"
EXERCISE = "exercise"
WITHOUT_SLURM = "without_slurm"
BENCHMARKS = "benchmarks"
# Pages of other rooms whose sections the page's search finds, too.
SEARCHED = (
    f"{CONVERT}/README.md",
    f"{WITHOUT_SLURM}/README.md",
    f"{SLURM}/README.md",
    f"{SLURM}/faults.md",
    f"{BENCHMARKS}/README.md",
    f"{CHECKER}/README.md",
)
