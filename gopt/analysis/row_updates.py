"""Determines how the update of a table changes a row whose gradient is zero.

If it changes nothing, updating or skipping rows that no sample looked up gives the same result: SGD without decay,
Adagrad. Momentum moves a row that has momentum, Adam's moments decay, weight decay shrinks: for these, updating all
rows and updating looked-up rows alone are two algorithms.

The result is derived symbolically: each value of the update is followed for a row of zeros. Numbers are assumed finite,
and operands of roots non-negative; otherwise a step yields NaN in either way. Minus zero equals zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gopt.analysis.row_locality import mixes_rows
from gopt.analysis.row_values import RowValues
from gopt.analysis.training import Phase
from gopt.analysis.updates import UpdateMode, UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.operators.kinds import MEANS, NORM_REDUCTIONS


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """How the update of a table treats rows.

    ``by_row``: every row is updated from what it alone holds, so that any rows can be updated without the others;
    ``by_element``: so is every element. ``why`` says why it is not by element, or not even by row. ``states``: those
    that have the table's rows, the table first. ``moved``: those of them that change where the gradient is zero: empty
    where lazy and dense updates are the same. ``operands``: what else it reads that has a row for each row of the
    table. ``reductions``: results of reductions over the whole table or gradient. ``all_rows``: why rows with a
    gradient cannot be updated alone, '' where they can.
    """

    by_row: bool
    by_element: bool
    why: str
    states: tuple[str, ...]
    moved: tuple[str, ...]
    operands: tuple[str, ...]
    reductions: tuple[str, ...]
    all_rows: str

    @property
    def lazy_is_dense(self) -> bool:
        """Whether it makes no difference if rows without a gradient are left alone."""
        return self.by_row and not self.moved


@dataclass(frozen=True, slots=True)
class _RowContent:
    """Known content of a value in a row without a gradient.

    ``number``: this constant; ``same``: the value of this state; or only its sign (positive, non-negative). Nothing is
    known if no field is set.
    """

    number: float | None = None
    same: str = ""
    positive: bool = False
    non_negative: bool = False

    @property
    def zero(self) -> bool:
        return self.number == 0


_UNKNOWN = _RowContent()
_TINY = 1e-30
_WIDER = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",)}
"""Types that hold every number of a type."""


def row_update(values: RowValues, subgraph: UpdateSubgraph) -> RowUpdate:
    """Analyse how a parameter's update treats rows."""
    shape = values.shape(subgraph.parameter.tensor)
    rows = shape[0] if shape else 0
    aligned = [state for state in subgraph.states if (values.shape(state.tensor) or (0,))[0] == rows]
    own = {subgraph.gradient, *(state.tensor for state in aligned)}
    own.update(name for node in subgraph.nodes for name in node.outputs)
    read = dict.fromkeys(name for node in subgraph.nodes for name in node.reads)
    others = {name: values.shape(name) or () for name in read if name not in own}
    operands = tuple(name for name, other in others.items() if other[:1] == (rows,) and len(other) == len(shape or ()))
    by_element = subgraph.mode is UpdateMode.SPLIT
    mixed = mixes_rows(values, subgraph) if subgraph.mode is UpdateMode.WHOLE else subgraph.why
    by_row = by_element or not mixed
    why = "" if by_element else mixed or subgraph.why
    held = {state.tensor: _RowContent(same=state.tensor) for state in aligned} | {subgraph.gradient: _RowContent(0.0)}
    known = _RowContents(values, held)
    moved = [state for state in aligned if not by_row or known.of(state.updated).same != state.tensor]
    reductions = tuple(node.outputs[0] for node in subgraph.reductions)
    return RowUpdate(
        by_row, by_element, why, tuple(state.tensor for state in aligned), tuple(state.tensor for state in moved),
        operands, reductions, mixed if not by_row else _over_all(subgraph, known),
    )  # fmt: skip


def _over_all(subgraph: UpdateSubgraph, known: _RowContents) -> str:
    """Return the reason why a reduction needs all rows ('' if none does): rows without a gradient do not add zero to
    it.
    """
    for node in subgraph.reductions:
        if not node.is_in(_SUMS) or not known.of(node.inputs[0]).zero:
            return f"{node.op_type} {node.label} is taken over all rows"
    return ""


_SUMS = NORM_REDUCTIONS | MEANS
"""Reductions to which a zero adds nothing."""


class _RowContents:
    """Follows values of the update, each once."""

    def __init__(self, values: RowValues, held: dict[str, _RowContent]) -> None:
        self.values, self.held = values, held

    def of(self, name: str) -> _RowContent:
        stack = [name]
        while stack:
            top = stack[-1]
            if top in self.held:
                stack.pop()
                continue
            number, node = self.values.number(top), self.values.index.producers.get(top)
            if number is not None or node is None or node.phase is not Phase.UPDATE or not node.is_in(_RULES):
                self.held[top] = _UNKNOWN if number is None else _number(number)
                continue
            missing = [each for each in node.inputs if each and each not in self.held]
            stack.extend(missing)
            if not missing:
                held = [self.held[each] if each else _UNKNOWN for each in node.inputs]
                self.held[top] = self._cast(node, held[0]) if node.is_a("Cast") else _RULES[node.op_type](node, held)
        return self.held[name]

    def _cast(self, node: Node, held: _RowContent) -> _RowContent:
        """A narrower type rounds what it cannot hold, and small numbers to zero."""
        source = held.same or node.inputs[0]  # a state in a wider type still has its own numbers alone
        before, after = (self.values.graph.type_of(name).dtype for name in (source, node.outputs[0]))
        if before == after or after in _WIDER.get(before, ()):
            return held
        if held.number is None or after not in FLOATS:
            return _RowContent(non_negative=held.non_negative and after in FLOATS)
        return _number(float(np.asarray(held.number).astype(numpy_dtype(after))))


