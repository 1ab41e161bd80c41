"""Runs parts of a step's update on chosen numbers: small values, and the subgraphs one at a time.

Everything runs in float64 by the kernels of ``gopt.operators``, with casts between floats, so that a formula either
agrees to the last digits or does not agree. An operator without a kernel yields None, and so does everything behind."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gopt import limits
from gopt.analysis.ownership import Ownership
from gopt.analysis.training import Phase, State, TrainingGraph
from gopt.ir.constant_folding import as_folded
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, copy_chain, walk
from gopt.ir.node_kinds import chosen_by, control_flow, draws, record_of
from gopt.ir.types import FLOATS, TensorType
from gopt.operators.kinds import CASTS, MOVES, SPREADS, TYPED
from gopt.operators.table import UNKNOWN

Array = np.ndarray[Any, Any]
Values = dict[str, Array | None]
_STEPS = (1, 13, 24, 5000, 10**6)
"""Steps to try: warm-ups, rectifications and corrections of bias show at the first, decays of the rate at the last."""
_MOST_ELEMENTS = 64
"""Elements of a constant that is read; a larger one is read where it repeats a single value."""


@np.errstate(all="ignore")
def compute(node: Node, operands: Sequence[Any], type: TensorType, *, flat: bool) -> Array | None:
    """The first output of a node in float64, None where an operand or a kernel is missing; ``flat``: full-shaped
    operands are vectors and one-element operands have no shape."""
    record, x = record_of(node), operands[0] if operands else None
    if record is UNKNOWN or any(value is None for value, name in zip(operands, node.inputs) if name):
        return None
    if node.is_in(CASTS) and x is not None:
        return np.asarray(x, np.float64 if type.dtype in FLOATS else bool if type.dtype == "bool" else np.int64)
    if flat and not record.elementwise and x is not None:  # a vector represents a full-shaped value in any layout
        if record.pieces is not None and record.kernel is not None and type.static and type.elements == 1:
            return np.asarray(record.kernel({"keepdims": 0}, [x]))
        moves = node.is_in(MOVES) or (node.is_in(SPREADS) and x.size == 1)
        return np.asarray(x) if moves and type.static else None
    elements = type.elements if type.static else math.prod(value.size for value in operands if value is not None)
    return None if not flat and elements > limits.FOLDED_ELEMENTS else as_folded(node, operands)


class Scalars:
    """The small values of the update for one choice of the scalar inputs.

    A full-shaped value reduces to ``reduced`` (0: no norm, nothing infinite), times a factor between 1 and 2 that
    differs between values; inputs outside ``inputs`` get a fixed number between 0.2 and 0.8, a different number each.
    ``pinned``: values of conditions, not computed."""

    def __init__(
        self, probe: Probe, inputs: Mapping[str, float], reduced: float = 0.0, pinned: Mapping[str, bool] = {}
    ) -> None:  # fmt: skip
        self._probe, leaves = probe, 0
        self.values: Values = {
            name: probe.typed(name, inputs.get(name, 0.2 + 0.6 * ((index + 1) * 0.6180339887498949 % 1.0)))
            for index, name in enumerate(probe.inputs)
        }
        for node, reduces in probe.small:
            leaves, output = leaves + reduces, node.outputs[0]
            if not reduces:
                operands = [self.get(name) for name in node.inputs]
                self.values[output] = compute(node, operands, probe.graph.type_of(output), flat=False)
            for name in node.outputs if reduces else ():
                if probe.graph.type_of(name).elements <= limits.FOLDED_ELEMENTS:
                    self.values[name] = probe.typed(name, reduced * (1 + leaves % 4 / 4))
            self.values.update((name, np.asarray(pinned[name])) for name in node.outputs if name in pinned)

    def get(self, name: str) -> Array | None:
        """A small value or a constant; None for any other value, and where the computation failed."""
        return self.values[name] if name in self.values else self._probe.constant(name)

    def number(self, name: str) -> float:
        """A one-element value; NaN for any other value, and where the computation failed."""
        value = self.get(name)
        return float("nan") if value is None or value.size != 1 else float(value.reshape(()))


class Probe:
    """The small values of a step's update, and the nodes before them."""

    def __init__(self, training: TrainingGraph) -> None:
        self.graph = graph = training.graph
        self.index = GraphIndex(graph)
        self._constants: Values = {}
        states = training.states
        wide = {gradient: parameter for parameter, gradient in training.gradients.items()}
        shaped = {s.tensor for s in training.parameters} | {s.tensor for s in states if not self.single(s.tensor)}
        wide |= {state.tensor: state.of or state.tensor for state in states if state.tensor in shaped}
        self.owners = Ownership(graph, wide)
        self.hyper = set(training.hyper)
        self.updated = {state.tensor: state.updated for state in states}
        inputs = (*training.hyper, *self.updated)
        self.inputs = [name for name in inputs if name not in wide and self.single(name)]
        self.small: list[tuple[Node, bool]] = []
        """Nodes with small values, in order, and whether they reduce full-shaped ones."""
        self.producers: dict[str, Node] = {}
        self._behind = {name: frozenset([name]) for name in self.inputs}
        full, computable = self.owners.full, {*self.inputs, ""}
        for node in graph.nodes:
            update, by_type = node.phase is Phase.UPDATE, node.is_in(TYPED)  # operand 1 is read for its type alone
            owned = update and not by_type and bool(self.owners.note(node))
            wide_result = owned and any(name in full for name in node.outputs)
            computed = all(name in computable or self.is_constant(name) for name in node.reads) and bool(node.reads)
            small = (update or computed) and not (
                wide_result or control_flow(node) or self.is_constant(node.outputs[0])
            )
            if small or update:
                self.producers.update(dict.fromkeys(node.outputs, node))
            if small:
                computable.update(node.outputs)
                self.small.append((node, not by_type and any(name in full for name in node.reads)))
                sets = {self._behind[name] for name in node.reads if name in self._behind}
                if sets:
                    union = sets.pop() if len(sets) == 1 else frozenset().union(*sets)
                    self._behind.update(dict.fromkeys(node.outputs, union))
        self.counters = self._counters()
        """Scalar inputs that count steps."""

    def _counters(self) -> tuple[str, ...]:
        """Return states that grow by one, and the exponents of constants, as in 1 - beta^t."""
        scalars, counters = self.scalars(1), dict[str, None]()
        for state, updated in self.updated.items():
            if state in self._behind and abs(scalars.number(updated) - scalars.number(state) - 1) < 1e-9:
                counters[state] = None
        for node, _ in self.small:
            if record_of(node).raised_to and self.constant(node.inputs[0]) is not None:
                counters.update(dict.fromkeys(sorted(self.inputs_behind(node.inputs[1]))))
        return tuple(counters)

    def runs(self) -> list[Scalars]:
        """The small values for several choices of the scalar inputs: at first steps, and at late steps."""
        return [
            self.scalars(seed, {name: float(step + (i % 7 if step > 1 else 0)) for i, name in enumerate(self.counters)})
            for seed, step in enumerate(_STEPS)
        ]

    def scalars(
        self, seed: int, inputs: Mapping[str, float] = {}, reduced: float = 0.0, pinned: Mapping[str, bool] = {}
    ) -> Scalars:  # fmt: skip
        """The small values for the scalar inputs of a seed, between 0.2 and 0.8, beside these ``inputs``."""
        rng = np.random.default_rng(seed)
        drawn = {name: float(rng.uniform(0.2, 0.8)) for name in self.inputs}
        return Scalars(self, drawn | dict(inputs), reduced, pinned)

    def constant(self, name: str) -> Array | None:
        """A constant of few elements, or a constant that repeats a single value (as this value)."""
        if name not in self._constants:
            value = self.index.constants.value(name) if self.is_constant(name) else None
            if value is not None and value.size > _MOST_ELEMENTS:
                value = value.reshape(-1)[0] if (value == value.flat[0]).all() else None
            plain = value is None or value.dtype.kind in "biu"
            self._constants[name] = value if plain else np.asarray(value, np.float64)
        return self._constants[name]

    def is_constant(self, name: str) -> bool:
        """Return whether a value is stored in the file."""
        if name in self.graph.initializers:
            return name not in self.graph.inputs
        node = self.index.producers.get(name)
        return node is not None and not node.reads and not draws(node)

    def scalars_before(self, names: Sequence[str]) -> list[str]:
        """The small values before these, with constants; nothing of full shape is crossed."""

        def before(name: str) -> Sequence[str]:
            node = self.producers.get(name)
            crossing = node is None or any(x in self.owners.full for x in node.reads)
            return () if node is None or crossing else [x for x in node.inputs if x not in self.owners.full]

        return list(walk((x for x in names if x and self.single(x) and x not in self.owners.full), before))

    def inputs_behind(self, name: str) -> frozenset[str]:
        """The scalar inputs behind a small value."""
        return self._behind.get(name, frozenset())

    def single(self, name: str) -> bool:
        """Return whether a value has one element."""
        type = self.graph.type_of(name)
        return type.static and type.elements == 1

    def typed(self, name: str, number: float) -> Array:
        """The number in the shape and kind of a value; an integer becomes a small count."""
        type = self.graph.type_of(name)
        if type.dtype != "bool" and type.dtype not in FLOATS and type.dtype != "undefined":
            number = number if np.isfinite(number) else 1
            number = int(number if number in (0, 1) or number > 1 else 1 + 10 * number)
        return np.full(type.dims if type.static else (), bool(number) if type.dtype == "bool" else number)

    def ungated(self, state: State) -> tuple[str, list[tuple[str, bool]]]:
        """A state's new value before the conditions that let the state keep its old value, and these conditions, each
        with the value that selects the new value."""
        name, conditions = state.updated, list[tuple[str, bool]]()
        while (node := self.producers.get(name := copy_chain(self.producers, name)[-1])) is not None:
            if state.tensor not in chosen_by(node) or not self.single(node.inputs[0]):
                break
            advances = node.inputs[2] == state.tensor
            conditions.append((node.inputs[0], advances))
            name = node.inputs[1 if advances else 2]
        return name, conditions


