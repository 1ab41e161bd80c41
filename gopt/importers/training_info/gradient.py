"""The Gradient operator of ``ai.onnx.preview.training``: replaced by nodes computing the derivatives."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto

from gopt.autodiff.backward import GradientCall, expand_gradient
from gopt.errors import InputError, UnsupportedError
from gopt.importers.training_info.bindings import value_infos
from gopt.ir.functions import check_functions, inline_functions, reached_functions
from gopt.ir.model_file import refill
from gopt.ir.nodes import is_gradient, nested, reads
from gopt.ir.type_proto import read_type
from gopt.text.sanitize import show

PREVIEW = "ai.onnx.preview.training"


def expand_gradients(model: ModelProto, states: Collection[str] = ()) -> list[GradientCall]:
    """Replace Gradient operators, first to last, by derivatives, and functions on the way by nodes.

    ``states``: stored values replaced by the step, which are no constants.
    """
    _refuse_in_functions(model)
    _write_out_functions(model)
    calls = []
    while (node := next((node for node in model.graph.node if is_gradient(node)), None)) is not None:
        call = _read(node, model.graph)
        forward = _part(model, call.scalar)
        inner = {name for node in forward.graph.node for name in node.output}
        nodes = expand_gradient(forward, call, states)
        rest = [other for other in model.graph.node if other is not node and not inner & set(other.output)]
        refill(model.graph.node, [*nodes, *rest])
        calls.append(call)
    refill(
        model.opset_import, [opset for opset in model.opset_import if opset.domain != PREVIEW or _uses_preview(model)]
    )
    return calls


def _refuse_in_functions(model: ModelProto) -> None:
    for function in model.functions:
        for node in filter(is_gradient, nested(function.node)):
            raise UnsupportedError(
                f"Gradient {show(''.join(node.output[:1]))} is inside function {show(function.name)}",
                "call Gradient in the algorithm itself",
            )


def _write_out_functions(model: ModelProto) -> None:
    """Inline the functions computing values to be differentiated."""
    scalars = [_read(node, model.graph).scalar for node in model.graph.node if is_gradient(node)]
    called = reached_functions(model, _behind(model.graph, scalars)) if model.functions and scalars else set()
    if called:
        check_functions(model)
        model.CopyFrom(inline_functions(model, called))


def _behind(graph: GraphProto, names: Iterable[str]) -> list[NodeProto]:
    """The nodes values depend on, in order."""
    read, chosen = set(names), []
    for node in reversed(graph.node):
        if read & set(node.output):
            chosen.append(node)
            read |= reads(node)
    return chosen[::-1]


def _uses_preview(model: ModelProto) -> bool:
    parts = (model.graph.node, *(function.node for function in model.functions))
    return any(node.domain == PREVIEW for nodes in parts for node in nested(nodes))


def _read(node: NodeProto, graph: GraphProto) -> GradientCall:
    label = show(next((name for name in node.output if name), "Gradient"))
    xs, zs = (_names(node, name, AttributeProto.STRINGS, label) for name in ("xs", "zs"))
    scalar = next(iter(_names(node, "y", AttributeProto.STRING, label)), "")
    if not scalar or not xs:
        raise InputError(f"Gradient {label} names no y or no xs", "correct it in the program that wrote the model")
    if list(node.input) != [*xs, *zs]:
        raise UnsupportedError(
            f"Gradient {label} reads {show(', '.join(node.input))}, and differentiates by "
            f"{show(', '.join([*xs, *zs]))}: a gradient at other values than the step has",
            "let it read the values that xs and zs name, in that order",
        )
    twice = next((name for index, name in enumerate(xs) if name in xs[:index]), None)
    if twice is not None:
        raise InputError(
            f"Gradient {label} names {show(twice)} twice in xs", "name it once, and read that result twice"
        )
    free = {value.name for value in (*graph.input, *graph.initializer)}
    for name in xs:
        if name not in free:
            raise UnsupportedError(
                f"Gradient {label} differentiates by {show(name)}, which is computed",
                "differentiate by initializers and inputs",
            )
    return GradientCall(scalar, {name: gradient for name, gradient in zip(xs, node.output) if gradient})


def _names(node: NodeProto, name: str, kind: int, label: str) -> list[str]:
    """The names in an attribute; raises InputError for other contents."""
    attribute = next((entry for entry in node.attribute if entry.name == name), None)
    if attribute is None:
        return []
    try:
        if attribute.type == kind:
            return [text.decode() for text in (attribute.strings if kind == AttributeProto.STRINGS else [attribute.s])]
    except UnicodeDecodeError:
        pass
    wanted = "a list of names" if kind == AttributeProto.STRINGS else "a name"
    raise InputError(
        f"Gradient {label}: its attribute {name} is not {wanted}", "correct it in the program that wrote the model"
    )


def _part(model: ModelProto, scalar: str) -> ModelProto:
    """The nodes behind ``scalar``, as a model; values read elsewhere are outputs."""
    graph = model.graph
    chosen = _behind(graph, [scalar])
    read = {scalar}.union(*map(reads, chosen))
    if not chosen:
        hint = "correct it in the program that wrote the model"
        raise InputError(f"Gradient names {show(scalar)} as y, which no node makes", hint)
    part = ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = "forward"
    part.graph.node.extend(chosen)
    part.graph.input.extend(value for value in graph.input if value.name in read)
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    outputs = {name for node in chosen for name in node.output if name}
    other_nodes = [node for node in graph.node if not outputs & set(node.output)]
    wanted = {name for node in other_nodes for name in reads(node)} | {value.name for value in graph.output} | {scalar}
    types = value_infos(part, "the step")
    kind = read_type(types[scalar].type) if scalar in types else None
    if kind is not None and kind.static and kind.elements != 1:
        raise UnsupportedError(
            f"Gradient differentiates {show(scalar)}, which is {kind} and no scalar",
            "reduce it to one number first, such as its sum or its mean",
        )
    wanted_here = sorted(outputs & wanted, key=lambda name: name != scalar)
    part.graph.output.extend(types.get(name, ValueInfoProto(name=name)) for name in wanted_here)
    return part
