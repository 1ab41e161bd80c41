"""The batch of a training loop over numbers: values of a forward without a use of the model, by data flow."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gopt.frontends.pytorch.script_blocks import bound
from gopt.frontends.pytorch.training_loops import TrainingLoop, called


@dataclass(frozen=True, slots=True)
class LoopInputs:
    """``names``: of the batch. ``front``: the statements in their making; ``behind``: the statements from them to the
    loss."""

    names: tuple[str, ...] = ()
    front: tuple[ast.stmt, ...] = ()
    behind: tuple[ast.stmt, ...] = ()

    @classmethod
    def of(
        cls, chain: Sequence[ast.stmt], loop: TrainingLoop, trained: Collection[str], arrays: Collection[str]
    ) -> LoopInputs:
        """The inputs of a chain of statements to a loss: the names of a loop over a loader, else of a loop over numbers
        or a sampler the results of statements before a use of the trained names, and rows of the ``arrays`` of the
        script, taken by an index beside a use; else these arrays."""
        if loop.names and not _only_indices(loop.names, chain, arrays):
            return cls(loop.names, (), tuple(chain))
        reached, front, behind = set(trained), list[ast.stmt](), list[ast.stmt]()
        rows = _Rows(arrays, reached)
        for statement in chain:
            if reached & _names(statement):
                taken = rows.visit(copy.deepcopy(statement)) if isinstance(statement, _SIMPLE) else statement
                behind.append(statement if ast.dump(taken) == ast.dump(statement) else taken)
                reached |= bound(statement)
            else:
                front.append(statement)
        front += rows.taken()
        read = {name for statement in behind for name in _names(statement)}
        names = [name for statement in front for name in sorted(bound(statement)) if name in read]
        if not front:
            names = sorted(
                name for statement in behind for name in _operands(statement)
                if name in arrays and name not in reached
            )  # fmt: skip
        counter = ast.unparse(loop.node.target)
        is_read = any(_names(loop.node.target) & _names(statement) for statement in front)
        if is_read and (loop.names or isinstance(loop.over, ast.Call)):
            if called(loop.over) == "range" and isinstance(loop.over, ast.Call):
                start = ast.unparse(loop.over.args[0]) if len(loop.over.args) > 1 else "0"
            else:
                start = f"next(iter({ast.unparse(loop.node.iter)}))"
            front[:0] = ast.parse(f"{counter} = {start}").body
        return cls(tuple(dict.fromkeys(names)), tuple(front), tuple(behind))


_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
"""Expressions with names of their own."""


def _only_indices(names: Sequence[str], chain: Sequence[ast.stmt], arrays: Collection[str]) -> bool:
    """Return whether each use of the names is in an index of an array of the script, as of a loop over a sampler."""
    nodes = [node for statement in chain for node in ast.walk(statement)]
    rows = [node for node in nodes if isinstance(node, ast.Subscript) and _names(node.value) & set(arrays)]
    inside = {id(part) for node in rows for part in ast.walk(node.slice)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    return bool(uses) and all(id(node) in inside for node in uses)


class _Rows(ast.NodeTransformer):
    """Gives a name to each ``X[i:i + 8]``, by an index that is computed, of ``arrays`` without one of the names
    ``reached`` in it."""

    def __init__(self, arrays: Collection[str], reached: Collection[str]) -> None:
        self._arrays, self._reached, self._named = arrays, reached, dict[str, str]()

    def taken(self) -> list[ast.stmt]:
        """The assignments of the names."""
        return ast.parse("\n".join(f"{name} = {text}" for text, name in self._named.items())).body

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        names, text, base = _names(node), ast.unparse(node), ast.unparse(node.value)
        is_row = _names(node.slice) and not _names(node.value).isdisjoint(self._arrays)
        if not is_row or not names.isdisjoint(self._reached) or isinstance(node.ctx, ast.Store):
            return self.generic_visit(node)
        name = re.sub(r"\W+", "_", f"{base}_batch")
        more = sum(known.startswith(name) for of, known in self._named.items() if of != text)
        return ast.Name(self._named.setdefault(text, f"{name}{more + 1 if more else ''}"), node.ctx)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node if isinstance(node, _SCOPES) else super().generic_visit(node)


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _operands(statement: ast.AST) -> set[str]:
    """Names among the operands of arithmetic, and the arguments of calls other than a move to a device."""
    nodes = list(ast.walk(statement))
    calls = (node for node in nodes if isinstance(node, ast.Call) and not called(node).endswith(".to"))
    parts = [part for node in nodes if isinstance(node, ast.BinOp) for part in (node.left, node.right)]
    parts += [argument for call in calls for argument in call.args]
    return {part.id for part in parts if isinstance(part, ast.Name)}
