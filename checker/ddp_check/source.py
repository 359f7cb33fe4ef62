"""What is read in the text of a script, where a run alone cannot decide."""

import ast
import re
from itertools import chain

WORLD_SIZE = re.compile(
    r"(?i)get_world_size|world|num_?(gpus|procs?|processes|replicas|ranks)|^n_?(gpus|procs|ranks)$"
)
SETS_SIZE = re.compile("get_world_size|WORLD_SIZE")
ASSIGNMENTS = ast.Assign | ast.AnnAssign | ast.NamedExpr
SIMPLE = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr  # contain no other statements


def divisions_by_world_size(run):
    """Return the lines that divide, by the world size, what backward() is then called on.

    They are in the call itself: (loss / world_size).backward(),
    or in a statement before it, in the same function, that changes one of its names: loss /= n,
    or in a function of the script that such a statement mentions: loss = scaled(loss).
    Whether the loss really is divided, the run has to show.
    """
    lines = [divisions_in_file(path, text) for path, text in run.files.items()]
    return list(dict.fromkeys(chain(*lines)))


def divisions_in_file(path, text):
    """Return these lines of one file."""
    tree = parsed(text)
    sizes = world_size_names(tree)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = []
    for scope in [tree, *functions.values()]:
        for call in backward_calls(scope):
            names = names_in(call) - {"self"}
            before = [  # up to the call, what changes a name that it uses
                statement
                for statement in own_parts(scope)
                if isinstance(statement, SIMPLE)
                and statement.lineno <= call.lineno
                and names & names_changed(statement)
            ]
            used = set().union(*map(names_in, before))
            mentioned = [function for name, function in functions.items() if name in used]
            for node in [call, *before, *mentioned]:
                lines += divisions(node, sizes)
    return [f"{path}:{number}" for number in lines]


def parsed(text):
    """Return the syntax tree of a script, an empty one if its syntax is wrong."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def world_size_names(tree):
    """Return the names that are set in an assignment of the number of ranks.

    Of `rank, size = get_rank(), get_world_size()`, it returns both, as nobody divides by a rank.
    """
    assignments = [node for node in ast.walk(tree) if isinstance(node, ASSIGNMENTS)]
    of_sizes = [node for node in assignments if SETS_SIZE.search(ast.unparse(node))]
    parts = [part for assignment in of_sizes for part in ast.walk(assignment)]
    is_set = [part for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)]
    return {ast.unparse(part) for part in is_set}


def backward_calls(scope):
    """Return the calls `loss.backward()` and `anything.backward(loss)`."""
    calls = [node for node in own_parts(scope) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", "") == "backward"]


def own_parts(scope):
    """Yield the parts of a module or a function, without those of the functions inside it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from own_parts(child)


def names_changed(statement):
    """Return the names that a statement sets, or whose method it calls: `loss.div_(n)`."""
    parts = [part for part in ast.walk(statement) if isinstance(part, ast.Name)]
    changed = {part.id for part in parts if isinstance(part.ctx, ast.Store)}
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        changed |= names_in(statement.value.func)
    return changed


def names_in(node):
    """Return the names that are used in a part of the tree."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def divisions(node, sizes):
    """Return the numbers of the lines in a part of the tree that divide by the number of ranks.

    sizes: names that stand for it
    """
    return [
        inner.lineno
        for inner in ast.walk(node)
        if (divisor := divisor_of(inner)) in sizes or WORLD_SIZE.search(divisor)
    ]


def divisor_of(node):
    """Return what a part of the tree divides by, as it is written, or ""."""
    match node:
        case ast.BinOp(op=ast.Div() | ast.FloorDiv()):
            return ast.unparse(node.right)
        case ast.AugAssign(op=ast.Div() | ast.FloorDiv()):
            return ast.unparse(node.value)
        case ast.Call(ast.Attribute(attr="div" | "div_"), [*_, divisor]):
            return ast.unparse(divisor)
    return ""
