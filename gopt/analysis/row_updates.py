"""Determines how the update of a table changes a row whose gradient is zero.

If the row stays unchanged, updating or skipping rows that no sample looked up gives the same result: SGD without decay,
Adagrad. Momentum moves a row with momentum, Adam's moments decay, weight decay shrinks: here, updating all rows and
updating looked-up rows alone are two algorithms.

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
from gopt.operators.kinds import CASTS, COMBINERS, MEANS, NORM_REDUCTIONS, UNMOVED


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """How the update of a table treats rows.

    ``by_row``: every row is updated from its own content alone, so that any rows can be updated without the others;
    ``by_element``: so is every element. ``why``: why the update is not by element, or not even by row. ``states``:
    states with the table's rows, the table first. ``moved``: states that change under a zero gradient: empty where lazy
    and dense updates are the same. ``operands``: further operands with a row for each row of the table. ``reductions``:
    results of reductions over the whole table or gradient. ``all_rows``: why rows with a gradient cannot be updated
    alone, '' where possible."""

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
        """Whether skipping rows without a gradient makes no difference."""
        return self.by_row and not self.moved


@dataclass(frozen=True, slots=True)
class _RowContent:
    """Known content of a value in a row without a gradient.

    ``number``: this constant; ``state``: the value of this state; or only its sign (positive, non-negative). Nothing is
    known if no field is set.
    """

    number: float | None = None
    state: str = ""
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
    internal = {subgraph.gradient, *(state.tensor for state in aligned)}
    internal.update(name for node in subgraph.nodes for name in node.outputs)
    read = dict.fromkeys(name for node in subgraph.nodes for name in node.reads)
    shapes = {name: values.shape(name) or () for name in read if name not in internal}
    operands = tuple(name for name, dims in shapes.items() if dims[:1] == (rows,) and len(dims) == len(shape or ()))
    by_element = subgraph.mode is UpdateMode.SPLIT
    mixed = mixes_rows(values, subgraph) if subgraph.mode is UpdateMode.WHOLE else subgraph.why
    by_row = by_element or not mixed
    why = "" if by_element else mixed or subgraph.why
    old = {state.tensor: _RowContent(state=state.tensor) for state in aligned}
    results = _RowContents(values, old | {subgraph.gradient: _RowContent(0.0)})
    moved = [state for state in aligned if not by_row or results.of(state.updated).state != state.tensor]
    reductions = tuple(node.outputs[0] for node in subgraph.reductions)
    return RowUpdate(
        by_row, by_element, why, tuple(state.tensor for state in aligned), tuple(state.tensor for state in moved),
        operands, reductions, mixed if not by_row else _over_all(subgraph, results),
    )  # fmt: skip


def _over_all(subgraph: UpdateSubgraph, contents: _RowContents) -> str:
    """Return the reason why a reduction needs all rows ('' without a reason): rows without a gradient do not add
    zero."""
    for node in subgraph.reductions:
        if not node.is_in(_SUMS) or not contents.of(node.inputs[0]).zero:
            return f"{node.op_type} {node.label} is taken over all rows"
    return ""


_SUMS = NORM_REDUCTIONS | MEANS
"""Reductions to which a zero adds nothing."""


class _RowContents:
    """Follows values of the update, each once."""

    def __init__(self, values: RowValues, contents: dict[str, _RowContent]) -> None:
        self.values, self.held = values, contents

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
            missing = [name for name in node.inputs if name and name not in self.held]
            stack.extend(missing)
            if not missing:
                read = [self.held[name] if name else _UNKNOWN for name in node.inputs]
                self.held[top] = self._cast(node, read[0]) if node.is_in(CASTS) else _RULES[node.op_type](node, read)
        return self.held[name]

    def _cast(self, node: Node, content: _RowContent) -> _RowContent:
        """A narrower type rounds unrepresentable numbers, and small numbers to zero."""
        source = content.state or node.inputs[0]  # a state in a wider type still has its own numbers alone
        before, after = (self.values.graph.type_of(name).dtype for name in (source, node.outputs[0]))
        if before == after or after in _WIDER.get(before, ()):
            return content
        if content.number is None or after not in FLOATS:
            return _RowContent(non_negative=content.non_negative and after in FLOATS)
        return _number(float(np.asarray(content.number).astype(numpy_dtype(after))))


Rule = Callable[[Node, list[_RowContent]], _RowContent]


def _number(value: float) -> _RowContent:
    """A number, where every floating type tells the number from zero and infinity."""
    return _RowContent(value) if value == 0 or _TINY < abs(value) < math.inf else _UNKNOWN


def _signs(contents: list[_RowContent]) -> tuple[bool, bool]:
    """Return whether all values are positive, and whether no value is negative."""
    positive = [content.positive or (content.number is not None and content.number > 0) for content in contents]
    lower = [content.non_negative or (content.number is not None and content.number >= 0) for content in contents]
    return all(positive), all(a or b for a, b in zip(positive, lower))


def _kept(node: Node, contents: list[_RowContent]) -> _RowContent:
    return contents[0]


def _sum(node: Node, contents: list[_RowContent]) -> _RowContent:
    rest = [content for content in contents if not content.zero]
    if not rest:
        return _RowContent(0.0)
    if len(rest) == 1:
        return rest[0]
    if all(content.number is not None for content in rest):
        return _number(math.fsum(content.number or 0.0 for content in rest))
    lower = _signs(rest)[1]
    return _RowContent(positive=lower and any(_signs([content])[0] for content in rest), non_negative=lower)


def _difference(node: Node, contents: list[_RowContent]) -> _RowContent:
    minuend, second = contents
    if second.zero:
        return minuend
    if minuend.number is not None and second.number is not None:
        return _number(minuend.number - second.number)
    return _UNKNOWN


def _product(node: Node, contents: list[_RowContent]) -> _RowContent:
    if any(content.zero for content in contents):
        return _RowContent(0.0)
    if any(content.number == 1 for content in contents):
        return next((content for content in contents if content.number != 1), contents[0])
    if node.inputs[0] == node.inputs[1]:
        return _RowContent(non_negative=True)
    numbers = [content.number for content in contents if content.number is not None]
    return _number(math.prod(numbers)) if len(numbers) == 2 else _RowContent(non_negative=_signs(contents)[1])


def _quotient(node: Node, contents: list[_RowContent]) -> _RowContent:
    dividend, second = contents
    if second.number == 1:
        return dividend
    certain = _signs([second])[0] or (second.number is not None and second.number != 0)
    if dividend.zero and certain:
        return _RowContent(0.0)
    return _RowContent(non_negative=_signs([dividend, second])[1] and certain)


def _root(node: Node, contents: list[_RowContent]) -> _RowContent:
    if contents[0].number is not None and contents[0].number >= 0:
        return _number(math.sqrt(contents[0].number))
    return _RowContent(positive=_signs(contents)[0], non_negative=True)


def _power(node: Node, contents: list[_RowContent]) -> _RowContent:
    base, exponent = contents
    if exponent.number == 1:
        return base
    if base.zero:
        return _RowContent(0.0) if _signs([exponent])[0] else _UNKNOWN
    even = exponent.number is not None and exponent.number % 2 == 0
    return _RowContent(non_negative=_signs([base])[1] or even)


def _absolute(node: Node, contents: list[_RowContent]) -> _RowContent:
    if contents[0].number is not None:
        return _number(abs(contents[0].number))
    return contents[0] if _signs(contents)[0] else _RowContent(non_negative=True)


def _negative(node: Node, contents: list[_RowContent]) -> _RowContent:
    return _number(-contents[0].number) if contents[0].number is not None else _UNKNOWN


def _odd(node: Node, contents: list[_RowContent]) -> _RowContent:
    """Zero at zero."""
    return contents[0] if contents[0].zero else _UNKNOWN


def _extreme(node: Node, contents: list[_RowContent]) -> _RowContent:
    if all(content == contents[0] for content in contents):
        return contents[0]
    extreme, join = (max, any) if node.is_in(COMBINERS["max"]) else (min, all)
    if all(content.number is not None for content in contents):
        return _number(extreme(content.number for content in contents if content.number is not None))
    signs = [_signs([content]) for content in contents]
    return _RowContent(positive=join(sign[0] for sign in signs), non_negative=join(sign[1] for sign in signs))


def _clip(node: Node, contents: list[_RowContent]) -> _RowContent:
    value, low, high = ([*contents, _UNKNOWN, _UNKNOWN][slot] for slot in range(3))
    names = [*node.inputs, "", ""]
    above = not names[1] or (low.number is not None and low.number <= 0)
    below = not names[2] or _signs([high])[1]
    return value if value.zero and above and below else _UNKNOWN


def _chosen(node: Node, contents: list[_RowContent]) -> _RowContent:
    return contents[1] if contents[1] == contents[2] else _UNKNOWN


_RULES: dict[str, Rule] = {
    **dict.fromkeys(UNMOVED | {"Expand"}, _kept),
    "Add": _sum, "Sum": _sum, "Sub": _difference, "Mul": _product, "Div": _quotient, "Sqrt": _root, "Pow": _power,
    "Abs": _absolute, "Neg": _negative, "Sign": _odd, "Tanh": _odd, "Max": _extreme, "Min": _extreme,
    "Clip": _clip, "Where": _chosen, "ReduceSum": _odd, "ReduceMean": _odd, "ReduceSumSquare": _odd, "ReduceL1": _odd,
    "ReduceL2": _odd, "ReduceMax": _odd, "ReduceMin": _odd,
}  # fmt: skip
