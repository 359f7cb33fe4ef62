"""What is read in the text of a script, where a run alone cannot decide."""

import ast
import re

WORLD_SIZE = re.compile(
    r"(?i)get_world_size|world|num_?(gpus|procs?|processes|replicas|ranks)|^n_?(gpus|procs|ranks)$"
)
MAKES_WHOLE = r"^int$|\b(ceil|floor|round)$"  # the name of a function


def divisions_by_world_size(run):
    """Return the lines that divide, by the world size, what backward() is then called on.

    They are in the call itself, `(loss / world_size).backward()`, in a statement that changes one
    of its names before, `loss /= world_size`, or in a function of the script that such a statement
    calls, `loss = scaled(loss)`.
    """
    tree = parsed(run)
    sizes = world_size_names(tree)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = []
    for scope in [tree, *functions.values()]:
        for call in backward_calls(scope):
            changes = changes_of(names_in(call), scope)
            before = [statement for statement in changes if statement.lineno <= call.lineno]
            used = set().union(*map(names_in, before))
            called = [function for name, function in functions.items() if name in used]
            for node in [call, *before, *called]:
                lines += divisions(node, sizes)
    return [f"{run.script}:{number}" for number in dict.fromkeys(lines)]


def shares_of_ranks(run):
    """Return the lines that divide a whole number by the world size, such as that of the steps."""
    tree = parsed(run)
    nodes = []
    for node in ast.walk(tree):
        if isinstance(getattr(node, "op", None), ast.FloorDiv):
            nodes.append(node)
        elif isinstance(node, ast.Call) and re.search(MAKES_WHOLE, ast.unparse(node.func)):
            nodes += node.args
    sizes = world_size_names(tree)
    lines = {line for node in nodes for line in divisions(node, sizes)}
    return [f"{run.script}:{number}" for number in sorted(lines)]


def are_in_one_loop(run, *lines):
    """Return whether a loop of the script runs all these lines, itself or in functions it calls."""
    tree = parsed(run)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    files = {line.rpartition(":")[0] for line in lines}
    if not all(run.script.endswith(path) for path in files):
        return False
    numbers = [int(line.rpartition(":")[2]) for line in lines]
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.While):
            parts = [loop]
            for part in parts:  # which grows by the functions that it calls
                names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(part)}
                called = [functions[name] for name in functions.keys() & names]
                parts += [function for function in called if function not in parts]
            if all(any(part.lineno <= n <= part.end_lineno for part in parts) for n in numbers):
                return True
    return False


def parsed(run):
    """Return the syntax tree of a script, without statements if it has none."""
    try:
        return ast.parse(run.source)
    except SyntaxError:
        return ast.Module([], [])


def world_size_names(tree):
    """Return the names to which the number of ranks is assigned."""
    assigned = [pair for node in ast.walk(tree) for pair in assignments(node)]
    size = re.compile("get_world_size|WORLD_SIZE")
    return {ast.unparse(name) for name, value in assigned if size.search(ast.unparse(value))}


def assignments(node):
    """Return the pairs (name, value) that a part of the tree assigns."""
    match node:
        case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
            return [*zip(names, values)]
        case ast.Assign(names, value):
            return [(name, value) for name in names]
        case ast.AnnAssign(name, _, ast.expr() as value) | ast.NamedExpr(name, value):
            return [(name, value)]
    return []


def backward_calls(scope):
    """Return the calls `loss.backward()` and `anything.backward(loss)`."""
    calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", "") == "backward"]


def names_in(node):
    """Return the names that are used in a part of the tree."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def changes_of(names, scope):
    """Return the statements in a part of the tree that change one of these names."""
    return [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.stmt) and names & set(map(ast.unparse, targets_of(node)))
    ]


def targets_of(statement):
    """Return what a statement assigns to, or the object whose method it calls: `loss.div_(2)`."""
    match statement:
        case ast.Assign():
            return statement.targets
        case ast.AugAssign() | ast.AnnAssign():
            return [statement.target]
        case ast.Expr(ast.Call(ast.Attribute(owner))):
            return [owner]
    return []


def divisions(node, sizes):
    """Return the numbers of the lines in a part of the tree that divide by the number of ranks.

    sizes: names that stand for it
    """
    divisors = {inner: divisor_of(inner) for inner in ast.walk(node)}
    return [
        inner.lineno
        for inner, divisor in divisors.items()
        if divisor in sizes or WORLD_SIZE.search(divisor)
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
