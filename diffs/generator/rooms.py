"""The paths of the rooms (folders with their own tests), which no other module contains."""

CONVERT = "convert"
SLURM = "slurm"
RECIPES = "more/recipes"
PITFALLS = "more/pitfalls"
LOOKUP = "more/lookup"
CHECKER = "more/checker"
EXERCISE = "more/exercise"
WITHOUT_SLURM = "more/without_slurm"
BENCHMARKS = "more/benchmarks"
# Pages outside more/lookup/ whose sections the search on the page also finds:
SEARCHED = (
    f"{CONVERT}/README.md",
    f"{WITHOUT_SLURM}/README.md",
    f"{SLURM}/README.md",
    f"{SLURM}/faults.md",
    f"{BENCHMARKS}/README.md",
    f"{CHECKER}/README.md",
)
