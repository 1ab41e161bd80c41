"""Joins a divided step: an inference graph whose model has the algorithm beside it.

States read by inference are initializers of the inference graph, optimizer states initializers of the algorithm.
External values are all stored in the inference graph: readers look for external data there alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from onnx import GraphProto, ModelProto, TrainingInfoProto

from gopt.analysis.training import TrainingGraph
from gopt.artifact.serialize import declared_results, model_bytes, named_tensor
from gopt.artifact.states_file import INLINE
from gopt.documents.roles import RolesRecord
from gopt.errors import InputError
from gopt.ir.graph import STEP_ROLES, Graph, Node
from gopt.ir.nodes import nested
from gopt.ir.opaque.function_export import prepare
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.offline import merge
from gopt.offline.training_info.division import StepDivision
from gopt.text.sanitize import show

OLDEST = 7
"""Version of the file format since which models have ``training_info``."""


def training_model(training: TrainingGraph, parts: StepDivision, start: Graph | None = None) -> Graph:
    """The inference graph, with the algorithm in the header; ``start``: the start-up graph to keep.

    Raises InputError for a state without a value.
    """
    inference, stored = _placed(training, parts)
    info = TrainingInfoProto()
    updates = _write_algorithm(info.algorithm, training, parts, inference, stored)
    for state, value in updates.items():
        info.update_binding.add(key=state, value=value)
    header = ModelProto()
    header.CopyFrom(inference.header)
    header.ir_version = max(header.ir_version, OLDEST)
    properties = (prop for prop in training.graph.header.metadata_props if not prop.key.startswith("gopt."))
    header.metadata_props.extend(properties)
    header.metadata_props.add(key=STEP_ROLES, value=_roles(training, parts, inference, updates))
    prepare(header, parts.functions)
    if start is not None:
        _keep_initialization(header, info, start, stored.keys() | inference.initializers.keys())
    header.training_info.append(info)
    return replace(inference, header=header, name=training.graph.name)


def _placed(training: TrainingGraph, parts: StepDivision) -> tuple[Graph, dict[str, Tensor]]:
    """The inference graph with its stored values, and the stored values of the algorithm."""
    step, states, inference = training.graph, training.state_of(), parts.inference
    unknown = next((name for name in states if name not in step.initializers), None)
    if unknown is not None:
        raise InputError(
            f"{show(unknown)} has no value, and training_info replaces initializers",
            "gopt load-state gives a step values, --state a run",
        )
    read = {*states, *step.inputs, *(name for node in parts.nodes for name in node.reads)}
    constants = {
        name: tensor for name, tensor in step.initializers.items()
        if name in read and name not in inference.initializers
    }  # fmt: skip
    beside: list[str] = []
    if sum(tensor.nbytes for tensor in (*constants.values(), *inference.initializers.values())) > merge.EMBED:
        beside = [name for name, tensor in constants.items() if tensor.nbytes > INLINE]
    fed = {  # a value for those who feed none
        name: type for name, type in step.inputs.items() if name in inference.initializers and name not in states
    }  # fmt: skip
    stored = inference.initializers | {name: constants.pop(name) for name in beside}
    return replace(inference, inputs=inference.inputs | fed, initializers=stored), constants


def _write_algorithm(
    body: GraphProto, training: TrainingGraph, parts: StepDivision, inference: Graph, stored: Mapping[str, Tensor]
) -> dict[str, str]:
    """Fill in the algorithm; return each state with its new value."""
    step, states = training.graph, training.state_of()
    body.name = "algorithm"
    body.node.extend(node.to_proto() for node in parts.nodes)
    computed = _made(parts, inference)
    replaced: dict[str, str] = {}
    for state in training.states:
        value = parts.name(state.updated)
        if value not in computed:  # an input or a stored value: the standard wants a result
            copy = parts.free.take(f"{state.tensor}_out")
            body.node.append(Node("Identity", [value], [copy]).to_proto())
            value = copy
        replaced[state.updated] = value
    batch = {name: type for name, type in step.inputs.items() if name not in states and name not in inference.inputs}
    body.input.extend(value_info(name, type) for name, type in batch.items())
    body.initializer.extend(named_tensor(name, tensor) for name, tensor in stored.items())
    results = {replaced.get(name) or parts.name(name): type for name, type in step.outputs.items()}
    shown = {name: type for name, type in results.items() if name not in inference.outputs}
    body.output.extend(value_info(name, type) for name, type in shown.items())
    of_step = {name: value for value, name in parts.names.items()}
    declared = declared_results(parts.nodes, lambda name: step.type_of(of_step.get(name, name)))
    body.value_info.extend(info for info in declared if info.name not in shown)
    return {state.tensor: replaced[state.updated] for state in training.states}


def _made(parts: StepDivision, inference: Graph) -> set[str]:
    return {name for node in (*inference.nodes, *parts.nodes) for name in node.outputs if name}


def _roles(training: TrainingGraph, parts: StepDivision, inference: Graph, updates: Mapping[str, str]) -> str:
    """Roles that the data flow of the joined graph may not settle: the loss, gradients, the batch."""
    results = _made(parts, inference)
    gradients = {name: parts.name(value) for name, value in training.gradients.items() if parts.name(value) in results}
    shared = tuple(parts.name(value) for value in training.shared.values())
    return RolesRecord(
        loss=training.loss,
        more_losses=training.losses[1:],
        states=updates,
        params=gradients,
        batch=tuple(training.batch),
        shared=shared,
    ).text()


def _keep_initialization(header: ModelProto, info: TrainingInfoProto, start: Graph, stored: Collection[str]) -> None:
    """Keep the source's computation of first values, for the values that the model stores."""
    bound = [name for name in start.outputs if name in stored]
    if not bound:
        return
    info.initialization.CopyFrom(ModelProto.FromString(model_bytes(start, {}, "", {})).graph)
    for name in bound:
        info.initialization_binding.add(key=name, value=name)
    domains = {opset.domain for opset in header.opset_import}
    used = {node.domain for node in nested(info.initialization.node)} - domains
    header.opset_import.extend(opset for opset in start.header.opset_import if opset.domain in used)
