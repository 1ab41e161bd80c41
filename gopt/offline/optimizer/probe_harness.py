"""The small values of an update, run on chosen numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx

from gopt import limits
from gopt.analysis.ownership import Ownership
from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.constant_folding import constant_array
from gopt.ir.graph import Node
from gopt.ir.node_kinds import control_flow
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, TensorType, dtype_name
from gopt.offline.optimizer.numpy_ops import Array, run

Values = dict[str, Array | None]
_STEPS = (1, 13, 24, 5000, 10**6)
"""Steps to try: warm-ups, rectifications and corrections of bias show at the first, decays of the rate at the last."""


class Scalars:
    """The small values of the update for one choice of the scalar inputs.

    What a full-shaped value is reduced to is ``reduced`` (0: no norm, nothing infinite), times a factor between 1 and
    2 that differs from one to the next; inputs that are not in ``given`` get a fixed number between 0.2 and 0.8, a
    different one each.
    """

    def __init__(
        self, harness: ProbeHarness, given: Mapping[str, float] | None = None, reduced: float = 0.0,
        pinned: Mapping[str, bool] | None = None,
    ) -> None:  # fmt: skip
        self._harness = harness
        self.values: Values = {}
        given = given or {}
        for place, name in enumerate(harness.inputs):
            number = given.get(name, 0.2 + 0.6 * ((place + 1) * 0.6180339887498949 % 1.0))
            self.values[name] = harness.typed(name, number)
        pinned, leaves = pinned or {}, 0
        for node in harness.small:
            leaf = not _of_a_type(node) and any(name in harness.owners.full for name in node.reads)
            leaves += leaf
            for name in node.outputs:
                if name in pinned:
                    self.values[name] = np.asarray(pinned[name])
                elif leaf and harness.graph.type_of(name).elements <= limits.FOLDED_ELEMENTS:
                    self.values[name] = harness.typed(name, reduced * (1 + leaves % 4 / 4))
                elif name == node.outputs[0] and not leaf:
                    operands = [self.get(operand) for operand in node.inputs]
                    self.values[name] = run(node, operands, harness.graph.type_of(name), flat=False)

    def get(self, name: str) -> Array | None:
        """A small value or a constant; None when it is neither, or could not be computed."""
        if name in self.values:
            return self.values[name]
        return self._harness.constant(name)

    def number(self, name: str) -> float | None:
        """A one-element value as a float."""
        value = self.get(name)
        return None if value is None or value.size != 1 else float(value.reshape(()))


class ProbeHarness:
    """Runs parts of a step's update on chosen numbers: its small values, and the subgraphs one at a time."""

    def __init__(self, training: TrainingGraph) -> None:
        self.graph = graph = training.graph
        self._constants: Values = {}
        self._tensors = {name: tensor for name, tensor in graph.initializers.items() if name not in graph.inputs}
        tensors = {state.tensor for state in training.states if not _one(graph.type_of(state.tensor))}
        full = tensors | {s.tensor for s in training.parameters}
        wide = {gradient: parameter for parameter, gradient in training.gradients.items()}
        wide |= {state.tensor: state.of or state.tensor for state in training.states if state.tensor in full}
        self.owners = Ownership(graph, wide)
        self.hyper = set(training.hyper)
        self.updated = {state.tensor: state.updated for state in training.states}
        self.inputs = [
            name for name in (*training.hyper, *(state.tensor for state in training.states))
            if name not in wide and _one(graph.type_of(name))
        ]  # fmt: skip
        self.small: list[Node] = []
        self.producers: dict[str, Node] = {}
        self.position = {id(node): place for place, node in enumerate(graph.nodes)}
        known = {*self.inputs, ""}
        for node in graph.nodes:
            self._note_constant(node)
            if node.phase is Phase.UPDATE:
                self.producers.update((name, node) for name in node.outputs)
                full_shaped = (
                    not _of_a_type(node)
                    and self.owners.note(node)
                    and any(name in self.owners.full for name in node.outputs)
                )
                if not full_shaped and not control_flow(node) and not self.is_constant(node.outputs[0]):
                    self.small.append(node)
            elif node.reads and all(x in known or self.is_constant(x) for x in node.reads) and not control_flow(node):
                self.producers.update((name, node) for name in node.outputs)
                self.small.append(node)
                known.update(node.outputs)
        self._behind = self._behind_inputs()
        self.counters = self._find_counters(training)
        """Scalar inputs that count steps."""

    def _find_counters(self, training: TrainingGraph) -> tuple[str, ...]:
        """Return states that grow by one, and the exponents of constants, as in 1 - beta^t."""
        known = Scalars(self, spread(self.inputs, 1))
        found: dict[str, None] = {}
        for state in training.states:
            if state.tensor in self._behind:
                before, after = known.number(state.tensor), known.number(state.updated)
                if before is not None and after is not None and abs(after - before - 1) < 1e-9:
                    found[state.tensor] = None
        for node in self.small:
            if node.is_a("Pow") and self.constant(node.inputs[0]) is not None:
                found.update(dict.fromkeys(sorted(self.inputs_behind(node.inputs[1]))))
        return tuple(found)

    def runs(self) -> list[Scalars]:
        """The small values for several choices of the scalar inputs: at the first steps, and at late ones."""
        made = []
        for seed, step in enumerate(_STEPS):
            given = spread(self.inputs, seed)
            given |= {name: float(step + (place % 7 if step > 1 else 0)) for place, name in enumerate(self.counters)}
            made.append(Scalars(self, given))
        return made

    def _note_constant(self, node: Node) -> None:
        if not node.is_a("Constant"):
            return
        value = node.attributes.get("value")
        if value is None and (array := constant_array(node.attributes)) is not None:
            value = onnx.numpy_helper.from_array(array)
        if isinstance(value, onnx.TensorProto):
            type = TensorType(dtype_name(value.data_type), tuple(value.dims))
            self._tensors[node.outputs[0]] = Tensor(type, proto=value)

    def constant(self, name: str) -> Array | None:
        """A constant of few elements, or one that repeats a single value (as that value)."""
        if name in self._constants:
            return self._constants[name]
        result = None
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.type.static and tensor.nbytes <= 1 << 24 and tensor.type.dtype != "string":
            value = np.asarray(tensor.numpy())
            if value.size > 64 and (value == value.flat[0]).all():
                value = value.reshape(-1)[:1].reshape(())
            if value.size <= 64:
                result = value if value.dtype.kind in "biu" else value.astype(np.float64)
        self._constants[name] = result
        return result

    def is_constant(self, name: str) -> bool:
        return name in self._tensors

    def scalars_before(self, names: Sequence[str]) -> list[str]:
        """The small values that lead to these, constants included; nothing of full shape is crossed."""
        found: dict[str, None] = {}
        stack = [name for name in names if name and self.single(name)]
        while stack:
            name = stack.pop()
            if name in found or name in self.owners.full or len(found) > 500:
                continue
            found[name] = None
            node = self.producers.get(name)
            if node is not None and not any(x in self.owners.full for x in node.reads):
                stack.extend(x for x in node.inputs if x)
        return list(found)

    def inputs_behind(self, name: str) -> frozenset[str]:
        """The scalar inputs that a small value depends on."""
        return self._behind.get(name, frozenset())

    def _behind_inputs(self) -> dict[str, frozenset[str]]:
        """Small value -> the scalar inputs that it depends on."""
        found = {name: frozenset([name]) for name in self.inputs}
        for node in self.small:
            sets = [found[name] for name in node.reads if name in found]
            if sets:
                union = sets[0] if all(each is sets[0] for each in sets) else frozenset().union(*sets)
                found.update(dict.fromkeys(node.outputs, union))
        return found

    def single(self, name: str) -> bool:
        """Return whether a value has one element."""
        return _one(self.graph.type_of(name))

    def typed(self, name: str, number: float) -> Array:
        """The number in the shape and kind of a value; an integer becomes a small count."""
        type = self.graph.type_of(name)
        shape = type.dims if type.static else ()
        if type.dtype == "bool":
            return np.full(shape, bool(number))
        if type.dtype in FLOATS or type.dtype == "undefined":
            return np.full(shape, float(number))
        if not np.isfinite(number):
            number = 1
        return np.full(shape, int(number if number in (0, 1) or number > 1 else 1 + 10 * number))


def _of_a_type(node: Node) -> bool:
    """Return whether a node reads one of its operands for its type alone."""
    return node.is_a("CastLike")


def _one(type: TensorType) -> bool:
    return type.static and type.elements == 1


def spread(names: Iterable[str], seed: int) -> dict[str, float]:
    """Another choice of the scalar inputs: numbers between 0.2 and 0.8."""
    rng = np.random.default_rng(seed)
    return {name: float(rng.uniform(0.2, 0.8)) for name in names}
