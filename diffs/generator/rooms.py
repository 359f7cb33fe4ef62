"""The paths of the rooms, which are folders with their own tests. Only this module has them."""

CONVERT = "convert"
SLURM = "slurm"
RECIPES = "recipes"
PITFALLS = "pitfalls"
LOOKUP = "lookup"
CHECKER = "checker"
EXERCISE = "exercise"
WITHOUT_SLURM = "without_slurm"
BENCHMARKS = "benchmarks"
# Pages outside lookup/ whose sections the search on the page also finds:
SEARCHED = (
    f"{CONVERT}/README.md",
    f"{WITHOUT_SLURM}/README.md",
    f"{SLURM}/README.md",
    f"{SLURM}/faults.md",
    f"{BENCHMARKS}/README.md",
    f"{CHECKER}/README.md",
)
