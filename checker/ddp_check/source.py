"""What is read in the text of a script, where a run alone cannot decide."""

import ast
import re

WORLD_SIZE = re.compile(
    r"(?i)get_world_size|world|num_?(gpus|procs?|processes|replicas|ranks)|^n_?(gpus|procs|ranks)$"
)
ROUNDS = r"^int$|\b(ceil|floor|round)$"  # a function
DIVIDES = ("div", "div_", "divide", "divide_", "true_divide", "true_divide_")


def divisions_by_world_size(run):
    """Return the lines that divide, by the world size, what backward() is then called on."""
    tree = parsed(run)
    sizes = world_size_names(tree)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = []
    for scope in [tree, *functions.values()]:
        for call in backward_calls(scope):
            names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
            lines += divisions(call, sizes)
            for statement in ast.walk(scope):
                if isinstance(statement, ast.stmt) and changes(statement, names, call.lineno):
                    lines += divisions(statement, sizes)
                    for inner in called(statement, functions):
                        lines += divisions(inner, sizes)
    return [f"{run.script}:{number}" for number in dict.fromkeys(lines)]


def shares_of_ranks(run):
    """Return the lines that divide a whole number by the world size, such as that of the steps."""
    tree = parsed(run)
    sizes, whole = world_size_names(tree), []
    for node in ast.walk(tree):
        if isinstance(getattr(node, "op", None), ast.FloorDiv):
            whole.append(node)
        elif isinstance(node, ast.Call) and re.search(ROUNDS, ast.unparse(node.func)):
            whole += node.args
    lines = [line for node in whole for line in divisions(node, sizes)]
    return [f"{run.script}:{number}" for number in sorted({*lines})]


def parsed(run):
    """Return the syntax tree of a script, without statements if it has none."""
    try:
        return ast.parse(run.source)
    except SyntaxError:
        return ast.Module([], [])


def world_size_names(tree):
    """Return the names that stand for the number of ranks."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values, targets = [node.value], node.targets
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                values, targets = node.value.elts, targets[0].elts
            for target, value in zip(targets, values):
                if re.search("get_world_size|WORLD_SIZE", ast.unparse(value)):
                    names.add(ast.unparse(target))
    return names


def backward_calls(scope):
    """Return the calls `loss.backward()` and `anything.backward(loss)`."""
    return [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    ]


def changes(statement, names, before):
    """Return whether a statement before this line assigns one of these names, or divides it."""
    if statement.lineno > before:
        return False
    if isinstance(statement, ast.Assign):
        return bool(names & {ast.unparse(target) for target in statement.targets})
    if isinstance(statement, ast.AugAssign):
        return ast.unparse(statement.target) in names
    call = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
    owner = getattr(getattr(call, "func", None), "value", None)
    return isinstance(owner, ast.Name) and owner.id in names


def called(statement, functions):
    """Return the script's own functions that a statement calls."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return [function for name, function in functions.items() if name in names]


def divisions(node, sizes):
    """Return the numbers of the lines inside a node that divide by the number of ranks."""
    lines = []
    for part in ast.walk(node):
        divisor = None
        division = isinstance(getattr(part, "op", None), ast.Div | ast.FloorDiv)
        if division:
            divisor = part.right if isinstance(part, ast.BinOp) else part.value
        elif isinstance(part, ast.Call) and getattr(part.func, "attr", "") in DIVIDES and part.args:
            divisor = part.args[-1]
        text = ast.unparse(divisor) if divisor else ""
        if text and (text in sizes or WORLD_SIZE.search(text)):
            lines.append(part.lineno)
    return lines
