"""Converts a traced step to an ONNX model: torch's exporter, then a clean-up changing no arithmetic."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.documents.draws import Distribution
from gopt.frontends.functional_step import LOSS, UPDATED
from gopt.frontends.pytorch.onnx_forms import refuse_formless
from gopt.frontends.pytorch.randomness import DrawnInput, draw_names
from gopt.frontends.pytorch.tracing import TracedStep
from gopt.ir.graph import Graph
from gopt.ir.load import graph_of
from gopt.ir.model_file import refill
from gopt.ir.tensor import Tensor
from gopt.runtime.pytorch.tensors import array_over

OPSET = 20
_FOLDED = 1024
"""Largest constant, in bytes, that folding makes."""


def to_onnx(step: TracedStep, name: str) -> onnx.ModelProto:
    """The step as an ONNX model without values.

    Inputs are in the order of ``step.arguments``, constants among them. Outputs are ``loss``, the states' names with
    ``_out``, then ``step.outputs``. Raises torch.onnx.OnnxExporterError.
    """
    with quiet():
        shown = 1 + len(step.states) + len(step.outputs)
        refuse_formless(step.graph.graph, shown, OPSET, lambda graph, read: _exported(graph, read, {}))
    try:
        return _converted(step, name)
    except torch.onnx.OnnxExporterError:
        if not step.hidden:
            raise
    _forget(step)  # what nobody asked for may have no ONNX form
    return _converted(step, name)


def _forget(step: TracedStep) -> None:
    """Leave hidden results out of a step."""
    (node,) = (node for node in step.graph.graph.nodes if node.op == "output")
    node.args = (type(node.args[0])(node.args[0][: -len(step.hidden)]),)
    step.hidden.clear()
    step.graph.graph.eliminate_dead_code()
    step.graph.recompile()


def _converted(step: TracedStep, name: str) -> onnx.ModelProto:
    outputs = [LOSS, *(f"{state}{UPDATED}" for state in step.states), *step.outputs, *step.hidden]
    names = {"input_names": list(step.arguments), "output_names": outputs}
    arguments = tuple(step.arguments.values())
    with quiet():
        try:  # what the exporter would decompose is decomposed already, and doing it again takes half of the time
            with _without_second_decomposition():
                model = _exported(step.graph, arguments, names)
        except torch.onnx.OnnxExporterError:
            _reshape_views(step.graph)
            model = _exported(step.graph, arguments, names)
        _clean(model)
        step.copies.update(_hide(model, step.hidden))
    proto = onnx.ModelProto.FromString(onnx_ir.serde.serialize_model(model).SerializeToString())
    _strip(proto, name)
    return proto


def _reshape_views(graph: torch.fx.GraphModule) -> None:
    """Reshape where the step has a view: the exporter traces a step anew, and gives other strides to some results."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()


def _exported(graph: torch.fx.GraphModule, arguments: tuple[Any, ...], names: dict[str, list[str]]) -> Any:
    """Export without the exporter's optimizer, which deletes ``+ 1e-8``, the epsilon of Adam."""
    program = torch.onnx.export(
        graph, arguments, dynamo=True, optimize=False, verbose=False, opset_version=OPSET, **names
    )
    assert program is not None
    return program.model


@contextlib.contextmanager
def _without_second_decomposition() -> Iterator[None]:
    from torch.onnx._internal.exporter import _fx_passes

    if not hasattr(_fx_passes, "decompose_with_registry"):
        yield
        return
    with mock.patch.object(_fx_passes, "decompose_with_registry", lambda program, registry: program):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch: the exporter prints its progress and warnings about its own internals."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _clean(model: Any) -> None:
    """Fold constants, merge equal nodes and constants, and remove unread nodes."""
    common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(model, onnx_shape_inference=False, output_size_limit=_FOLDED)
    common.LiftConstantsToInitializersPass(size_limit=0)(model)
    common.DeduplicateInitializersPass(size_limit=1 << 20)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    common.RemoveUnusedOpsetsPass()(model)


def _hide(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Make outputs values: the originals of copies get the outputs' names, unless inputs or outputs themselves. Return
    those copies, with the names of the input or output."""
    copies: dict[str, str] = {}
    hidden = [output for output in model.graph.outputs if output.name in set(names)]
    visible = [output for output in model.graph.outputs if output.name not in set(names)]
    model.graph.outputs[:] = visible
    visible_ids = set(map(id, visible))
    for value in hidden:
        source = value
        while (node := source.producer()) is not None and node.op_type == "Identity":
            source = node.inputs[0]
        if source is value:
            continue
        if source.producer() is None or id(source) in visible_ids:
            copies[value.name] = source.name
            continue
        value.name, source.name = f"{value.name}.copy", value.name
        visible_ids.add(id(source))
    common.RemoveUnusedNodesPass()(model)
    return copies


def _strip(model: onnx.ModelProto, name: str) -> None:
    """Remove the exporter's metadata, five entries per node."""
    graph = model.graph
    for item in [model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    del graph.value_info[:]
    graph.name = name


def without_inputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Remove inputs."""
    dropped = set(names)
    refill(model.graph.input, [value for value in model.graph.input if value.name not in dropped])


def with_random_nodes(model: onnx.ModelProto, draws: Sequence[DrawnInput]) -> None:
    """Replace each input of random numbers by a random node without a seed, with further nodes for integers."""
    names = draw_names(len(draws))
    inputs = {value.name for value in model.graph.input}
    without_inputs(model, names)
    nodes = [node for name, draw in zip(names, draws) if name in inputs for node in _random_nodes(model, name, draw)]
    rest = list(model.graph.node)
    refill(model.graph.node, [*nodes, *rest])


def _random_nodes(model: onnx.ModelProto, name: str, drawn: DrawnInput) -> list[onnx.NodeProto]:
    """Nodes drawing an input's values."""
    draw, make = drawn.draw, onnx.helper.make_node
    if draw.distribution is Distribution.NORMAL:
        return [make("RandomNormal", [], [name], name=name, shape=drawn.shape)]
    if draw.distribution is Distribution.UNIFORM:
        return [make("RandomUniform", [], [name], name=name, shape=drawn.shape)]
    uniform, part = f"{name}.uniform", f"{name}.part"
    if draw.distribution is Distribution.PERMUTATION:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(drawn.shape[-1:]), f"{name}.count"))
        return [
            make("RandomUniform", [], [uniform], name=uniform, shape=drawn.shape),
            make("TopK", [uniform, f"{name}.count"], [part, name], name=name),
        ]
    return [
        make(
            "RandomUniform", [], [uniform], name=uniform, shape=drawn.shape, low=float(draw.low), high=float(draw.high)
        ),
        make("Floor", [uniform], [part], name=part),
        make("Cast", [part], [name], name=name, to=onnx.TensorProto.INT64),
    ]


def unread_inputs(model: onnx.ModelProto) -> list[str]:
    """Inputs no node reads."""
    read = {name for node in model.graph.node for name in node.input}
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                read |= {name for inner in attribute.g.node for name in inner.input}
    return [value.name for value in model.graph.input if value.name not in read]


def with_values(
    model: onnx.ModelProto, states: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> Graph:
    """The model as a graph with first values of states and with constants, no longer inputs."""
    graph = graph_of(model)
    for name, value in {**states, **constants}.items():
        if name in graph.inputs and not isinstance(value, FakeTensor):
            graph.initializers[name] = Tensor(graph.inputs[name], array=array_over(value))
    for name in constants:
        graph.inputs.pop(name, None)
    return graph
