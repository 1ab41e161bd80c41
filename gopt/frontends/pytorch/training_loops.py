"""The training loop of a script, in Python's grammar: the loss, steps and micro-steps."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

LOOPS = (ast.For, ast.While)


def own_nodes(statement: ast.AST, borders: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """The nodes of a statement without the bodies of functions, and of the borders."""
    yield statement
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *borders)):
            yield from own_nodes(node, borders)


def called(node: ast.AST) -> str:
    """The function a call calls, as text; '' for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def trains(node: ast.AST, training: Collection[str] = ()) -> bool:
    """Return whether a node is a backward, or calls a function with a backward."""
    function = called(node)
    return function.endswith(".backward") or function in training


def trains_in(scope: ast.AST, training: Collection[str] = ()) -> bool:
    """Return whether a loop or function has a backward outside of inner loops."""
    return any(trains(node, training) for node in own_nodes(scope, LOOPS))


def functions_with(definitions: Mapping[str, ast.AST]) -> set[str]:
    """Names of definitions with a backward, direct or in a called function."""
    names, before = set[str](), -1
    while before != len(names):
        before = len(names)
        names |= {name for name, body in definitions.items() if any(trains(node, names) for node in ast.walk(body))}
    return names


def stepped(node: ast.AST) -> list[str]:
    """The owner of a called ``step``, and its arguments: a scaler steps an optimizer."""
    owner, _, method = called(node).rpartition(".")
    return [owner, *map(ast.unparse, node.args)] if isinstance(node, ast.Call) and owner and method == "step" else []


def turns(tree: ast.AST, optimizers: Collection[str]) -> Iterator[tuple[ast.AST, str]]:
    """Each step of all optimizers behind several backwards, or the branch around the step, with their number, or ''."""

    def moves(nodes: Iterator[ast.AST]) -> bool:
        names = {name for node in nodes for name in stepped(node)}
        return bool(optimizers) and names.issuperset(optimizers)

    values = dict(assigned(tree))
    skips = [
        part for loop in ast.walk(tree)
        if isinstance(loop, LOOPS) and trains_in(loop) and moves(own_nodes(loop, LOOPS))
        for part in _skips(loop, optimizers)
    ]  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and (
            node in skips or moves(part for statement in node.body for part in ast.walk(statement))
        ):
            read = [values[part.id] for part in ast.walk(node.test) if isinstance(part, ast.Name) and part.id in values]
            tests = (part for test in (node.test, *read) for part in ast.walk(test))
            remainders = [part for part in tests if isinstance(part, ast.BinOp)]
            counts = [ast.unparse(part.right) for part in remainders if isinstance(part.op, ast.Mod)]
            if counts:
                yield node, counts[0]
        elif isinstance(node, LOOPS) and not trains_in(node) and moves(own_nodes(node, LOOPS)):
            inner = next((part for part in ast.walk(node) if isinstance(part, LOOPS) and trains_in(part)), None)
            if inner is not None:
                over = inner.iter if isinstance(inner, ast.For) else None
                yield inner, ast.unparse(over.args[0]) if isinstance(over, ast.Call) and called(over) == "range" else ""


def _skips(loop: ast.AST, optimizers: Collection[str]) -> Iterator[ast.If]:
    """The branches to the next turn between a loop's backward and its first step of an optimizer."""
    parts = list(own_nodes(loop, LOOPS))
    backward = min(part.lineno for part in parts if trains(part))  # type: ignore[attr-defined]
    step = min(part.lineno for part in parts if any(name in optimizers for name in stepped(part)))  # type: ignore[attr-defined]
    for part in parts:
        if isinstance(part, ast.If) and backward < part.lineno < step and isinstance(part.body[-1], ast.Continue):
            yield part


def assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names with an assigned expression; the names of a tuple with the expressions of another, by position."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)  # type: ignore[attr-defined]
            ends = zip(target.elts, node.value.elts) if tuples else [(target, node.value)]  # type: ignore[attr-defined]
            yield from ((name.id, value) for name, value in ends if isinstance(name, ast.Name))