Rule = Callable[[Node, list[_RowContent]], _RowContent]


def _number(value: float) -> _RowContent:
    """A number, where every floating type tells it from zero and infinity."""
    return _RowContent(value) if value == 0 or _TINY < abs(value) < math.inf else _UNKNOWN


def _signs(held: list[_RowContent]) -> tuple[bool, bool]:
    """Return whether all values are positive, and whether none is negative."""
    positive = [each.positive or (each.number is not None and each.number > 0) for each in held]
    lower = [each.non_negative or (each.number is not None and each.number >= 0) for each in held]
    return all(positive), all(a or b for a, b in zip(positive, lower))


def _kept(node: Node, held: list[_RowContent]) -> _RowContent:
    return held[0]


def _sum(node: Node, held: list[_RowContent]) -> _RowContent:
    rest = [each for each in held if not each.zero]
    if not rest:
        return _RowContent(0.0)
    if len(rest) == 1:
        return rest[0]
    if all(each.number is not None for each in rest):
        return _number(math.fsum(each.number or 0.0 for each in rest))
    lower = _signs(rest)[1]
    return _RowContent(positive=lower and any(_signs([each])[0] for each in rest), non_negative=lower)


def _difference(node: Node, held: list[_RowContent]) -> _RowContent:
    first, second = held
    if second.zero:
        return first
    if first.number is not None and second.number is not None:
        return _number(first.number - second.number)
    return _UNKNOWN


def _product(node: Node, held: list[_RowContent]) -> _RowContent:
    if any(each.zero for each in held):
        return _RowContent(0.0)
    if any(each.number == 1 for each in held):
        return next((each for each in held if each.number != 1), held[0])
    if node.inputs[0] == node.inputs[1]:
        return _RowContent(non_negative=True)
    numbers = [each.number for each in held if each.number is not None]
    return _number(math.prod(numbers)) if len(numbers) == 2 else _RowContent(non_negative=_signs(held)[1])


def _quotient(node: Node, held: list[_RowContent]) -> _RowContent:
    first, second = held
    if second.number == 1:
        return first
    certain = _signs([second])[0] or (second.number is not None and second.number != 0)
    if first.zero and certain:
        return _RowContent(0.0)
    return _RowContent(non_negative=_signs([first, second])[1] and certain)


def _root(node: Node, held: list[_RowContent]) -> _RowContent:
    if held[0].number is not None and held[0].number >= 0:
        return _number(math.sqrt(held[0].number))
    return _RowContent(positive=_signs(held)[0], non_negative=True)


def _power(node: Node, held: list[_RowContent]) -> _RowContent:
    base, exponent = held
    if exponent.number == 1:
        return base
    if base.zero:
        return _RowContent(0.0) if _signs([exponent])[0] else _UNKNOWN
    even = exponent.number is not None and exponent.number % 2 == 0
    return _RowContent(non_negative=_signs([base])[1] or even)


def _absolute(node: Node, held: list[_RowContent]) -> _RowContent:
    if held[0].number is not None:
        return _number(abs(held[0].number))
    return held[0] if _signs(held)[0] else _RowContent(non_negative=True)


def _negative(node: Node, held: list[_RowContent]) -> _RowContent:
    return _number(-held[0].number) if held[0].number is not None else _UNKNOWN


def _odd(node: Node, held: list[_RowContent]) -> _RowContent:
    """Zero at zero."""
    return held[0] if held[0].zero else _UNKNOWN


def _extreme(node: Node, held: list[_RowContent]) -> _RowContent:
    if all(each == held[0] for each in held):
        return held[0]
    if all(each.number is not None for each in held):
        numbers = [each.number for each in held if each.number is not None]
        return _number(max(numbers) if node.op_type == "Max" else min(numbers))
    signs = [_signs([each]) for each in held]
    join = any if node.op_type == "Max" else all
    return _RowContent(positive=join(sign[0] for sign in signs), non_negative=join(sign[1] for sign in signs))


def _clip(node: Node, held: list[_RowContent]) -> _RowContent:
    value, low, high = ([*held, _UNKNOWN, _UNKNOWN][slot] for slot in range(3))
    names = [*node.inputs, "", ""]
    above = not names[1] or (low.number is not None and low.number <= 0)
    below = not names[2] or _signs([high])[1]
    return value if value.zero and above and below else _UNKNOWN


def _chosen(node: Node, held: list[_RowContent]) -> _RowContent:
    return held[1] if held[1] == held[2] else _UNKNOWN


_RULES: dict[str, Rule] = {
    "Identity": _kept, "Cast": _kept, "Reshape": _kept, "Squeeze": _kept, "Unsqueeze": _kept, "Flatten": _kept,
    "Expand": _kept, "Add": _sum, "Sum": _sum, "Sub": _difference, "Mul": _product, "Div": _quotient, "Sqrt": _root,
    "Pow": _power, "Abs": _absolute, "Neg": _negative, "Sign": _odd, "Tanh": _odd, "Max": _extreme, "Min": _extreme,
    "Clip": _clip, "Where": _chosen, "ReduceSum": _odd, "ReduceMean": _odd, "ReduceSumSquare": _odd, "ReduceL1": _odd,
    "ReduceL2": _odd, "ReduceMax": _odd, "ReduceMin": _odd,
}  # fmt: skip
