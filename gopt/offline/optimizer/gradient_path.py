"""The path from a gradient to the input of the rule: casts, unscaling, accumulation, clips and a change of sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.types import FLOATS
from gopt.offline.optimizer.formulas import close
from gopt.offline.optimizer.probe import Array, Probe, Scalars, UpdateFunction
from gopt.operators.kinds import MOVES

_LAYOUT = MOVES | {"Cast"}
_MOST = 16
"""Nodes that one step of the way may have: a ``Where`` around a clip has four."""
_SAMPLE: Array = np.concatenate([sign * np.geomspace(1e-6, 1e6, 25) for sign in (-1.0, 1.0)])


@dataclass(slots=True)
class GradientPath:
    """Operations on a gradient before the rule begins at ``end``."""

    start: str
    end: str
    flipped: bool = False
    """The rule goes up the gradient that it was given, or the backward leaves out a sign."""
    low: float | None = None
    high: float | None = None
    """The bounds of each element."""
    factors: list[str] = field(default_factory=list)
    """One-element values that multiply it, or choose what it becomes, and depend on gradients."""


class GradientPaths:
    """The paths from the gradients of one step to its rules."""

    def __init__(self, training: TrainingGraph, probe: Probe, runs: Sequence[Scalars]) -> None:
        self.training, self.probe, self.runs = training, probe, runs
        self._accumulators = {s.tensor for s in training.states if s.kind is StateKind.ACCUMULATOR}
        self._carries = self._carriers()
        self._readers = training.graph.users()
        self._in_backward = {
            name for node in training.graph.nodes if node.phase is not Phase.UPDATE
            for name in node.reads if name in probe.inputs
        }  # fmt: skip
        self.unscaled: dict[str, None] = {}
        """Scalar inputs that gradients were found to be divided by: loss scales."""
        self._found: dict[str, GradientPath] = {}

    def path(self, parameter: str) -> GradientPath:
        """The path of one parameter's gradient."""
        if parameter not in self._found:
            self._found[parameter] = self._walk(parameter)
        return self._found[parameter]

    def _walk(self, parameter: str) -> GradientPath:
        start = self.training.gradients[parameter]
        path, averaging = GradientPath(start, start), False
        while True:
            onward = self._onward(path.end)
            node = onward[0] if len(onward) == 1 else None
            if node is not None and self._accumulates(node, path.end):
                path.end, averaging = node.outputs[0], True
            elif node is not None and node.is_a(*_LAYOUT) and node.inputs[0] == path.end:
                path.end = node.outputs[0]
            elif not (node is not None and self._scaled(parameter, node, path, averaging)) and not self._tried(path):
                return path

    def _onward(self, name: str) -> list[Node]:
        found = [n for n in self._readers.get(name, ()) if any(x in self._carries for x in n.outputs)]
        return [n for n in found if self.probe.producers.get(n.outputs[0]) is n]

    def _accumulates(self, node: Node, name: str) -> bool:
        others = [x for x in node.inputs if x != name]
        return node.is_a("Add") and len(others) == 1 and others[0] in self._accumulators

    def _scaled(self, parameter: str, node: Node, path: GradientPath, averaging: bool) -> bool:
        """Skip a node that multiplies the gradient by a scalar that is not part of the rule."""
        name = path.end
        over = node.is_a("Div") and node.inputs[0] == name
        others = [x for x in node.inputs if x != name]
        if not (over or node.is_a("Mul")) or len(others) != 1:
            return False
        scalar = others[0]
        averaging = averaging or self._read_by_rule(parameter, node.outputs[0])
        if not self._derives(scalar) and not self._scales(scalar, averaging):
            return False
        if scalar in self.probe.owners.reduced:
            path.factors.append(scalar)
        path.end = node.outputs[0]
        return True

    def _derives(self, name: str) -> bool:
        """Return whether a factor was made by the forward or the backward: the last of the chain rule, as exp(w) of a
        parameter that is used as exp(w)."""
        graph, probe = self.training.graph, self.probe
        return not (
            name in probe.producers or probe.is_constant(name) or name in graph.inputs or name in graph.initializers
        )

    def _read_by_rule(self, parameter: str, name: str) -> bool:
        """Return whether a scaled gradient is used more than once, clipped, or added to weight decay.

        Then its constant is a scale of the loss (the backward of a mean), not a factor of the rule such as dampening.
        """
        onward = [n for n in self._readers.get(name, ()) if any(x in self._carries for x in n.outputs)]
        if len(onward) != 1:
            return len(onward) > 1
        reader = onward[0]
        if reader.is_a("Clip", "Min", "Max") and all(x == name or self.probe.is_constant(x) for x in reader.reads):
            return True
        producers = [self.probe.producers.get(x) for x in reader.inputs if x != name]
        return reader.is_a("Add") and any(m is not None and m.is_a("Mul") and parameter in m.inputs for m in producers)

    def _scales(self, scalar: str, averaging: bool) -> bool:
        """Return whether a scalar undoes the loss scale, clips, or averages what was accumulated: no learning rate."""
        if not self.probe.single(scalar) or scalar in self.probe.owners.full:
            return False
        if self.probe.is_constant(scalar):
            return averaging and (self.runs[0].number(scalar) or 0.0) > 0
        if scalar in self.probe.owners.reduced:
            return all(close(each.number(scalar), 1.0) for each in self.runs)
        behind = self.probe.inputs_behind(scalar)
        if not behind or not behind <= self._in_backward:
            return False
        self.unscaled.update(dict.fromkeys(sorted(behind)))
        return True

    def _tried(self, path: GradientPath) -> bool:
        """Advance to the next dominating value if that is the gradient: unchanged, negated or clipped."""
        found = self._next(path.end)
        if found is None:
            return False
        name, nodes = found
        update_fn, made = UpdateFunction(self.probe, [path.end], [name], self.probe.owners.reduced), []
        for scalars in self.runs:
            result = update_fn(scalars, {path.end: _SAMPLE})
            if result is None:
                return False
            made.append(result[0])
        if any(not np.array_equal(each, made[0]) for each in made):
            return False
        value = made[0]
        low, high = float(value.min()), float(value.max())
        if np.array_equal(value, -_SAMPLE):
            path.flipped = not path.flipped
            path.low, path.high = (None if x is None else -x for x in (path.high, path.low))
        elif not np.array_equal(value, _SAMPLE):
            if not low <= 0 <= high or low == high or not np.array_equal(value, np.clip(_SAMPLE, low, high)):
                return False
            path.low = low if low > _SAMPLE.min() else path.low
            path.high = high if high < _SAMPLE.max() else path.high
        elif not update_fn.nodes:
            return False
        reduced = self.probe.owners.reduced
        path.factors += [x for node in nodes for x in node.reads if x in reduced and self.probe.single(x)]
        path.end = name
        return True

    def _next(self, name: str) -> tuple[str, list[Node]] | None:
        """The next value that everything behind ``name`` comes from, with the nodes up to it."""
        position = self.probe.index.position
        reached, nodes = {name}, list[Node]()
        waiting = {position[id(node)]: node for node in self._onward(name)}
        while waiting and len(nodes) < _MOST:
            node = waiting.pop(min(waiting))
            nodes.append(node)
            outputs = [x for x in node.outputs if x in self._carries]
            if not waiting and len(outputs) == 1 and all(x == name or x not in reached for x in outputs):
                return outputs[0], nodes
            reached.update(outputs)
            for output in outputs:
                waiting.update({position[id(each)]: each for each in self._onward(output)})
        return None

    def _carriers(self) -> set[str]:
        """Floating full-shaped values that reach a new parameter or optimizer state, reductions aside."""
        training, probe = self.training, self.probe
        targets = {s.updated for s in training.states if s.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE)}
        for node in reversed(training.graph.nodes):
            one = all(probe.single(name) for name in node.outputs if name)
            if one and not all(probe.single(name) for name in node.reads):
                continue
            if node.phase is Phase.UPDATE and any(name in targets for name in node.outputs):
                targets.update(name for name in node.inputs if training.graph.type_of(name).dtype in FLOATS)
        return targets
