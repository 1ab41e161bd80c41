"""Ids whose rows a mask makes zero: the padding of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from gopt.analysis.layout_aliases import keeps_order
from gopt.analysis.row_values import RowValues
from gopt.ir.constant_folding import as_folded
from gopt.ir.graph import Node
from gopt.ir.node_kinds import chosen_by, record_of
from gopt.operators.kinds import CASTS, COMPARISONS, LOGIC, MASKS, UNMOVED, VIEWS


def masked_ids(values: RowValues, ids: str, rows: str, count: int, numbers: frozenset[int]) -> tuple[int, ...]:
    """The ids, in ascending order, whose rows in ``rows`` are all zero for any content before the mask.

    ``ids`` and ``rows`` belong to a term of the gradient of a table of ``count`` rows, ``numbers``, value numbers, to
    the ids looked up in the table."""
    shape = values.shape(ids)
    if shape is None:
        return ()
    padding: set[int] = set()
    while True:
        node = values.producer(rows)
        if node is None:
            break
        if node.is_in(UNMOVED) or keeps_order(values.graph, node):
            rows = node.inputs[0]
        elif node.is_in(MASKS):
            mask = _mask(values, node)
            if mask is None:
                break
            if _leads(values, mask.flag, node.outputs[0], math.prod(shape)):
                padding |= _Condition(values, ids, count, numbers).ids(mask.flag, mask.zero_where)
            if values.shape(mask.value) != values.shape(node.outputs[0]):
                break  # rows are repeated, and no longer one for each id
            rows = mask.value
        else:
            break
    return tuple(sorted(padding))


@dataclass(frozen=True, slots=True)
class _Mask:
    """``value`` with zeros where ``flag`` is ``zero_where``."""

    flag: str
    value: str
    zero_where: bool


def _mask(values: RowValues, node: Node) -> _Mask | None:
    if chosen_by(node):
        flag, chosen, second = node.inputs
        if values.zero(chosen):
            return _Mask(flag, second, True)
        return _Mask(flag, chosen, False) if values.zero(second) else None
    for factor, value in (node.inputs, node.inputs[::-1]):
        cast = values.producer(factor)
        if cast is not None and cast.is_in(CASTS) and values.graph.type_of(cast.inputs[0]).dtype == "bool":
            return _Mask(cast.inputs[0], value, False)
    return None


def _leads(values: RowValues, flag: str, rows: str, ids: int) -> bool:
    """Return whether a flag has one element for each id, and masks whole rows in order."""
    mask, shape = values.shape(flag), values.shape(rows)
    if mask is None or shape is None or len(mask) > len(shape):
        return False
    mask = (1,) * (len(shape) - len(mask)) + mask
    lead = next((axes for axes in range(len(shape) + 1) if math.prod(shape[:axes]) == ids), None)
    while lead is not None and mask[:lead] != shape[:lead] and lead < len(shape) and shape[lead] == 1:
        lead += 1
    return lead is not None and mask[:lead] == shape[:lead] and all(size == 1 for size in mask[lead:])


@dataclass(slots=True)
class _Condition:
    """Evaluates a flag for ids of given values, as far as comparisons of the ids determine it."""

    values: RowValues
    source: str
    rows: int
    numbers: frozenset[int]

    def ids(self, flag: str, wanted: bool) -> set[int]:
        """The ids of the flag's comparisons for which the flag is ``wanted``."""
        return {id for id in self._compared(flag) if self._at(flag, id) is wanted}

    def _node(self, name: str) -> Node | None:
        """Return the producer of a flag, looking through nodes that keep elements and order."""
        while True:
            node = self.values.producer(name)
            if node is None or not (node.is_in(VIEWS) or keeps_order(self.values.graph, node)):
                return node
            name = node.inputs[0]

    def _compared(self, flag: str) -> set[int]:
        ids: set[int] = set()
        stack = [flag]
        while stack:
            node = self._node(stack.pop())
            if node is None:
                continue
            if record_of(node).relation == "==":
                sides = [(sign, number) for sign in (-1, 0) for _, number in self._sides(node, sign)]
                ids |= {int(number) for sign, number in sides if (number < 0) == (sign < 0)}
            elif node.is_in(LOGIC):
                stack.extend(node.inputs)
        return ids

    def _sides(self, node: Node, id: int) -> list[tuple[bool, float]]:
        """Return (ids are the left operand, compared number) for each operand equal to the ids; [] without such a
        comparison.

        A negative id is compared unchanged: a wrapped or bounded id may have become another."""
        sides = []
        for on_left, (ids, operand) in ((True, node.inputs), (False, node.inputs[::-1])):
            number = self.values.number(operand)
            source = self.values.plain(ids) if id < 0 else self.values.in_order(ids, self.rows, self.numbers)
            if number is not None and source == self.source:
                sides.append((on_left, number))
        return sides

    def _at(self, flag: str, id: int) -> bool | None:
        node = self._node(flag)
        if node is None:
            return None
        if node.is_in(LOGIC):
            flags = [self._at(name, id) for name in node.inputs]
            cases = product(*((False, True) if flag is None else (flag,) for flag in flags))
            results = {bool(as_folded(node, list(map(np.array, case)))) for case in cases}
            return results.pop() if len(results) == 1 else None
        if node.is_in(COMPARISONS):
            for on_left, number in self._sides(node, id):
                return bool(as_folded(node, [np.array(id), np.array(number)][:: 1 if on_left else -1]))
        return None
