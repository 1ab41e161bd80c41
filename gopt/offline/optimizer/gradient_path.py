"""The path from a gradient to the input of the rule: casts, unscaling, accumulation, clips and a change of sign."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gopt.analysis.isomorphism import signature
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import in_proportion, reads_value, record_of
from gopt.ir.types import FLOATS
from gopt.offline.optimizer.probe import Array, Probe, Scalars, UpdateFunction
from gopt.operators.kinds import ALL_REDUCTIONS, CARRIES, EXTREMES

_MOST = 16
"""Nodes that one step of the way may have: a ``Where`` around a clip has four."""
_SAMPLE: Array = np.concatenate([sign * np.geomspace(1e-6, 1e6, 25) for sign in (-1.0, 1.0)])


@dataclass(slots=True)
class GradientPath:
    """Operations on a gradient before the rule begins at ``end``.

    ``flipped``: the rule goes up the gradient, or the backward leaves out a sign. ``low``, ``high``: the bounds of each
    element. ``factors``: one-element values that multiply the gradient, or choose its replacement, and depend on
    gradients."""

    start: str
    end: str
    flipped: bool = False
    low: float | None = None
    high: float | None = None
    factors: list[str] = field(default_factory=list)
    averaged: bool = False
    """Gradients are summed on the way: a constant that follows divides by their number."""


class GradientPaths:
    """The paths from the gradients of one step to the rules."""

    def __init__(self, training: TrainingGraph, probe: Probe, runs: Sequence[Scalars]) -> None:
        self.training, self.probe, self.runs = training, probe, runs
        self._accumulators = {s.tensor for s in training.states if s.kind is StateKind.ACCUMULATOR}
        self._carries = self._carriers()
        self._in_backward = {
            name for node in training.graph.nodes if node.phase is not Phase.UPDATE
            for name in node.reads if name in probe.inputs
        }  # fmt: skip
        self.unscaled: dict[str, None] = {}
        """Scalar inputs that gradients were found to be divided by: loss scales."""
        self._found: dict[str, GradientPath] = {}
        self._of_node: dict[Hashable, Array | None] = {}
        """Values of the nodes that were met: many gradients are multiplied by the same factor."""

    @cached_property
    def _normed(self) -> list[Scalars]:
        """The small values where gradients have norms."""
        return [Scalars(self.probe, {}, norm) for norm in (0.5, 1e10)]

    def path(self, parameter: str) -> GradientPath:
        """The path of one parameter's gradient."""
        if parameter not in self._found:
            start = self.training.gradients[parameter]
            path = self._found[parameter] = GradientPath(start, start)
            while (following := self._next(path.end)) is not None:
                name, nodes = following
                names = {path.end, *(x for node in nodes for x in node.outputs)}
                beside = [x for node in nodes for x in node.reads if x not in names]
                factors = [x for x in beside if x in self.probe.owners.reduced and self.probe.single(x)]
                if not self._passes(parameter, path, name, nodes, beside, bool(factors)):
                    break
                path.factors += factors
                path.end = name
        return self._found[parameter]

    def _passes(
        self, parameter: str, path: GradientPath, name: str, nodes: Sequence[Node], beside: Sequence[str], reduced: bool
    ) -> bool:
        """Return whether the next value ``name`` is the gradient: unchanged, negated, clipped, or times a factor
        outside the rule. ``beside``: operands of the nodes; ``reduced``: some were reduced from gradients."""
        if len(nodes) == 1 and nodes[0].is_in(CARRIES):
            return True
        summed = [x for x in beside if x in self._accumulators]
        values = self._values(path.end, name, nodes, beside, summed, reduced)
        if values is None:
            return len(nodes) == 1 and in_proportion(nodes[0], path.end) and all(map(self._of_the_chain, beside))
        with np.errstate(invalid="ignore"):  # a factor may be infinite in a trial
            linear = np.allclose(values, values[:, -1:] / _SAMPLE[-1] * _SAMPLE, 1e-12, 0)
            values = values[: len(self.runs)]
            factors = values[:, -1] / _SAMPLE[-1]
            constant = bool((np.abs(factors - factors[0]) <= 1e-6 * np.abs(factors)).all())
        if linear and factors[0]:
            path.averaged |= bool(summed)
            if constant and np.abs(np.abs(factors[0]) - 1) <= 1e-6:
                if factors[0] < 0:
                    path.flipped = not path.flipped
                    path.low, path.high = (None if x is None else -x for x in (path.high, path.low))
                return True
            if constant:
                scaled = factors[0] > 0 and not reduced
                return bool(scaled) and (path.averaged or self._read_by_rule(parameter, name))
            behind = frozenset().union(*map(self.probe.inputs_behind, beside))
            if behind <= self._in_backward:
                self.unscaled.update(dict.fromkeys(sorted(behind)))
            return behind <= self._in_backward
        low, high = float(values.min()), float(values.max())
        clipped = low <= 0 <= high and low < high and not summed and not reduced
        if not clipped or not (values == np.clip(_SAMPLE, low, high)).all():
            return False
        path.low = low if low > _SAMPLE.min() else path.low
        path.high = high if high < _SAMPLE.max() else path.high
        return True

    def _values(
        self, start: str, name: str, nodes: Sequence[Node], beside: Sequence[str], summed: Sequence[str], reduced: bool
    ) -> Array | None:
        """The value ``name`` in every trial where the gradient ``start`` is the sample, and sums of gradients are 0."""
        key = None if len(nodes) > 1 else (signature(nodes[0]), *("" if x == start else x for x in nodes[0].inputs))
        if key is None or key not in self._of_node:
            update_fn, samples = UpdateFunction(self.probe, [start, *summed], [name], beside), list[Array]()
            for scalars in (*self.runs, *(self._normed if reduced else ())):
                results = update_fn(scalars, {start: _SAMPLE} | dict.fromkeys(summed, np.zeros_like(_SAMPLE)))
                if results is None:
                    break
                samples += results
            self._of_node[key] = None if results is None else np.array(samples)
        return self._of_node[key]

    def _of_the_chain(self, name: str) -> bool:
        """Return whether a factor comes from the forward or the backward: the last of the chain rule, as exp(w) of a
        parameter used as exp(w)."""
        graph, probe = self.training.graph, self.probe
        return name not in probe.producers and not probe.is_constant(name) and name not in graph.inputs

    def _read_by_rule(self, parameter: str, name: str) -> bool:
        """Return whether a scaled gradient is used more than once, clipped, or added to weight decay.

        The constant is then a scale of the loss (the backward of a mean), not a factor of the rule such as
        dampening."""
        readers = [n for n in self.probe.index.users.get(name, ()) if any(x in self._carries for x in n.outputs)]
        if len(readers) != 1:
            return len(readers) > 1
        reader, producers = readers[0], self.probe.producers
        operands = [x for x in reader.reads if x != name]
        if reader.is_in(EXTREMES | {"Clip"}):
            return all(map(self.probe.is_constant, operands))
        made = [producers[x] for x in operands if x in producers]
        return record_of(reader).adds and any(record_of(n).multiplies and parameter in n.inputs for n in made)

    def _onward(self, name: str) -> list[Node]:
        """The nodes of the update that read a value and carry it on."""
        users = self.probe.index.users.get(name, ())
        readers = (n for n in users if reads_value(n, name) and any(x in self._carries for x in n.outputs))
        return [n for n in readers if self.probe.producers.get(n.outputs[0]) is n and not self._reduces(n)]

    def _reduces(self, node: Node) -> bool:
        """Return whether a node reduces full-shaped values to one element."""
        single = self.probe.single
        if not all(map(single, filter(None, node.outputs))):
            return False
        return node.is_in(ALL_REDUCTIONS) or not all(map(single, node.reads))

    def _next(self, name: str) -> tuple[str, list[Node]] | None:
        """The next value on every way from ``name``, with the nodes up to there."""
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
                waiting.update({position[id(node)]: node for node in self._onward(output)})
        return None

    def _carriers(self) -> set[str]:
        """Floating full-shaped values that reach a new parameter or optimizer state, reductions aside."""
        training = self.training
        targets = {s.updated for s in training.states if s.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE)}
        for node in reversed(training.graph.nodes):
            carries = node.phase is Phase.UPDATE and any(name in targets for name in node.outputs)
            if carries and not self._reduces(node):
                targets.update(name for name in node.inputs if training.graph.type_of(name).dtype in FLOATS)
        return targets
