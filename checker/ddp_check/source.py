"""What is read in the text of a script, where a run alone cannot decide."""

import ast
import re

WORLD_SIZE = re.compile(
    r"(?i)get_world_size|world|num_?(gpus|procs?|processes|replicas|ranks)|^n_?(gpus|procs|ranks)$"
)
MAKES_WHOLE = r"^int$|\b(ceil|floor|round)$"  # the name of a function


def divisions_by_world_size(run):
    """Return the lines that divide, by the world size, what backward() is then called on.

    They are in the call itself, in an assignment to one of its names before, or in a function of
    the script that such an assignment calls.
    """
    tree = parsed(run)
    sizes = world_size_names(tree)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = []
    for scope in [tree, *functions.values()]:
        for call in backward_calls(scope):
            lines += divisions(call, sizes)
            for assignment in assignments(scope, names_in(call)):
                if assignment.lineno <= call.lineno:
                    called = [functions[name] for name in names_in(assignment) & functions.keys()]
                    for node in [assignment, *called]:
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


def parsed(run):
    """Return the syntax tree of a script, without statements if it has none."""
    try:
        return ast.parse(run.source)
    except SyntaxError:
        return ast.Module([], [])


def world_size_names(tree):
    """Return the names to which the number of ranks is assigned."""
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
    calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", "") == "backward"]


def names_in(node):
    """Return the names that are used in a part of the tree."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def assignments(scope, names):
    """Return the statements that assign to one of these names: `loss = …`, `loss /= …`."""
    statements = []
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if names & {ast.unparse(target) for target in targets}:
                statements.append(node)
    return statements


def divisions(node, sizes):
    """Return the numbers of the lines in a part of the tree that divide by the number of ranks.

    sizes: names that stand for it
    """
    lines = []
    for inner in ast.walk(node):
        if isinstance(getattr(inner, "op", None), ast.Div | ast.FloorDiv):
            divisor = ast.unparse(inner.right if isinstance(inner, ast.BinOp) else inner.value)
            if divisor in sizes or WORLD_SIZE.search(divisor):
                lines.append(inner.lineno)
    return lines
