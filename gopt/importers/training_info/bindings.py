"""``update_binding``: the result replacing each initializer, ignored by the checker."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import onnx
from onnx import ModelProto, TrainingInfoProto, ValueInfoProto, helper

from gopt.errors import UnsupportedError
from gopt.importers.training_info.names import broken, stored_types
from gopt.ir.free_names import FreeNames
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType, known
from gopt.text.sanitize import line, show


@dataclass(frozen=True, slots=True)
class BoundUpdate:
    """An initializer ``state``, the ``value`` replacing it, and the graph output with this value."""

    state: str
    value: str
    output: str


def bind(model: ModelProto, info: TrainingInfoProto) -> tuple[BoundUpdate, ...]:
    """The updates of a joined step; the graph gets an output for each, and the states as inputs.

    Raises InputError for a binding of an unknown name, UnsupportedError without any binding.
    """
    graph = model.graph
    stored, fed = stored_types(graph), {value.name for value in graph.input}
    outputs_of_nodes = {name for node in graph.node for name in node.output if name}
    names, outputs = outputs_of_nodes | fed | set(stored), {value.name for value in graph.output}
    free = FreeNames(names)
    updates: dict[str, BoundUpdate] = {}
    values: set[str] = set()
    for entry in info.update_binding:
        state, value = entry.key, entry.value
        if state not in stored:
            raise broken(f"update_binding replaces {show(state)}, which is not an initializer")
        if state in updates:
            raise broken(f"update_binding replaces {show(state)} twice")
        if value not in names:
            raise broken(f"update_binding replaces {show(state)} by {show(value)}, which nothing makes")
        output = value
        if value in values or value not in outputs_of_nodes:  # a value of its own for each state
            output = free.take(f"{state}_out")
            graph.node.append(helper.make_node("Identity", [value], [output]))
        values.add(output)
        updates[state] = BoundUpdate(state, value, output)
        if output not in outputs:
            graph.output.append(ValueInfoProto(name=output))
        if state not in fed:
            graph.input.append(value_info(state, stored[state]))
    if not updates:
        raise UnsupportedError(
            "training_info: update_binding is empty, so that the step replaces nothing",
            "bind every initializer that is trained to its new value",
        )
    return tuple(updates.values())


def check_types(model: ModelProto, updates: Sequence[BoundUpdate]) -> None:
    """Raise InputError for a state replaced by a value of another type; an unknown type counts as the state's, and is
    declared."""
    stored, types = stored_types(model.graph), value_types(model, "the step")
    outputs = {value.name: value for value in model.graph.output}
    for update in updates:
        old, new = stored[update.state], types[update.output]  # of an output there is one, known or not
        if not fits(new, old):
            raise broken(
                f"update_binding replaces {show(update.state)}, {old}, by {show(update.value)}, which is {new}",
                "bind it to a value of its own type: a state keeps its type from step to step",
            )
        outputs[update.output].CopyFrom(value_info(update.output, old))


def fits(actual: TensorType, wanted: TensorType) -> bool:
    """Return whether the known parts of a type agree with a known type."""
    return (not known(actual.dtype) or actual.dtype == wanted.dtype) and actual.may_have_shape_of(wanted)


def value_types(model: ModelProto, what: str) -> dict[str, TensorType]:
    """Return the types ``value_infos`` finds."""
    return {name: read_type(info.type) for name, info in value_infos(model, what).items()}


def value_infos(model: ModelProto, what: str) -> dict[str, ValueInfoProto]:
    """Types of the nodes' results, inferred from inputs and initializers. Raises InputError for contradictory types;
    ``what``: the graph's name."""
    bare = deepcopy(model)
    for value in bare.graph.output:  # what is declared must not hide what is computed
        value.ClearField("type")
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except onnx.shape_inference.InferenceError as error:
        raise broken(f"types in {what} contradict each other: {line(str(error))}") from None
    return {info.name: info for info in (*inferred.value_info, *inferred.output)}
