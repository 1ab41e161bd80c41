"""Code asking for the number of samples only to raise: the step then holds for accepted sizes."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import FrameType


def only_raises(frame: FrameType) -> bool:
    """Return whether ``frame`` stands in the condition of an ``assert``, or of an ``if`` with a branch that only
    raises. The condition must not keep its results."""
    position = _position(frame)
    conditions = _conditions(frame.f_code.co_filename)
    return position is not None and any(
        _inside(position, test) or position == _place(whole) for whole, test in conditions
    )


def may_catch(frame: FrameType) -> bool:
    """Return whether ``frame`` runs code of a ``try`` with an ``except``: an error is then a branch."""
    position = _position(frame)
    return position is None or any(_inside(position, statement) for statement in _tried(frame.f_code.co_filename))


def _position(frame: FrameType) -> tuple[int, int, int, int] | None:
    """First and last line, first and last byte in them, of the expression that runs."""
    span = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if span is None or any(number is None for number in span):
        return None
    line, last, column, end = span
    assert line is not None and last is not None and column is not None and end is not None
    return line, last, column, end


@functools.lru_cache(maxsize=32)
def _nodes(file: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def _tried(file: str) -> list[ast.stmt]:
    return [line for node in _nodes(file) if isinstance(node, ast.Try) and node.handlers for line in node.body]


def _conditions(file: str) -> list[tuple[ast.stmt, ast.expr]]:
    """Statements with the conditions. The jump on a single-value condition has the statement's position."""
    tests = [
        (node, node.test)
        for node in _nodes(file)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and (_raises(node.body) or _raises(node.orelse)))
    ]
    return [pair for pair in tests if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(pair[1]))]


def _raises(branch: list[ast.stmt]) -> bool:
    return len(branch) == 1 and isinstance(branch[0], ast.Raise)


def _place(whole: ast.stmt) -> tuple[int, int, int, int]:
    return whole.lineno, whole.end_lineno or 0, whole.col_offset, whole.end_col_offset or 0


def _inside(position: tuple[int, int, int, int], whole: ast.expr | ast.stmt) -> bool:
    line, last, column, end = position
    begins, ends = (whole.lineno, whole.col_offset), (whole.end_lineno or 0, whole.end_col_offset or 0)
    return begins <= (line, column) and (last, end) <= ends
