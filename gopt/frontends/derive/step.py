"""Builds a training step: forward, loss, backward and update, simplified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import ModelProto

from gopt.autodiff.backward import tidy
from gopt.autodiff.differentiate import differentiate
from gopt.autodiff.operators import names_of
from gopt.documents.roles import RolesRecord
from gopt.errors import OptionError
from gopt.frontends.derive.forward_model import ForwardModel, unknown_shape, with_constants
from gopt.frontends.derive.losses import LOSS, LOSSES, LossNames
from gopt.frontends.derive.options import CRITERION, DYNAMIC, DeriveOptions, flag
from gopt.frontends.derive.parameters import TrainedConstants, choose
from gopt.frontends.derive.predictions import before, predicted
from gopt.frontends.derive.training_mode import add_outputs, updated_statistics, write_out
from gopt.frontends.derive.update import FIRST_SCALE, SCALE, DerivedUpdate
from gopt.frontends.derive.writer import StepWriter, scalar
from gopt.frontends.functional_step import add_roles
from gopt.ir.free_names import FreeNames
from gopt.ir.graph import Graph
from gopt.ir.load import graph_of
from gopt.ir.model_file import refill
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.ir.types import FLOATS, TensorType, numpy_dtype
from gopt.text.sanitize import listed, show
from gopt.text.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Step:
    """A derived step. ``source``: the forward with the loss, before differentiation. ``lr``: the input with the
    learning rate, or ''. ``parameters``: the names of trained constants. ``states``: the number of replaced values."""

    graph: Graph
    source: Graph
    loss: str
    lr: str
    parameters: tuple[str, ...]
    states: int
    notes: tuple[str, ...]


def write_step(forward: ForwardModel, options: DeriveOptions) -> Step:
    """The training step of a forward model. Raises OptionError, UnsupportedError."""
    choice = choose(forward, options.trainable, options.freeze)
    model = with_constants(forward, {*choice.trained, *updated_statistics(forward, options)})
    free = FreeNames({*names_of(model), *forward.stored})
    mode = write_out(model, forward, options, free)
    batch, loss, remarks = _attach_loss(model, forward, options, free)
    batch += mode.draws
    add_outputs(model, mode)
    scale = _scale(model, options, free)
    whole = differentiate(model, loss, choice.trained, scale)
    notes = [*remarks, *mode.notes, *choice.notes, *_unread(choice, whole.unread)]
    parameters = {name: forward.weights[name] for name in choice.trained if name in whole.gradients}
    if not parameters:
        raise OptionError(f"{show(loss)} depends on no parameter", "choose another --loss, or --trainable")
    batch = [name for name in batch if name not in parameters]
    writer = StepWriter(whole.model, free)
    if options.loss_scale == DYNAMIC:
        writer.values[scale] = scalar(FIRST_SCALE)
    writer.states.update(mode.statistics)
    writer.values.update((name, forward.stored[name]) for name in mode.statistics)
    # Behind a loop inference knows no shape; a gradient has the shape of its parameter.
    whole.model.graph.value_info.extend(value_info(whole.gradients[name], parameters[name].type) for name in parameters)
    update = DerivedUpdate(writer, options, parameters, dict(whole.gradients))
    update.write(scale)
    _order_inputs(whole.model, batch, writer)
    graph = graph_of(whole.model)
    _store(graph, forward, writer)
    tidy(graph, whole, {name for node in model.graph.node for name in node.output})
    _add_roles(graph, loss, writer, batch, _of_batch(graph, batch, whole.gradients))
    notes += [*_vanishing(options, parameters), *_renamed(graph, free)]
    return Step(graph, _source(model, forward), loss, update.lr, tuple(parameters), len(writer.states), tuple(notes))


def _source(model: ModelProto, forward: ForwardModel) -> Graph:
    """The model as a graph, with the stored values."""
    graph = graph_of(model)
    for name in forward.stored.keys() & graph.inputs.keys():
        graph.initializers[name] = forward.stored[name]
    return graph


def _attach_loss(
    model: ModelProto, forward: ForwardModel, options: DeriveOptions, free: FreeNames
) -> tuple[list[str], str, list[str]]:
    """Append the loss; returns the names of the batch's inputs, the name of the loss, and remarks."""
    batch = list(forward.inputs)
    if options.loss not in LOSSES:
        return batch, _own_loss(forward, options), []
    if options.loss in forward.outputs and not options.prediction:
        raise OptionError(
            f"--loss {options.loss} is a loss to attach, and the model has an output of that name",
            "--prediction OUTPUT attaches the loss; rename the output to take it as the loss itself",
        )
    rule, prediction = LOSSES[options.loss], predicted(forward, options.prediction)
    names = LossNames(free.take(rule.target), free.take(LOSS), free.prefix("criterion"))
    kind = forward.types[prediction]
    if not kind.static:
        raise unknown_shape(forward, prediction)
    read = before(forward, prediction, rule.inverse, kind, options.criterion.class_axis)
    attachment = rule.attach(read or prediction, kind, names, options.criterion)
    model.graph.node.extend(attachment.nodes)
    model.graph.input.append(value_info(names.target, attachment.target))
    model.graph.output.append(value_info(names.loss, attachment.loss))
    remark = f"{show(prediction)} is a {rule.inverse}, which {options.loss} applies itself: it reads {show(read)}"
    return [*batch, names.target], names.loss, [remark] if read else []


