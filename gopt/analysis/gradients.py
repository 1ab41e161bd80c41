"""Find each parameter's gradient: the value nearest the data through which the whole update depends on the batch.

Of the dominators of an update, the dominator nearest the data is exact: the backward is homogeneous-linear in the
adjoint, so each affine or nonlinear operator behind that dominator belongs to the update, and a mean over ranks passes
through the rest. Of the dominators in proportion to the nearest, the last dominator in the backward is called the
gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property

from gopt import limits
from gopt.analysis.analysis_context import AnalysisContext
from gopt.analysis.dominators import UpdateWalk, walk_update
from gopt.analysis.layout_aliases import KEEP_ORDER
from gopt.analysis.linearity import Linearity, propagate_linearity
from gopt.analysis.partial_losses import is_weighed
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import ancestors, walk
from gopt.ir.node_kinds import elementwise
from gopt.ir.types import FLOATS
from gopt.operators.kinds import LAYOUT, MOVES, SCALES, SUMS


def find_gradient(context: AnalysisContext, parameter: str, updated: str) -> str | None:
    """The gradient upstream of the new value ``updated``, or None for an update without dependence on the batch.

    Raises UnsupportedError where the data flow leaves the choice of the gradient open."""
    walk = walk_update(context, updated)
    _refuse_written(context, parameter, updated)
    if not walk.dominators:
        return None
    choice = _DominatorChoice(context, parameter, walk)
    try:
        return choice.gradient()
    except LayoutError:  # a sum of one sample's adjoint has one element, and looks like a factor of the update
        ends = next(filter(choice.fits, choice.rising), None)
        if ends is None:
            raise
        return _DominatorChoice(context, parameter, walk_update(context, updated, ends)).gradient()


class LayoutError(UnsupportedError):
    """No gradient was found, or a gradient that leaves a value of one rank in the update.

    ``turned``: values that may be gradients where the update turns the layout back; ``nearest``: the value through
    which the whole update depends on the batch, or ''."""

    def __init__(self, message: str, *hints: str, turned: Iterable[str], nearest: str = "") -> None:
        super().__init__(message, *hints)
        self.turned, self.nearest = tuple(turned), nearest


def _refuse_written(context: AnalysisContext, parameter: str, updated: str) -> None:
    """Raise UnsupportedError for a new value that adds the gradient to a value that the forward makes of the parameter
    and of the batch: rows that the forward sets, or rows with a bounded norm. The mean of such values over ranks is not
    the value of the large batch."""
    index = context.index

    def adds(node: Node) -> bool:
        return id(node) not in context.forward and (node.is_in(SUMS) or node.is_in(LAYOUT))

    def following(name: str) -> Sequence[str]:
        return index.operands(name, adds)

    terms = [name for name in walk([updated], following) if not following(name)]
    moving = [name for name in terms if name in context.tainted]
    written = [name for name in moving if id(index.producers.get(name)) in context.forward]
    if not written or len(written) == len(moving):
        return
    output = next((name for name in written if parameter in ancestors(index, [name])[1]), None)
    if output is not None:
        raise UnsupportedError(
            f"the forward writes {parameter!r} anew by the batch: its new value adds {output!r} "
            f"({index.producers[output].op_type}) to its gradient, and each rank has its own",
            f"write {parameter!r} outside of the step, or in a way that follows no batch: gopt has no option that "
            "combines such writes",
        )


class _DominatorChoice:
    """Selects the gradient among the dominators of a walk."""

    def __init__(self, context: AnalysisContext, parameter: str, walk: UpdateWalk) -> None:
        self.context, self.parameter = context, parameter
        self.index, self.types = context.index, context.index.graph.types
        self.nearest = walk.dominators[-1]
        start = self.index.defined_at(self.nearest)
        rising = [(node, position) for node, position in zip(walk.nodes, walk.positions) if position > start][::-1]
        self.nodes = [node for node, _ in rising]
        self.place = {id(node): position for node, position in rising}
        self.rising = walk.dominators[::-1]
        self.held_back = [node for node in self.nodes if id(node) in context.barrier] if context.barrier else []

    @cached_property
    def linearity(self) -> dict[str, Linearity]:
        """The linearity of all values of the walk in the nearest dominator; most choices look at the dominators
        alone."""
        return propagate_linearity(self.index, self.nodes, self.nearest, self.context.tainted)

    def gradient(self) -> str | None:
        stretch = self._stretch()
        bounds = [self.index.defined_at(name) for name in stretch]
        if any(self.place[id(node)] > bounds[-1] for node in self.held_back):
            return None  # the backward would go on behind something that no backward does
        start_index = last_held = 0
        seen_elsewhere = False
        for number, (low, high) in enumerate(itertools.pairwise(bounds), 1):
            part = [node for node in self.nodes if low < self.place[id(node)] <= high]
            blocked = any(id(node) in self.context.barrier for node in part)
            seen_elsewhere = seen_elsewhere or self._read_elsewhere(stretch[number - 1])
            if blocked or (not seen_elsewhere and self._backward(part)):
                start_index, last_held = number, number if blocked else last_held
        chosen = next(filter(self.fits, [*stretch[start_index:], *stretch[last_held:start_index][::-1]]), None)
        if chosen is None:
            layouts = self.index.results(self.nearest, lambda node: node.is_in(KEEP_ORDER))
            raise LayoutError(
                f"no gradient of {self.parameter!r} was found: the nearest value, {self.nearest!r}, has the shape "
                f"{self.types[self.nearest]}, and the parameter is {self.types[self.parameter]}",
                f"give the update a gradient of the parameter's shape, or name it: --params {self.parameter}=VALUE",
                turned=filter(self.fits, layouts),
                nearest=self.nearest,
            )
        self._refuse_open(stretch[-1])
        return chosen

    def fits(self, name: str) -> bool:
        """Return whether a value has the shape of the parameter."""
        return self.index.graph.type_of(name).shape == self.types[self.parameter].shape

    def _stretch(self) -> list[str]:
        """Return the nearest dominator and the dominators in proportion to it.

        The first dominator out of proportion ends the stretch: the next dominator is made of that value."""
        allowed = Linearity.SCALED if self.held_back else Linearity.HOMOGENEOUS
        linearity = propagate_linearity(self.index, self.nodes, self.nearest, self.context.tainted, allowed)
        ends = (linearity.get(name, Linearity.NONLINEAR) > allowed for name in self.rising)
        return self.rising[: next((number for number, end in enumerate(ends) if end), None)]

    def _read_elsewhere(self, name: str, zero: bool = False) -> bool:
        """Return whether a node outside the walk uses the value nonlinearly, such as a gradient norm.

        ``zero``: the value is a product with zero, whose sum is a check of finite numbers; the sum of any other value
        may be the gradient of another parameter."""
        walked = {id(node) for node in self.nodes}
        for node in self.index.users.get(name, ()):
            if id(node) in walked:
                continue
            linearity = propagate_linearity(self.index, [node], name, self.context.tainted)
            outputs = [output for output in node.outputs if output]
            if any(linearity.get(output, Linearity.NONLINEAR) is Linearity.NONLINEAR for output in outputs):
                return True
            if zero and any(map(self.index.one_element, outputs)):
                return True
            scaled = node.is_in(SCALES) and any(map(self.index.constants.zero, node.inputs))
            if scaled and self._read_elsewhere(outputs[0], zero=True):
                return True
        return False

    def _backward(self, nodes: list[Node]) -> bool:
        """Return whether some node mixes elements or reads the model, as a backward does, and no node reads a state.

        Where a way is linear, the mean passes through on either side. Nodes that cannot be cut are left to the
        backward, so that the update can be cut."""
        context = self.context
        if any(name in context.update_only for node in nodes for name in node.reads):
            return False
        return any(self._mixes(node) or any(map(self._of_model, node.reads)) for node in nodes)

    def _mixes(self, node: Node) -> bool:
        """Return whether the node is not elementwise, and so cannot run on a piece of the parameter."""
        if node.is_in(MOVES):
            return False
        return not elementwise(node) or not all(map(self._fits, node.inputs))

    def _fits(self, operand: str) -> bool:
        elements = self.types[self.parameter].elements
        return not operand or self.index.graph.type_of(operand).elements in (1, elements)

    def _of_model(self, name: str) -> bool:
        """Return whether a value belongs to the model: a weight of a later layer, a mask, a scale computed by the
        forward.

        A scalar input does not count: a loss scale is a factor of every gradient.
        """
        context = self.context
        if name not in context.model or name in context.tainted:
            return False
        if self.index.one_element(name):
            return name in context.computed
        return self.index.graph.type_of(name).dtype in (*FLOATS, "bool")

    def _refuse_open(self, last: str) -> None:
        """Raise if the part after ``last`` may still be the backward: a nonlinear part that reads values of the forward
        only.

        1/y² is the gradient of -1/y as well as an update by the inverse of the gradient y². The graph leaves both
        readings open, unless a state or a setting takes part, or the gradient comes from a contraction over an
        adjoint."""
        behind = self.rising[self.rising.index(last) + 1 :]
        end = self.index.defined_at(behind[0]) if behind else len(self.index.graph.nodes)
        start = self.index.defined_at(last)
        part = [node for node in self.nodes if start < self.place[id(node)] <= end]
        update_only, settings = self.context.update_only, self.context.settings
        if not all(update_only.isdisjoint(node.reads) and settings.isdisjoint(node.reads) for node in part):
            return
        if is_weighed(self.context, self.parameter, self.nearest):
            return
        bent = [node for node in part if self.linearity.get(node.outputs[0]) is Linearity.NONLINEAR]
        if (
            not bent
            or any(self._aside(name) for node in part for name in node.reads)
            or not self._of_forward_alone(last)
        ):
            return
        raise UnsupportedError(
            f"{self.nearest!r} may be the gradient of {self.parameter!r}, or a part of its backward: "
            f"{bent[0].op_type} {bent[0].label!r} is not linear in it",
            f"name the gradient: --params {self.parameter}={self.nearest}",
        )

    def _aside(self, name: str) -> bool:
        """Return whether an operand depends on the batch past the walk: a scalar over gradients."""
        return name in self.context.tainted and name not in self.linearity

    def _of_forward_alone(self, value: str) -> bool:
        """Return whether a value is made element by element of values of the forward."""

        def following(name: str) -> Iterable[str]:
            operands = self.index.operands(name, lambda node: id(node) not in self.context.forward)
            return (operand for operand in operands if operand in self.context.tainted)

        for count, name in enumerate(walk({value} & self.context.tainted, following)):
            node = self.index.producers.get(name)
            if node is None or id(node) in self.context.forward:
                continue
            if not (elementwise(node) or node.is_in(LAYOUT)) or count >= limits.UPDATE_VALUES:
                return False
        return True
