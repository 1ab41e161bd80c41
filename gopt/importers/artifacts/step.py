"""One functional step of standard operators from a folder of artifacts.

The training graph without its accumulators, each gradient operator lowered, then the clip and the optimizer over all
parameters. Values stay in the checkpoint until somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto

from gopt.documents.roles import RolesRecord
from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.folder import ACCUMULATOR, Artifacts
from gopt.importers.artifacts.hints import EXPORT_AGAIN, SAVE_AGAIN, TOGETHER
from gopt.importers.artifacts.join import Joined, Trained, join
from gopt.importers.artifacts.lowering.builder import Builder
from gopt.importers.artifacts.lowering.table import LOWERINGS
from gopt.importers.artifacts.lowering.value_types import value_types
from gopt.importers.artifacts.optimizer import OrtOptimizer, Update, clip_nodes, read_optimizer, update_nodes
from gopt.ir.external_data import naming, show
from gopt.ir.graph import ROLES, Graph, Node
from gopt.ir.load import checked_graph
from gopt.ir.model_file import ModelFile, refill
from gopt.ir.nodes import nested
from gopt.ir.opaque.expand import expand
from gopt.ir.opset import opset_of
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.ir.types import TensorType, numpy_dtype

OPSET = 17
"""The oldest operator set of a step: earlier ones have no LayerNormalization, and no scatter that adds."""
OLDEST = 13
RAISED = ("RoiAlign",)
"""Operators that mean something else in operator set 17 than in 13."""
UPDATED = "_out"
UPDATE = "update"
"""The prefix of values inside of the expanded optimizer."""


def step_of(parts: Artifacts) -> Graph:
    """The step of a folder, with roles in the metadata and values that stay in the checkpoint.

    Raises InputError where the parts do not fit, UnsupportedError for an operator with no record.
    """
    with naming(str(parts.optimizer.path)):
        optimizer = read_optimizer(parts.optimizer.model)
    with naming(str(parts.training.path)):
        step = _Step(parts, join(parts), optimizer)
        model = step.model()
        graph = checked_graph(ModelFile(model.SerializeToString(deterministic=True)), str(parts.training.path))
        _check_gradients(graph, step.joined)
    with naming(str(parts.optimizer.path)):  # what is opaque in the graph is the optimizer
        graph = _plain(expand(graph, prefix=UPDATE), {constant.name for constant in step.builder.constants})
    with naming(str(parts.checkpoint.path)):
        graph.initializers.update(step.values())
    for frozen in step.joined.frozen:  # constants of the step; inputs where they have no value
        if frozen.name in graph.initializers:
            del graph.inputs[frozen.name]
    return graph


def _check_gradients(graph: Graph, joined: Joined) -> None:
    """Raise InputError where what is added to a buffer has another type than the parameter."""
    for row in joined.parameters:
        type = graph.type_of(row.gradient)
        if type.static and type != row.type:
            raise InputError(
                f"the gradient {show(row.gradient)} of {show(row.name)} is {type}, and {row.name} {row.type}",
                EXPORT_AGAIN,
            )


def _plain(graph: Graph, constants: set[str]) -> Graph:
    """The graph as if its update had been written in standard operators; of ``constants`` those that are read."""
    nodes = [_standard(node) for node in graph.nodes]
    for name in constants.difference(*(node.reads for node in nodes)):
        graph.initializers.pop(name, None)
    refill(graph.header.opset_import, [opset for opset in graph.header.opset_import if opset.domain in ("", "ai.onnx")])
    return replace(graph, nodes=nodes, file_nodes=None)


def _standard(node: Node) -> Node:
    if node.origin is not None:
        proto = node.to_proto()
        del proto.metadata_props[:]
        node.proto, node.origin, node.made_by = proto, None, ""
    return node


class _Step:
    """The model of one folder while it is put together."""

    def __init__(self, parts: Artifacts, joined: Joined, optimizer: OrtOptimizer) -> None:
        self.parts, self.joined, self.optimizer = parts, joined, optimizer
        self.source = parts.training.model
        body = self.source.graph
        if self.source.functions:
            raise UnsupportedError("the training graph has functions of its own", "export the forward without them")
        self.types = value_types(self.source)
        names = {name for node in body.node for name in (*node.input, *node.output)}
        names |= {value.name for value in (*body.input, *body.initializer)}
        self.opset = _opset(self.source)
        self.builder = Builder(
            self.opset, self.types, {name: node for node in body.node for name in node.output if name},
            {tensor.name: tensor for tensor in body.initializer}, names,
        )  # fmt: skip
        self.outputs = {state: self.builder.fresh(f"{state}{UPDATED}") for state in self._states()}

    # --- states ---------------------------------------------------------------------------------------------------

    def _moment(self, parameter: Trained, number: int) -> str:
        return f"{parameter.name}.momentum{number}"

    def _slots(self) -> Iterator[tuple[str, str, Trained, int]]:
        """Moment, slot, parameter and place of each state of the optimizer."""
        for parameter in self.joined.parameters:
            for number, slot in enumerate(self.optimizer.moments):
                yield self._moment(parameter, number), slot, parameter, number

    def _states(self) -> list[str]:
        """States that have an output of their own name, in the order of the step."""
        counts = [self.optimizer.count] if self.optimizer.count else []
        return [*counts, *(param.name for param in self.joined.parameters), *(name for name, *_ in self._slots())]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """The values of states, none for those that the checkpoint names without a value."""
        checkpoint, optimizer = self.parts.checkpoint, self.optimizer
        stored = [(parameter.name, parameter.value) for parameter in self.joined.parameters]
        stored += [(tensor.name, tensor) for tensor in self.joined.frozen]
        stored += [(row.name, row.value) for row in self.joined.statistics if row.value is not None]
        for name, content in stored:
            if (value := checkpoint.value(content)) is not None:
                yield name, value
            elif not checkpoint.nominal:
                raise InputError(f"{show(name)} has no value in the checkpoint", SAVE_AGAIN)
        for name, _, parameter, number in self._slots():
            if number < len(parameter.moments):
                value = checkpoint.value(parameter.moments[number])
            elif parameter.moments:
                raise InputError(
                    f"{show(parameter.name)} has {len(parameter.moments)} moments in the checkpoint, and "
                    f"{optimizer.node.op_type} keeps {len(optimizer.moments)}",
                    TOGETHER,
                )
            else:  # the optimizer was not run yet
                value = Tensor(parameter.type, array=np.zeros(parameter.type.dims, numpy_dtype(parameter.type.dtype)))
            if value is not None:
                yield name, value
        if optimizer.count:
            yield optimizer.count, Tensor(TensorType("int64", (1,)), array=np.array([self.joined.step]))

    # --- the model --------------------------------------------------------------------------------------------------

    def model(self) -> ModelProto:
        model = ModelProto(ir_version=max(self.source.ir_version, 8), producer_name=self.source.producer_name)
        model.producer_version = self.source.producer_version
        model.opset_import.append(onnx.helper.make_opsetid("", self.opset))
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        body = model.graph
        body.name = self.source.graph.name or "step"
        body.node.extend(self._lowered())
        body.node.extend(self._update())
        body.initializer.extend(self.source.graph.initializer)
        body.initializer.extend(self.builder.constants)
        body.input.extend(self._inputs())
        body.output.extend(self._outputs())
        names = {value.name for value in (*body.input, *body.output)}
        body.value_info.extend(
            value for value in self.source.graph.value_info if value.name not in names | self.joined.apart
        )
        entry = model.metadata_props.add()
        entry.key, entry.value = ROLES, self._roles().text()
        return model

    def _lowered(self) -> Iterator[NodeProto]:
        for node in self.source.graph.node:
            if node.op_type == ACCUMULATOR:
                continue
            record = LOWERINGS.get((node.domain, node.op_type))
            if record is not None:
                yield from record.nodes(self.builder, node)
                continue
            self._check_standard(node)
            yield from self.builder.learn([node])

    def _check_standard(self, node: NodeProto) -> None:
        """Raise UnsupportedError for an operator that is neither standard nor in the table."""
        for inner in nested([node]):
            try:
                onnx.defs.get_schema(inner.op_type, self.opset, "" if inner.domain == "ai.onnx" else inner.domain)
            except onnx.defs.SchemaError:
                raise UnsupportedError(
                    f"operator {show(f'{inner.domain}.{inner.op_type}'.lstrip('.'))} of node {show(inner.name)} has no "
                    "standard form in gopt",
                    "gopt/importers/artifacts/lowering/table.py takes a record for it",
                ) from None
            if inner.op_type in RAISED and self.opset != opset_of(self.source):
                raise UnsupportedError(
                    f"operator {inner.op_type} of node {show(inner.name)} changed after operator set "
                    f"{opset_of(self.source)}", f"export the forward for operator set {OPSET}",
                )  # fmt: skip

    def _update(self) -> list[NodeProto]:
        joined, optimizer, b = self.joined, self.optimizer, self.builder
        nodes: list[NodeProto] = []
        gradients = [parameter.gradient for parameter in joined.parameters]
        if optimizer.max_norm is not None:
            clipped = [b.fresh(f"{gradient}.clipped") for gradient in gradients]
            nodes += clip_nodes(b, gradients, clipped, optimizer.max_norm)
            gradients = clipped
        count = ""
        if optimizer.count:  # the operator takes the number of this update, from 1
            count = self.outputs[optimizer.count]
            nodes.append(onnx.helper.make_node("Add", [optimizer.count, b.array([1])], [count], "count"))
        slots = {"weight": [parameter.name for parameter in joined.parameters], "gradient": gradients}
        for name, slot, _, _ in self._slots():
            slots.setdefault(slot, []).append(name)
        pairs = optimizer.schema.pairs
        results = {
            pairs[slot]: [self.outputs[name] for name in names] for slot, names in slots.items() if slot != "gradient"
        }
        return [*nodes, *update_nodes(optimizer, Update(slots, results, count), b)]

    def _inputs(self) -> Iterable[ValueInfoProto]:
        declared = {value.name: value for value in self.source.graph.input}
        yield from (declared[name] for name in self.joined.batch)
        yield value_info(self.optimizer.rate, TensorType("float32", (1,)))
        if self.optimizer.count:
            yield value_info(self.optimizer.count, TensorType("int64", (1,)))
        yield from (declared[parameter.name] for parameter in self.joined.parameters)
        yield from (declared[tensor.name] for tensor in self.joined.frozen)
        yield from (value_info(name, parameter.type) for name, _, parameter, _ in self._slots())
        yield from (value_info(statistic.name, self.types[statistic.name]) for statistic in self.joined.statistics)

    def _outputs(self) -> Iterable[ValueInfoProto]:
        declared = {value.name: value for value in self.source.graph.output}
        yield from (declared[name] for name in self.joined.outputs)
        types = {name: parameter.type for name, _, parameter, _ in self._slots()}
        types |= {parameter.name: parameter.type for parameter in self.joined.parameters}
        types |= {self.optimizer.count: TensorType("int64", (1,))}
        yield from (value_info(output, types[name]) for name, output in self.outputs.items())
        yield from (value_info(statistic.made, self.types[statistic.name]) for statistic in self.joined.statistics)

    def _roles(self) -> RolesRecord:
        return RolesRecord(
            loss=self.joined.loss,
            states={**self.outputs, **{statistic.name: statistic.made for statistic in self.joined.statistics}},
            params={parameter.name: parameter.gradient for parameter in self.joined.parameters},
            batch=tuple(self.joined.batch),
        )


def _opset(model: ModelProto) -> int:
    version = opset_of(model)
    if version < OLDEST:
        raise UnsupportedError(
            f"the training graph is of operator set {version}", f"export the forward for operator set {OPSET}"
        )
    return max(version, OPSET)
