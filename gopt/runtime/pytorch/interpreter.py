"""Computes nodes by PyTorch, in order, through the facet ``torch`` of each operator's record.

A value is either a tensor on the device, or *fixed*: known before the first step, and a tensor of the host. Shapes and
axes are fixed, and results of fixed values as well, so that a trace has numbers in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch.utils._python_dispatch import _disable_current_modes

from gopt.errors import UnsupportedError
from gopt.ir.constant_folding import constant_array
from gopt.ir.graph import Node
from gopt.operators.kinds import RANDOM
from gopt.operators.operator import Operator
from gopt.operators.table import OPERATORS
from gopt.operators.torch_call import called
from gopt.runtime.proto import as_node
from gopt.runtime.pytorch.tensors import tensor_over, torch_dtype
from gopt.text.sanitize import show

MOST_TURNS = 4096
"""Turns up to which a loop is written out in a trace."""


NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""In the errors of PyTorch's deterministic algorithms."""


class UntraceableError(Exception):
    """A result depends on the values of a step: the nodes are run, and not traced."""


def check_known(nodes: Iterable[Node]) -> None:
    """Raise UnsupportedError for the first node without a facet ``torch``, and for a constant that is no tensor of
    PyTorch: a text, or a sparse one."""
    for node in nodes:
        record = OPERATORS.get(node.op_type)
        if node.is_in(_CONTROL):
            for body in node.attributes.values():
                if isinstance(body, onnx.GraphProto):
                    check_known(map(as_node, body.node))
        elif not node.is_in(OPERATORS) or record is None or record.torch is None:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise UnsupportedError(
                f"engine torch does not compute {name} ({show(node.label)})", "run it with --engine threads or mpi"
            )
        elif node.is_in({"Constant"}):
            try:
                torch_dtype(np.asarray(constant_array(node.attributes)).dtype)
            except UnsupportedError as error:
                raise UnsupportedError(f"constant {show(node.label)}: {error}", *error.hints) from None


@dataclass(frozen=True, slots=True)
class Body:
    """Nodes with their operands and results, and constants among them. A body of control flow, or a segment."""

    nodes: Sequence[Node]
    inputs: Sequence[str]
    outputs: Sequence[str]
    constants: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, body: onnx.GraphProto) -> Body:
        """The body of an If, Loop or Scan."""
        constants = {tensor.name: tensor_over(onnx.numpy_helper.to_array(tensor)) for tensor in body.initializer}
        inputs, outputs = ([value.name for value in values] for values in (body.input, body.output))
        return cls([*map(as_node, body.node)], inputs, outputs, constants)


@dataclass(slots=True)
class Scope:
    """The values seen by nodes: ``tensors`` of this step, ``fixed`` ones of all steps."""

    tensors: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]

    def inner(self) -> Scope:
        """The scope of a body, with all values outside."""
        return Scope(dict(self.tensors), dict(self.fixed))

    def give(self, name: str, value: torch.Tensor, fixed: bool) -> None:
        """Set a value, in place of a value of the same name."""
        (self.fixed if fixed else self.tensors)[name] = value
        (self.tensors if fixed else self.fixed).pop(name, None)


