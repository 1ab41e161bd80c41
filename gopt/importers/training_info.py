"""``ModelProto.training_info``, ONNX's own form of a training step, as one functional step.

The standard says: the step is the inference graph and the ``algorithm`` graph, one behind the other, and
``update_binding`` says which result replaces which initializer. ``onnx.checker`` looks at none of it, so all bindings
are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TrainingInfoProto, ValueInfoProto, helper

from gopt.errors import InputError, UnsupportedError
from gopt.sanitize import show

PREVIEW = "ai.onnx.preview.training"


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A Gradient operator. ``scalar``: what is differentiated; ``results``: input -> the value of its derivative."""

    scalar: str
    results: dict[str, str]


Expand = Callable[[ModelProto, GradientCall], list[NodeProto]]
"""The nodes that make the scalar and its derivatives, from a model that makes the scalar. That model's outputs keep
their names."""


@dataclass(frozen=True, slots=True)
class Flattened:
    """A functional step. ``states``: initializer -> the output that replaces it; ``loss``: what is differentiated, or
    ''; ``notes``: remarks."""

    model: ModelProto
    states: dict[str, str]
    loss: str
    notes: tuple[str, ...]


def flatten(model: ModelProto, expand: Expand) -> Flattened:
    """The step of a model with one entry of ``training_info``; ``expand`` differentiates.

    Raises InputError for bindings that name nothing, UnsupportedError for several entries and for a Gradient operator
    at other values than those that it names.
    """
    info = _only(model)
    step = ModelProto()
    step.CopyFrom(model)
    del step.training_info[:]
    _join(step.graph, info.algorithm)
    states = _bind(step.graph, info)
    calls = _expand_gradients(step, expand)
    _as_inputs(step.graph, states)
    scalars = {call.scalar for call in calls}
    loss = scalars.pop() if len(scalars) == 1 else ""
    if loss:
        _add_output(step.graph, loss)
    return Flattened(step, states, loss, tuple(_notes(info)))


def _only(model: ModelProto) -> TrainingInfoProto:
    count = len(model.training_info)
    if count != 1:
        raise UnsupportedError(
            f"training_info holds {count} training steps, and gopt reads one",
            "write a model for each, with its own algorithm",
        )
    info: TrainingInfoProto = model.training_info[0]
    return info


def _join(graph: GraphProto, algorithm: GraphProto) -> None:
    """Put the algorithm behind the inference graph; an input of both is one."""
    known = {each.name for each in graph.input}
    graph.node.extend(algorithm.node)
    graph.initializer.extend(algorithm.initializer)
    graph.sparse_initializer.extend(algorithm.sparse_initializer)
    graph.input.extend(each for each in algorithm.input if each.name not in known)
    known = {each.name for each in graph.output}
    graph.output.extend(each for each in algorithm.output if each.name not in known)
    graph.value_info.extend(algorithm.value_info)


def _bind(graph: GraphProto, info: TrainingInfoProto) -> dict[str, str]:
    """Initializers with the outputs that replace them; raises InputError for a binding that does not hold."""
    stored = {each.name: each for each in graph.initializer}
    made = {name for node in graph.node for name in node.output if name}
    fed = {each.name for each in graph.input}
    states: dict[str, str] = {}
    taken: set[str] = set()
    for entry in info.update_binding:
        old, new = entry.key, entry.value
        if old not in stored:
            raise _broken(f"update_binding replaces {show(old)}, which is no initializer")
        if old in states:
            raise _broken(f"update_binding replaces {show(old)} twice")
        if new not in made and new not in fed and new not in stored:
            raise _broken(f"update_binding replaces {show(old)} by {show(new)}, which nothing makes")
        if new in taken or new not in made:  # a value of its own for each state
            copy = f"{old}_out"
            if copy in made:
                raise _broken(f"update_binding replaces two initializers by {show(new)}, and {show(copy)} is taken")
            graph.node.append(helper.make_node("Identity", [new], [copy]))
            new = copy
        states[old] = new
        taken.add(new)
        kind = helper.make_tensor_value_info(new, stored[old].data_type, list(stored[old].dims))
        if new not in {each.name for each in graph.output}:
            graph.output.append(kind)
    if not states:
        raise UnsupportedError(
            "training_info: update_binding is empty, so that the step replaces nothing",
            "bind every initializer that is trained to its new value",
        )
    for entry in info.initialization_binding:
        if entry.key not in stored:
            raise _broken(f"initialization_binding sets {show(entry.key)}, which is no initializer")
        results = {each.name for each in info.initialization.output}
        if entry.value not in results:
            raise _broken(
                f"initialization_binding sets {show(entry.key)} to {show(entry.value)}, which is no output of its graph"
            )
    return states


def _broken(text: str) -> InputError:
    return InputError(f"training_info: {text}", "mend the binding in the program that wrote the model")


