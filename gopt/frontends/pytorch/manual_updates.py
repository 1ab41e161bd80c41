"""Gradient descent by hand in a script: the parameters and the rate, for ``torch.optim.SGD``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gopt.frontends.pytorch.training_loops import called


@dataclass(frozen=True, slots=True)
class ManualUpdate:
    """``parameters``: an expression for the optimizer; ``tensors``: names of tensors outside of a module; ``rate``: as
    text."""

    parameters: str
    tensors: tuple[str, ...]
    rate: str

    @property
    def optimizer(self) -> str:
        return f"torch.optim.SGD({self.parameters}, lr={self.rate})"

    @classmethod
    def of(cls, tree: ast.AST, model: str) -> ManualUpdate | None:
        """The plain descent of a script by a single rate; None for any other. ``model``: a name for a module of
        tensors."""
        steps = list(_steps(tree))
        rates = {rate for _, _, rate in steps}
        if len(rates) != 1:
            return None
        loops = [loop for loop, _, _ in steps if loop is not None]
        if loops:
            over = loops[0].iter
            lists = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
            over = next(
                (
                    node.value
                    for node in lists
                    if ast.unparse(node.targets[0]) == ast.unparse(over) and isinstance(node.value, ast.List)
                ),
                over,
            )
            names = ", ".join(ast.unparse(part) for part in getattr(over, "elts", ()))
            method = called(over).rpartition(".")
            text = f"{method[0]}.parameters()" if method[2] == "named_parameters" else ast.unparse(over)
            tensors = tuple(names.split(", ")) if names and names.replace(", ", "").isidentifier() else ()
        else:
            targets = dict.fromkeys(name for _, name, _ in steps)
            text = f"[{', '.join(targets)}]"
            tensors = tuple(targets) if all(map(str.isidentifier, targets)) else ()
        return cls(f"{model}.parameters()" if tensors else text, tensors, rates.pop())


def _steps(tree: ast.AST, loop: ast.For | None = None) -> Iterator[tuple[ast.For | None, str, str]]:
    """Each descent with the loop over its parameter, the parameter, and the rate."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.AugAssign, ast.Assign, ast.Expr)):
            target, change = _change(node)
            rate = _rate(target, change) if change is not None else ""
            if rate:
                bound = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)} if loop else set()
                yield loop if target in bound else None, target, rate
        yield from _steps(node, node if isinstance(node, ast.For) else loop)


def _change(node: ast.AugAssign | ast.Assign | ast.Expr) -> tuple[str, ast.expr | None]:
    """A tensor that a statement lessens in place, and by how much."""
    if isinstance(node, ast.AugAssign):
        return _plain(node.target), node.value if isinstance(node.op, ast.Sub) else None
    if isinstance(node, ast.Assign):
        return _difference(node.targets[0], node.value)
    call = node.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return "", None
    receiver, value = call.func.value, call.args[0]
    weights = [word.value for word in call.keywords if word.arg == "alpha"]
    if call.func.attr == "copy_":
        return _difference(receiver, value)
    change = ast.BinOp(weights[0], ast.Mult(), value) if weights else value
    if call.func.attr == "sub_":
        return _plain(receiver), change
    return _plain(receiver), _negated(change) if call.func.attr == "add_" else None


def _difference(target: ast.expr, value: ast.expr) -> tuple[str, ast.expr | None]:
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Sub) or _plain(value.left) != _plain(target):
        return "", None
    return _plain(target), value.right


def _negated(value: ast.expr) -> ast.expr | None:
    """A product without the minus of its first factor."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        return value.operand
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        factor = _negated(value.left)
        return None if factor is None else ast.BinOp(factor, ast.Mult(), value.right)
    return None


def _rate(target: str, change: ast.expr) -> str:
    """The factor of the target's gradient, or ''."""
    if not isinstance(change, ast.BinOp) or not isinstance(change.op, ast.Mult):
        return ""
    pairs = ((change.left, change.right), (change.right, change.left))
    return next((ast.unparse(rate) for rate, slope in pairs if _plain(slope) == f"{target}.grad"), "")


def _plain(tensor: ast.expr) -> str:
    return ast.unparse(tensor).removesuffix(".detach()").removesuffix(".data")
