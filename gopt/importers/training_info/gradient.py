"""The Gradient operator of ``ai.onnx.preview.training``: replaced by nodes that compute the derivatives."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from gopt.autodiff.backward import GradientCall, expand_gradient
from gopt.errors import InputError, UnsupportedError
from gopt.importers.training_info.bindings import value_infos
from gopt.ir.nodes import reads
from gopt.sanitize import show

PREVIEW = "ai.onnx.preview.training"


def expand_gradients(model: ModelProto) -> list[GradientCall]:
    """Replace Gradient operators, first to last, by what they ask for."""
    calls = []
    while (node := next((each for each in model.graph.node if _is_gradient(each)), None)) is not None:
        call = _read(node, model.graph)
        forward = _part(model, call.scalar)
        inner = {name for each in forward.graph.node for name in each.output}
        nodes = expand_gradient(forward, call)
        rest = [each for each in model.graph.node if each is not node and not inner & set(each.output)]
        del model.graph.node[:]
        model.graph.node.extend([*nodes, *rest])
        calls.append(call)
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
        raise InputError(f"Gradient {label} names no y or no xs", "correct it in the program that wrote the model")
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


def _part(model: ModelProto, scalar: str) -> ModelProto:
    """The nodes that ``scalar`` depends on, as a model; what else reads their values makes them outputs."""
    graph, read, chosen = model.graph, {scalar}, []
    for node in reversed(graph.node):
        if read & set(node.output):
            chosen.append(node)
            read |= reads(node)
    if not chosen:
        hint = "correct it in the program that wrote the model"
        raise InputError(f"Gradient names {show(scalar)} as y, which no node makes", hint)
    part = ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = "forward"
    part.graph.node.extend(reversed(chosen))
    part.graph.input.extend(each for each in graph.input if each.name in read)
    part.graph.initializer.extend(each for each in graph.initializer if each.name in read)
    made = {name for node in chosen for name in node.output if name}
    others = [node for node in graph.node if not made & set(node.output)]
    wanted = {name for node in others for name in reads(node)} | {each.name for each in graph.output} | {scalar}
    types = value_infos(part, "the step")
    wanted_here = sorted(made & wanted, key=lambda name: name != scalar)
    part.graph.output.extend(types.get(name, ValueInfoProto(name=name)) for name in wanted_here)
    return part