def _as_inputs(graph: GraphProto, states: Iterable[str]) -> None:
    """States become inputs; their stored values are the first ones."""
    fed = {each.name for each in graph.input}
    stored = {each.name: each for each in graph.initializer}
    for name in states:
        if name not in fed:
            graph.input.append(helper.make_tensor_value_info(name, stored[name].data_type, list(stored[name].dims)))


def _add_output(graph: GraphProto, name: str) -> None:
    if name not in {each.name for each in graph.output}:
        graph.output.append(ValueInfoProto(name=name))


def _notes(info: TrainingInfoProto) -> Iterable[str]:
    yield "read from training_info: the inference graph and the algorithm behind it"
    if info.initialization_binding:
        yield (
            f"training_info initializes {len(info.initialization_binding)} values by a graph of its own, which is not "
            "run: ranks start from the stored values"
        )


# --- Gradient ---------------------------------------------------------------------------------------------------------


def _expand_gradients(model: ModelProto, expand: Expand) -> list[GradientCall]:
    """Replace Gradient operators, first to last, by what they ask for."""
    calls = []
    while (node := next((each for each in model.graph.node if _is_gradient(each)), None)) is not None:
        call = _read(node, model.graph)
        forward = _part(model, node, call.scalar)
        inner = {name for each in forward.graph.node for name in each.output}
        nodes = expand(forward, call)
        rest = [each for each in model.graph.node if each is not node and not inner & set(each.output)]
        del model.graph.node[:]
        model.graph.node.extend([*nodes, *rest])
        calls.append(call)
    if calls:
        kept = [each for each in model.opset_import if each.domain != PREVIEW or _uses_preview(model)]
        del model.opset_import[:]
        model.opset_import.extend(kept)
    return calls


def _uses_preview(model: ModelProto) -> bool:
    return any(node.domain == PREVIEW for node in model.graph.node)


def _is_gradient(node: NodeProto) -> bool:
    return node.op_type == "Gradient" and node.domain == PREVIEW


def _read(node: NodeProto, graph: GraphProto) -> GradientCall:
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    xs, zs = ([each.decode() for each in attributes.get(name, ())] for name in ("xs", "zs"))
    scalar = attributes.get("y", b"").decode()
    label = show(next((name for name in node.output if name), "Gradient"))
    if not scalar or not xs:
        raise InputError(f"Gradient {label} names no y or no xs", "mend it in the program that wrote the model")
    if list(node.input) != [*xs, *zs]:
        raise UnsupportedError(
            f"Gradient {label} reads {show(', '.join(node.input))}, and differentiates by "
            f"{show(', '.join([*xs, *zs]))}: a gradient at other values than those of the step",
            "let it read the values that xs and zs name, in that order",
        )
    free = {each.name for each in (*graph.input, *graph.initializer)}
    for name in xs:
        if name not in free:
            raise UnsupportedError(
                f"Gradient {label} differentiates by {show(name)}, which is computed",
                "differentiate by initializers and inputs",
            )
    return GradientCall(scalar, {name: made for name, made in zip(xs, node.output) if made})


def _part(model: ModelProto, gradient: NodeProto, scalar: str) -> ModelProto:
    """The nodes that ``scalar`` depends on, as a model; what else reads their values makes them outputs."""
    graph, read, chosen = model.graph, {scalar}, []
    for node in reversed(graph.node):
        if read & set(node.output):
            chosen.append(node)
            read |= _reads(node)
    if not chosen:
        raise InputError(f"Gradient names {show(scalar)} as y, which no node makes", "mend it where it was written")
    part = ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(each for each in model.opset_import if each.domain != PREVIEW)
    part.functions.extend(model.functions)
    part.graph.name = "forward"
    part.graph.node.extend(reversed(chosen))
    part.graph.input.extend(each for each in graph.input if each.name in read)
    part.graph.initializer.extend(each for each in graph.initializer if each.name in read)
    made = {name for node in chosen for name in node.output if name}
    others = [node for node in graph.node if not made & set(node.output) and node is not gradient]
    wanted = {name for node in others for name in _reads(node)} | {each.name for each in graph.output} | {scalar}
    types = _types(part)
    part.graph.output.extend(types[name] for name in sorted(made & wanted, key=lambda name: name != scalar))
    return part


def _reads(node: NodeProto) -> set[str]:
    found = {name for name in node.input if name}
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            found |= {name for inner in body.node for name in _reads(inner)} | {each.name for each in body.output}
    return found


def _types(model: ModelProto) -> dict[str, ValueInfoProto]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    found = {each.name: each for each in inferred.value_info}
    names: Sequence[str] = [name for node in model.graph.node for name in node.output if name]
    return {name: found.get(name, ValueInfoProto(name=name)) for name in names}