def forward(body: Iterable[ast.stmt], counts: Collection[str]) -> Iterator[ast.stmt]:
    """The statements of a loop in front of its backward, without autocasts, and without a division by one of the
    counts."""
    for statement in body:
        trained = any(trains(node) for node in ast.walk(statement))
        if isinstance(statement, ast.With) and (
            trained or all(_is_cast(item.context_expr) for item in statement.items)
        ):
            yield from forward(statement.body, counts)
        elif not trained:
            yield _Undivided(counts).visit(copy.deepcopy(statement))
        if trained:
            return


def _is_cast(context: ast.expr) -> bool:
    return isinstance(context, ast.Name) or called(context).rpartition(".")[2] == "autocast"


class _Undivided(ast.NodeTransformer):
    """Leaves out divisions by one of some texts."""

    def __init__(self, counts: Collection[str]) -> None:
        self.counts = counts

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return node.left if isinstance(node.op, ast.Div) and ast.unparse(node.right) in self.counts else node


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """A loop over batches with a backward.

    ``over``: the loader; ``names``: of a batch, without a count; ``whole``: a batch has one name; ``end``: where the
    backward begins."""

    node: ast.For
    over: ast.expr
    names: tuple[str, ...]
    whole: bool
    end: str

    @classmethod
    def of(cls, tree: ast.AST) -> TrainingLoop | None:
        """The first loop; None where the loss has no name."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.For) or not trains_in(node):
                continue
            target, over = node.target, node.iter
            if called(over) == "enumerate" and isinstance(target, ast.Tuple) and isinstance(over, ast.Call):
                target, over = target.elts[1], over.args[0]
            backward = next(part for part in own_nodes(node, LOOPS) if trains(part))
            named = [part.id for part in ast.walk(backward) if isinstance(part, ast.Name)]
            parts = [target] if isinstance(target, ast.Name) else getattr(target, "elts", [])
            flat = called(over) != "range" and all(isinstance(part, ast.Name) for part in parts)
            if named:
                return cls(node, over, tuple(map(ast.unparse, parts)) if flat else (), target is parts[0], named[0])
        return None

    @property
    def returns_loss(self) -> bool:
        """Whether the module returns the loss, as in ``outputs.loss``."""
        values = (node.value for node in self._assigned() if self.end in _names(node.targets[0]))
        return any(isinstance(value, ast.Attribute) for value in values)

    def lines_of_loss(self) -> tuple[int, int] | None:
        """The first and last line computing the loss; None for a function of an output and a target, and for a loss the
        module returns."""
        assigned = self._assigned()
        values = {ast.unparse(target): node.value for node in assigned for target in node.targets}
        value = values.get(self.end)
        if value is None or self.returns_loss or (isinstance(value, ast.Call) and self._compares(value, values)):
            return None
        last = max(node.end_lineno or 0 for node in assigned if self.end in _names(node.targets[0]))
        return min(node.lineno for node in assigned), last

    def _assigned(self) -> list[ast.Assign]:
        return [node for node in own_nodes(self.node, LOOPS) if isinstance(node, ast.Assign)]

    def _compares(self, loss: ast.Call, values: Mapping[str, ast.expr]) -> bool:
        """Return whether a loss takes the module's result for received values, and a received value, unchanged."""
        if len(loss.args) != 2:
            return False
        output, target = loss.args
        result = values.get(ast.unparse(output), output)
        if not isinstance(result, ast.Call) or result.keywords:
            return False
        received = set(self.names)
        for node in self._assigned():
            if isinstance(node.value, ast.Name) and node.value.id in self.names:
                received.update(_names(node.targets[0]))
            elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
                received.difference_update(_names(node.targets[0]))  # a function makes something else of them: a mixup
        return received.issuperset(map(ast.unparse, (*result.args, target)))


def _names(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
