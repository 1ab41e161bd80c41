"""The optimizer graph of artifacts, and the nodes it becomes in a step: a clip, and one opaque optimizer.

The graph takes sequences by position, one place for each parameter that is trained. ``gopt.ir.opaque`` knows the
arithmetic of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import ModelProto, NodeProto

from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.folder import DOMAIN, OPTIMIZERS
from gopt.importers.artifacts.hints import EXPORT_AGAIN
from gopt.importers.artifacts.lowering.builder import Builder
from gopt.ir.external_data import show
from gopt.ir.opaque.operator_schema import OperatorSchema
from gopt.ir.opaque.table import OPERATORS

CLIP = "InplaceClipGradNorm"
_EPSILON = 1e-6
"""The number that the kernel of the clip adds to the norm."""
MOMENTS = ("moment_1", "moment_2")


@dataclass(frozen=True, slots=True)
class OrtOptimizer:
    """The optimizer of a folder. ``max_norm``: the bound of the clip before the optimizer, or None; ``rate``,
    ``count``: names of its scalar inputs, '' for a missing input."""

    node: NodeProto
    schema: OperatorSchema
    rate: str
    count: str
    max_norm: float | None

    @property
    def moments(self) -> tuple[str, ...]:
        """The slots of the moments."""
        return tuple(slot.name for slot in self.schema.inputs if slot.name in MOMENTS)


def read_optimizer(model: ModelProto) -> OrtOptimizer:
    """Read an optimizer graph; raises UnsupportedError for an operator gopt does not support there, InputError for a
    damaged one."""
    body = model.graph
    inputs = {value.name for value in body.input}
    clips: dict[str, NodeProto] = {}
    update: NodeProto | None = None
    for node in body.node:
        if node.domain == DOMAIN and node.op_type == CLIP and len(node.input) == len(node.output) == 1:
            clips[node.output[0]] = node
        elif node.domain == DOMAIN and node.op_type in OPTIMIZERS and update is None:
            update = node
        else:
            raise UnsupportedError(
                f"the optimizer graph has {node.op_type} {show(node.name)}, which gopt does not support there",
                "gopt reads one AdamWOptimizer or SGDOptimizerV2, and a clip of the norm in front of it",
            )
    assert update is not None  # the file was chosen for it
    for attribute in update.attribute:  # it goes into the step: there its file is no longer known
        try:
            onnx.checker.check_attribute(attribute)
        except onnx.checker.ValidationError as error:
            why = str(error).strip().splitlines()[0]
            raise InputError(
                f"attribute {show(attribute.name)} of {update.op_type} is not valid: {show(why)}", EXPORT_AGAIN
            ) from None
    schema = OPERATORS[DOMAIN, update.op_type]
    slots = dict(zip((slot.name for slot in schema.inputs), update.input))
    clip = clips.get(slots.get("gradient", ""))
    if clip is not None:
        slots["gradient"] = clip.input[0]
    if len(clips) > (clip is not None):
        raise UnsupportedError(f"the optimizer graph has {len(clips)} clips", "gopt reads one in front of the update")
    for slot, name in slots.items():
        if name not in inputs:
            raise UnsupportedError(
                f"the optimizer graph computes {show(name)}, the {slot} of {update.op_type}",
                "let the optimizer read inputs of its graph",
            )
    _check_order([value.name for value in body.input], slots, update.op_type)
    return OrtOptimizer(update, schema, slots.get("rate", ""), slots.get("count", ""), _norm(clip))


def _check_order(inputs: Sequence[str], slots: Mapping[str, str], op_type: str) -> None:
    """Raise UnsupportedError where the optimizer reads inputs in another order than the graph has them.

    The runtime feeds weights, gradients and moments by the places.
    """
    last, before = -1, ""
    for name in slots.values():
        position = inputs.index(name)
        if position <= last:
            apart = f"{show(before)} before {show(name)}, and the optimizer graph has them the other way round"
            raise UnsupportedError(
                f"{op_type} reads {apart if before != name else f'{show(name)} twice'}",
                "generate the artifacts again: their runtime feeds these inputs by their places",
            )
        last, before = position, name


def _norm(clip: NodeProto | None) -> float | None:
    if clip is None:
        return None
    return next((float(attribute.f) for attribute in clip.attribute if attribute.name == "max_norm"), 1.0)


def clip_nodes(b: Builder, gradients: Sequence[str], clipped: Sequence[str], max_norm: float) -> list[NodeProto]:
    """All gradients times min(1, max_norm / (‖gradients‖ + 1e-6)), in one node's name."""
    like = gradients[0]
    node = onnx.helper.make_node(CLIP, list(gradients), list(clipped), "clip_grad_norm", domain=DOMAIN)

    def body(b: Builder, *parts: str) -> tuple[Any, ...]:
        squares = [b.op("ReduceSumSquare", part, keepdims=0) for part in parts]
        total = squares[0]
        for square in squares[1:]:
            total = b.op("Add", total, square)
        below = b.op("Add", b.op("Sqrt", total), b.number_like(_EPSILON, like))
        factor = b.op("Min", b.op("Div", b.number_like(max_norm, like), below), b.number_like(1, like))
        return tuple(b.op("Mul", part, factor) for part in parts)

    return b.lower(node, body, {})


@dataclass(frozen=True, slots=True)
class Update:
    """The values the optimizer of a step reads and replaces: per slot one name a parameter, in one order."""

    slots: dict[str, list[str]]
    results: dict[str, list[str]]
    count: str


def update_nodes(optimizer: OrtOptimizer, update: Update, b: Builder) -> list[NodeProto]:
    """Sequences, the opaque optimizer, and the places of the results."""
    make = onnx.helper.make_node
    nodes, operands, results = [], [], []
    for slot in optimizer.schema.inputs:
        if slot.each:
            name = b.fresh(f"{slot.name}s")
            nodes.append(make("SequenceConstruct", update.slots[slot.name], [name]))
            operands.append(name)
        elif slot.name in ("rate", "count"):
            operands.append(optimizer.rate if slot.name == "rate" else update.count)
    positions = [b.array(index) for index in range(len(update.slots["weight"]))]
    tail = []
    for slot in optimizer.schema.outputs:
        name = b.fresh(f"{slot.name}s" if slot.each else slot.name)
        results.append(name)
        for number, result in enumerate(update.results.get(slot.name, ())):
            tail.append(make("SequenceAt", [name, positions[number]], [result]))
    node = make(optimizer.node.op_type, operands, results, optimizer.node.name or "optimizer", domain=DOMAIN)
    node.attribute.extend(optimizer.node.attribute)
    return [*nodes, node, *tail]
