"""The batch of a training loop over numbers: values of a forward without a use of the model, by data flow."""

from __future__ import annotations

import ast
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
        """The inputs of a chain of statements to a loss: the names of a loop over a loader, else the results of
        statements before a use of the trained names, else the ``arrays`` of the script in it."""
        if loop.names:
            return cls(loop.names, (), tuple(chain))
        reached, front, behind = set(trained), list[ast.stmt](), list[ast.stmt]()
        for statement in chain:
            if reached & _names(statement):
                behind.append(statement)
                reached |= bound(statement)
            else:
                front.append(statement)
        read = {name for statement in behind for name in _names(statement)}
        names = [name for statement in front for name in sorted(bound(statement)) if name in read]
        if not front:
            names = sorted(
                name for statement in behind for name in _operands(statement)
                if name in arrays and name not in reached
            )  # fmt: skip
        counter = ast.unparse(loop.node.target)
        if any(counter in _names(statement) for statement in front) and isinstance(loop.over, ast.Call):
            start = ast.unparse(loop.over.args[0]) if len(loop.over.args) > 1 else "0"
            front[:0] = ast.parse(f"{counter} = {start}").body
        return cls(tuple(dict.fromkeys(names)), tuple(front), tuple(behind))


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _operands(statement: ast.AST) -> set[str]:
    """Names among the operands of arithmetic, and the arguments of calls other than a move to a device."""
    nodes = list(ast.walk(statement))
    calls = (node for node in nodes if isinstance(node, ast.Call) and not called(node).endswith(".to"))
    parts = [part for node in nodes if isinstance(node, ast.BinOp) for part in (node.left, node.right)]
    parts += [argument for call in calls for argument in call.args]
    return {part.id for part in parts if isinstance(part, ast.Name)}
