"""The training loop of a script, in Python's grammar: the lines of the loss, clips and micro-steps."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

LOOPS = (ast.For, ast.While)
_CLIPS = {"clip_grad_norm_": ("--clip-norm", "max_norm"), "clip_grad_value_": ("--clip-value", "clip_value")}
"""Function of torch -> the option of gopt export, and the name of the function's bound."""


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


def clips(tree: ast.AST) -> Iterator[str]:
    """For each clip of gradients, the option of gopt export in its stead."""
    for node in ast.walk(tree):
        option, name = _CLIPS.get(called(node).rpartition(".")[2], ("", ""))
        if option and isinstance(node, ast.Call):
            bounds = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == name)]
            bound = ast.unparse(bounds[0]) if bounds else "X"
            yield f"line {node.lineno} clips gradients, and a step does so by gopt export {option} {bound}"


def turns(tree: ast.AST, optimizers: Collection[str]) -> Iterator[str]:
    """For each step that waits for several backwards, the option of gopt shard in its stead."""
    moves = {f"{name}.step" for name in optimizers}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
        remainders = [part for part in ast.walk(node.test) if isinstance(part, ast.BinOp)]
        turns = [ast.unparse(part.right) for part in remainders if isinstance(part.op, ast.Mod)]
        if turns and any(called(part) in moves for statement in node.body for part in ast.walk(statement)):
            option = f"gopt shard --accumulate {turns[0]}"
            yield f"line {node.lineno} steps once in {turns[0]} backwards, and ranks do so by {option}"


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