class Interpreter:
    """Computes bodies on a device. ``opset``: the version of the standard operators; ``traced``: values of a step are
    not known while nodes are computed. Raises UntraceableError there."""

    def __init__(self, opset: int, device: torch.device, *, traced: bool) -> None:
        self._opset, self._device, self._traced = opset, device, traced
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By identity: a fixed value, and the copy on the device."""

    def run(self, body: Body, scope: Scope) -> list[torch.Tensor]:
        """The outputs of a body, on the device."""
        self._compute(body, scope)
        return [self._tensor(scope, name) for name in body.outputs]

    def _compute(self, body: Body, scope: Scope) -> None:
        for name, value in body.constants.items():
            scope.give(name, value, fixed=True)
        for node in body.nodes:
            if node.is_in(_CONTROL):
                results: Sequence[tuple[Any, bool]] = _CONTROL[node.op_type](self, node, scope)
            else:
                results = self._results(node, scope)
            for name, (value, fixed) in zip(node.outputs, results):
                if name:
                    scope.give(name, value, fixed)

    def _results(self, node: Node, scope: Scope) -> list[tuple[Any, bool]]:
        """The results of a node, each with whether it is fixed."""
        record = OPERATORS[node.op_type]
        draws = node.op_type in RANDOM
        fixed = not draws and all(
            not name or name in scope.fixed or place in record.by_type for place, name in enumerate(node.inputs)
        )
        operands = [self._operand(record, place, name, scope, fixed) for place, name in enumerate(node.inputs)]
        if not fixed:
            with self._device if draws else nullcontext():  # without an operand it draws on the default device
                return [(value, False) for value in self._called(record, node, operands)]
        with _disable_current_modes():
            return [(value, True) for value in self._called(record, node, operands)]

    def _called(self, record: Operator, node: Node, operands: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return called(record, torch, operands, node.attributes, self._opset, len(node.outputs))
        except RuntimeError as error:
            if NOT_DETERMINISTIC not in str(error):
                raise
            raise UnsupportedError(
                f"PyTorch has no deterministic form of {node.op_type} ({show(node.label)}) on {self._device}",
                "run it without --deterministic",
            ) from error

    def _operand(self, record: Operator, place: int, name: str, scope: Scope, fixed: bool) -> Any:
        if not name:
            return None
        if name in scope.fixed and (fixed or place in record.constants):
            return scope.fixed[name]
        return self._tensor(scope, name)

    def _tensor(self, scope: Scope, name: str) -> torch.Tensor:
        """A value on the device."""
        return scope.tensors[name] if name in scope.tensors else self._on_device(scope.fixed[name])

    def _on_device(self, value: torch.Tensor) -> torch.Tensor:
        if value.device == self._device:
            return value
        if id(value) not in self._moved:
            with _disable_current_modes():
                self._moved[id(value)] = value, value.to(self._device)
        return self._moved[id(value)][1]

    # --- control flow ---

    def _if(self, node: Node, scope: Scope) -> list[tuple[Any, bool]]:
        """The branch of a fixed condition; in a trace of another condition both, and a choice among their results."""
        name = node.inputs[0]
        if name in scope.fixed or not self._traced:
            taken = bool(scope.fixed[name] if name in scope.fixed else scope.tensors[name])
            return self._branch(node, taken, scope)
        one, two = ([self._on_device(value) for value, _ in self._branch(node, way, scope)] for way in (True, False))
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(one, two, strict=True)):
            raise UntraceableError
        condition = scope.tensors[name].reshape(())
        return [(torch.where(condition, a, b), False) for a, b in zip(one, two)]

    def _branch(self, node: Node, taken: bool, scope: Scope) -> list[tuple[Any, bool]]:
        body = Body.of(node.attributes["then_branch" if taken else "else_branch"])
        inner = scope.inner()
        self._compute(body, inner)
        return [(inner.fixed[name], True) if name in inner.fixed else (inner.tensors[name], False)
                for name in body.outputs]  # fmt: skip

    def _loop(self, node: Node, scope: Scope) -> list[tuple[Any, bool]]:
        body = Body.of(node.attributes["body"])
        turns, going = (self._number(name, scope) for name in [*node.inputs, ""][:2])
        carried = [self._tensor(scope, name) for name in node.inputs[2:]]
        rows: list[list[torch.Tensor]] = [[] for _ in body.outputs[1 + len(carried) :]]
        turn = 0
        while (turns is None or turn < turns) and going in (None, 1):
            if self._traced and turn >= MOST_TURNS:
                raise UntraceableError
            inner = scope.inner()
            inner.give(body.inputs[0], torch.tensor(turn), fixed=True)
            inner.give(body.inputs[1], torch.tensor(True), fixed=True)
            for name, value in zip(body.inputs[2:], carried):
                inner.give(name, value, fixed=False)
            self._compute(body, inner)
            going = self._number(body.outputs[0], inner)
            results = [self._tensor(inner, name) for name in body.outputs[1:]]
            carried = results[: len(carried)]
            for row, value in zip(rows, results[len(carried) :]):
                row.append(value)
            turn += 1
        if any(not row for row in rows):
            raise UnsupportedError(f"engine torch does not join the results of no turn ({show(node.label)})")
        return [(value, False) for value in (*carried, *map(torch.stack, rows))]

    def _number(self, name: str, scope: Scope) -> int | None:
        """A condition or a number of turns."""
        if not name:
            return None
        if name not in scope.fixed and self._traced:
            raise UntraceableError
        return int(scope.fixed[name] if name in scope.fixed else scope.tensors[name])

    def _scan(self, node: Node, scope: Scope) -> list[tuple[Any, bool]]:
        body, attributes = Body.of(node.attributes["body"]), node.attributes
        scanned = attributes["num_scan_inputs"]
        count = len(node.inputs) - scanned
        operands = [self._tensor(scope, name) for name in node.inputs]
        carried, rows = operands[:count], operands[count:]
        axes = attributes.get("scan_input_axes") or [0] * scanned
        backwards = attributes.get("scan_input_directions") or [0] * scanned
        lines = [row.unbind(axis)[:: -1 if back else 1] for row, axis, back in zip(rows, axes, backwards)]
        scanned_rows: list[list[torch.Tensor]] = [[] for _ in body.outputs[count:]]
        for turn in zip(*lines, strict=True):
            inner = scope.inner()
            for name, value in zip(body.inputs, (*carried, *turn), strict=True):
                inner.give(name, value, fixed=False)
            results = self.run(body, inner)
            carried = results[:count]
            for row, value in zip(scanned_rows, results[count:]):
                row.append(value)
        joins = attributes.get("scan_output_axes") or [0] * len(scanned_rows)
        reverses = attributes.get("scan_output_directions") or [0] * len(scanned_rows)
        ends = [torch.stack(row[:: -1 if back else 1], axis) for row, axis, back in zip(scanned_rows, joins, reverses)]
        return [(value, False) for value in (*carried, *ends)]


_CONTROL = {"If": Interpreter._if, "Loop": Interpreter._loop, "Scan": Interpreter._scan}
