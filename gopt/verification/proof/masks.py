"""Choices along a partly present dimension of a rank: a mask, and indices into the part.

Masks and indices as functions of other indices are evaluated at every position of the dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from gopt.errors import GoptError
from gopt.ir.types import numpy_dtype
from gopt.operators.table import operator
from gopt.verification.proof.boxes import Box, Boxes
from gopt.verification.proof.forms import LARGEST, SMALLEST, TAKE, VIEW
from gopt.verification.proof.selections import Runs, flattened, joined

_JOINED: Mapping[str, np.ufunc] = {LARGEST: np.maximum, SMALLEST: np.minimum}
LARGEST_DIMENSION = 1 << 22
"""Positions of a dimension up to which a mask is evaluated."""


class Masks:
    """Functions of indices."""

    def __init__(self, expressions: Boxes) -> None:
        self.expressions, self.arrays = expressions, expressions.arrays
        self._chosen: dict[tuple[int, int, int], tuple[int, Runs] | None] = {}

    def chosen(self, flag: int, position: int, size: int) -> tuple[int, Runs] | None:
        """The indices behind ``position``, and the selected positions of ``flag`` of ``size``; ``position`` counts the
        selected positions; None where they are anything else.

        Indices are from ``-size`` to ``size - 1``."""
        key = flag, position, size
        if key not in self._chosen and (parts := self._parts(flag, position)) is not None:
            inside, (whole, selection) = parts
            chosen = self.chosen(inside, whole, size)
            self._chosen[key] = None
            if chosen is not None:
                index = self.expressions.view(chosen[0], self.expressions.shape(whole))
                self._chosen[key] = self.expressions.take(index, selection), chosen[1]
        elif key not in self._chosen:
            choices = (self._choice(flag, position, size, index) for index in self._indices(position))
            self._chosen[key] = next(filter(None, choices), None) if size <= LARGEST_DIMENSION else None
        return self._chosen[key]

    def _parts(self, flag: int, position: int) -> tuple[int, Box] | None:
        """The whole mask and the whole indices, where both are the same part."""
        inside, whole = self.expressions.box(flag), self.expressions.box(position)
        if inside is None or whole is None:
            return None
        runs = [flattened(chosen, [int(size or 0) for size in self.expressions.shape(number) or ()])
                for number, chosen in (inside, whole)]  # fmt: skip
        return (inside[0], whole) if runs[0] is not None and runs[0] == runs[1] else None

    def _indices(self, position: int) -> Iterator[int]:
        """The possible expressions of the indices."""
        visited, stack = {position}, [position]
        while stack:
            number = stack.pop()
            if number in self.arrays:
                continue
            if number != position:
                yield number
            for operand in self.expressions.all[number].operands if self._function(number) else ():
                if operand not in visited:
                    visited.add(operand)
                    stack.append(operand)

    def _choice(self, flag: int, position: int, size: int, index: int) -> tuple[int, Runs] | None:
        positions = np.arange(-size, size)
        inside, at = (self._evaluated(number, index, positions) for number in (flag, position))
        if inside is None or at is None or inside.dtype != bool or (inside[:size] != inside[size:]).any():
            return None
        selected = np.flatnonzero(inside[size:])
        counted = np.zeros(size, np.int64)
        counted[selected] = np.arange(selected.size)
        if not selected.size or (at[inside] != np.tile(counted, 2)[inside]).any():
            return None
        ends = np.flatnonzero(np.diff(selected) != 1)
        starts = [int(selected[0]), *(int(at) for at in selected[ends + 1])]
        stops = [*(int(at) + 1 for at in selected[ends]), int(selected[-1]) + 1]
        return index, joined(zip(starts, stops))

    def _function(self, number: int) -> Callable[[list[np.ndarray]], np.ndarray] | None:
        """An elementwise operator on whole numbers and flags."""
        op, attributes, operands, _ = self.expressions.all[number]
        record = operator(op)
        if op == VIEW:
            return lambda values: values[0]
        if op in _JOINED and not any(attributes) and all(self.expressions.elements(row) == 1 for row in operands):  # type: ignore[arg-type]
            return lambda values: np.asarray(_JOINED[op].reduce(values))
        if op == "cast":
            return lambda values: values[0].astype(numpy_dtype(attributes[1]))  # type: ignore[index]
        if not record.elementwise or record.kernel is None or attributes:
            return None
        kernel = record.kernel
        return lambda values: np.asarray(kernel({}, values))

    def _is_alike(self, number: int, index: int) -> bool:
        """Return whether two values are the same part of values in one shape."""
        (op, chosen, operands, _), (other, at, wholes, _) = self.expressions.all[number], self.expressions.all[index]
        if op != TAKE or other != TAKE or chosen != at:
            return False
        return self.expressions.shape(operands[0]) == self.expressions.shape(wholes[0])

    def _evaluated(self, number: int, index: int, positions: np.ndarray) -> np.ndarray | None:
        """The value for each position in place of ``index``."""
        values: dict[int, np.ndarray] = {index: positions}
        stack = [number]
        while stack:
            at = stack[-1]
            if at in values:
                stack.pop()
                continue
            if at in self.arrays:
                if self.arrays[at].size != 1:
                    return None
                values[at] = self.arrays[at].reshape(())
                continue
            function, operands = self._function(at), self.expressions.all[at].operands
            if self._is_alike(at, index):
                part = self._evaluated(operands[0], self.expressions.all[index].operands[0], positions)
                if part is None:
                    return None
                values[at] = part
                continue
            if function is None or not operands:
                return None
            missing = [operand for operand in operands if operand not in values]
            if missing:
                stack += missing
                continue
            try:
                values[at] = function([values[operand] for operand in operands])
            except (GoptError, TypeError, ValueError):
                return None
        result = values[number]
        return result if result.shape == positions.shape else None