def _own_loss(forward: ForwardModel, options: DeriveOptions) -> str:
    """The output of the model named by ``--loss``; raises OptionError unless a scalar."""
    name = options.loss
    if name not in forward.outputs:
        names = [*LOSSES, *forward.outputs]
        raise OptionError(
            f"--loss {show(name)} is neither a loss nor an output of the model",
            did_you_mean(name, names) or f"there are {', '.join(map(show, names))}",
        )
    options_set = [flag(option) for option in ("prediction", *CRITERION) if getattr(options, option) not in ("", None)]
    if options_set:
        raise OptionError(f"--loss {show(name)} is an output: nothing is attached", f"leave out {options_set[0]}")
    kind = forward.types[name]
    if not kind.static:
        raise unknown_shape(forward, name)
    if kind.dtype not in FLOATS or kind.elements != 1:
        raise OptionError(f"--loss {show(name)} is {kind}, no floating scalar", "name a scalar, or take --loss mse")
    return name


def _scale(model: ModelProto, options: DeriveOptions, free: FreeNames) -> str:
    """The name of the loss scale, or ''."""
    if options.loss_scale is None:
        return ""
    name = free.take(SCALE)
    if options.loss_scale == DYNAMIC:
        model.graph.input.append(value_info(name, TensorType("float32", ())))
    else:
        value = np.array(float(options.loss_scale), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return name


def _unread(choice: TrainedConstants, unread: tuple[str, ...]) -> list[str]:
    """Remarks on parameters without a gradient; raises OptionError where a pattern of ``--trainable`` names no
    others."""
    for names in choice.asked:
        if names.issubset(unread):
            raise OptionError(f"--trainable: the loss does not depend on {show(min(names))}", "leave it out")
    if not unread:
        return []
    return [f"not trained, for the loss does not depend on them: {listed([*map(show, unread)])}"]


def _order_inputs(model: ModelProto, batch: list[str], writer: StepWriter) -> None:
    """Order the inputs: batch, hyper-parameters, parameters, their states."""
    inputs = {value.name: value for value in model.graph.input}
    states = list(writer.states)
    order = [*batch, *(name for name in inputs if name not in batch and name not in writer.states), *states]
    refill(model.graph.input, (inputs[name] for name in order))


def _vanishing(options: DeriveOptions, parameters: Mapping[str, Tensor]) -> list[str]:
    """A remark on an epsilon of zero in the type of a parameter."""
    eps = {**options.rule.options, **options.optimizer_options}.get("eps", 0.0)
    types = sorted(
        {param.type.dtype for param in parameters.values() if eps and not numpy_dtype(param.type.dtype).type(eps)}
    )
    return [
        f"eps {eps:g} is zero in {dtype}: an update divides by zero where gradients vanish (--eps 1e-4)"
        for dtype in types
    ]


def _renamed(graph: Graph, free: FreeNames) -> list[str]:
    """A remark on inputs and outputs of the step whose usual names are taken by the model."""
    renamed = {name: wished for name, wished in free.renamed.items() if name in graph.inputs or name in graph.outputs}
    names = [f"{show(wished)} is {show(name)}" for name, wished in renamed.items()]
    return [f"the model uses names of the step, so that {listed(names)}"] if names else []


def _add_roles(graph: Graph, loss: str, writer: StepWriter, batch: Sequence[str], gradients: Mapping[str, str]) -> None:
    """Write roles as metadata, with gradients, so the check confirms these values."""
    record = RolesRecord(loss=loss, states=writer.states, params=gradients, batch=tuple(batch))
    add_roles(graph.header, record)
    graph.metadata.update((entry.key, entry.value) for entry in graph.header.metadata_props)


def _of_batch(graph: Graph, batch: Sequence[str], gradients: Mapping[str, str]) -> dict[str, str]:
    """The gradients depending on the batch. Others are constants, or follow from states alone, as a penalty's."""
    read, results = set(batch), set[str]()
    for node in graph.nodes:
        if not read.isdisjoint(node.reads):
            results.update(node.outputs)
            read.update(node.outputs)
    return {name: gradient for name, gradient in gradients.items() if gradient in results}


def _store(graph: Graph, forward: ForwardModel, writer: StepWriter) -> None:
    """Store first values of states; a stored value other than a state becomes a constant again."""
    for name, value in {**forward.stored, **writer.values}.items():
        if name in graph.inputs and (forward.values or name not in writer.states):
            graph.initializers[name] = replace(value, type=graph.inputs[name])
            if name not in writer.states:
                del graph.inputs[name]