class UpdateFunction:
    """Computes the full-shaped values ``wanted`` from values of ``inputs``, as short vectors."""

    def __init__(
        self, probe: Probe, inputs: Iterable[str], wanted: Iterable[str], small: Container[str] = ()
    ) -> None:  # fmt: skip
        """``small``: values taken from the scalars, whatever their makers."""
        self.probe, self._given, self.wanted = probe, set(inputs), tuple(wanted)

        def reads(name: str) -> Sequence[str]:
            node = probe.producers.get(name)
            # What is reduced from several: another parameter's values are behind it.
            reduced = probe.owners.reduced.get(name) == "" and name not in self.wanted
            return () if node is None or name in self._given or name in small or reduced else node.reads

        nodes = {id(node): node for name in walk(self.wanted, reads) if reads(name) and (node := probe.producers[name])}
        self.nodes = sorted(nodes.values(), key=lambda node: probe.index.position[id(node)])

    @property
    def reduces(self) -> bool:
        """Whether a full-shaped value is reduced to one element on the way."""
        wide, single = self.probe.owners.full, self.probe.single
        return any(
            any(name in wide and not single(name) for name in node.reads)
            and all(single(name) for name in node.outputs if name)
            for node in self.nodes
        )

    def __call__(self, scalars: Scalars, arrays: Mapping[str, Array]) -> list[Array] | None:
        """The wanted values for vectors of one length; None if not computable."""
        values: Values = dict(arrays)
        for node in self.nodes:
            output = node.outputs[0]
            if output not in self._given and any(name in values for name in node.reads):
                operands = [self._operand(name, values, scalars) for name in node.inputs]
                values[output] = compute(node, operands, self.probe.graph.type_of(output), flat=True)
        shape = next(iter(arrays.values())).shape
        result = [self._operand(name, values, scalars) for name in self.wanted]
        if any(value is None for value in result):
            return None
        return [np.broadcast_to(value, shape).astype(np.float64) for value in result if value is not None]

    def _operand(self, name: str, values: Values, scalars: Scalars) -> Array | None:
        if name in values or not name:
            return values.get(name)
        value = scalars.get(name)
        if value is None or not value.size:
            return None if value is None else np.zeros(0, np.int64)
        alike = value.size == 1 or (value == value.flat[0]).all()
        return np.asarray(value.flat[0]) if alike else None
