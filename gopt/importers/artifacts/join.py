"""The roles of the values of a training graph, by the accumulators and the checkpoint's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.checkpoint import OptimizerGroup, OrtCheckpoint, Stored
from gopt.importers.artifacts.folder import ACCUMULATOR, DOMAIN, Artifacts, of_type
from gopt.importers.artifacts.hints import TOGETHER
from gopt.ir.external_data import show
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType

BUFFER = "_grad.accumulation.buffer"
"""The end of the name of a buffer, behind the name of its parameter."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained parameter, its gradient, and the places of value and moments in the checkpoint."""

    name: str
    type: TensorType
    gradient: str
    value: Stored
    moments: tuple[Stored, ...] = ()


@dataclass(frozen=True, slots=True)
class Statistic:
    """A running mean or variance of a BatchNormInternal. ``made``: the replacing result; ``value``: None if stored in
    the training graph."""

    name: str
    made: str
    value: Stored | None


@dataclass(frozen=True, slots=True)
class Joined:
    """The roles in a training graph. ``apart``: values of accumulators, not in any step."""

    parameters: tuple[Trained, ...]
    frozen: tuple[Stored, ...]
    statistics: tuple[Statistic, ...]
    batch: tuple[str, ...]
    outputs: tuple[str, ...]
    apart: frozenset[str]
    step: int

    @property
    def loss(self) -> str:
        return self.outputs[0]


def join(parts: Artifacts) -> Joined:
    """Match the training graph with the checkpoint.

    Raises InputError where names, shapes or counts do not match, UnsupportedError for several groups of parameters.
    """
    try:
        return _joined(parts)
    except (InputError, UnsupportedError) as error:
        hint = f"the checkpoint is {show(parts.checkpoint.path.name)}"
        raise type(error)(error.message, *error.hints, hint) from None


def _joined(parts: Artifacts) -> Joined:
    body, checkpoint = parts.training.model.graph, parts.checkpoint
    inputs = {value.name: read_type(value.type) for value in body.input}
    adds = list(of_type(parts.training.model, ACCUMULATOR))
    trained = {tensor.name: tensor for tensor in checkpoint.trainable}
    frozen = {tensor.name: tensor for tensor in checkpoint.frozen}
    group = _group(checkpoint)
    moments = {} if group is None else {parameter.parameter: parameter.states for parameter in group.parameters}
    owners = _owners(adds, inputs, trained)
    parameters = tuple(_trained(node, name, inputs, trained, moments) for node, name in zip(adds, owners))
    _check_counts(parameters, trained, moments, group is not None)
    for name in frozen.keys() & inputs.keys():
        _check_type(frozen[name], inputs[name])
    statistics = tuple(_statistics(body.node, inputs, frozen, {tensor.name for tensor in body.initializer}))
    apart = frozenset(name for node in adds for name in (node.input[0], *node.input[2:], *node.output))
    inputs_known = {*trained, *frozen, *apart, *(tensor.name for tensor in body.initializer)}
    outputs = tuple(value.name for value in body.output if value.name not in apart)
    if not outputs:
        raise InputError(
            "the training graph has no loss among its outputs",
            "generate the artifacts with a loss: generate_artifacts(..., loss=...)",
        )
    running = {statistic.name for statistic in statistics}
    return Joined(
        parameters, tuple(tensor for name, tensor in frozen.items() if name in inputs and name not in running),
        statistics, tuple(name for name in inputs if name not in inputs_known), outputs, apart,
        0 if group is None else group.step,
    )  # fmt: skip


def _group(checkpoint: OrtCheckpoint) -> OptimizerGroup | None:
    """The group of parameters with optimizer states; None without such states."""
    if len(checkpoint.groups) > 1:
        raise UnsupportedError(
            f"the checkpoint has {len(checkpoint.groups)} groups of parameters",
            "train all parameters in one group",
        )
    return checkpoint.groups[0] if checkpoint.groups else None


def _owners(adds: Sequence[NodeProto], inputs: Mapping[str, TensorType], trained: Mapping[str, Stored]) -> list[str]:
    """Return the parameter of each accumulator.

    The buffer is named after the parameter: an input of the graph, by whose name ONNX Runtime itself finds the
    parameter. Names inside the graph are free. A buffer with another name belongs to the only parameter of the type
    without a buffer. Raises InputError for no or several such parameters.
    """
    for node in adds:
        if len(node.input) < 2 or node.input[0] not in inputs:
            raise InputError(
                f"{ACCUMULATOR} {show(node.name)} does not add to a buffer that is an input of the graph", TOGETHER
            )
    named = {node.input[0]: node.input[0].removesuffix(BUFFER) for node in adds if node.input[0].endswith(BUFFER)}
    unowned = [tensor for tensor in trained.values() if tensor.name in inputs and tensor.name not in named.values()]
    for node in adds:
        buffer = node.input[0]
        if buffer in named:
            continue
        alike = [tensor.name for tensor in unowned if tensor.type == inputs[buffer]]
        if len(alike) != 1:
            subject = f"{len(alike)} parameters without a buffer have" if alike else "no parameter without a buffer has"
            raise InputError(
                f"the parameter of the buffer {show(buffer)} is not known: {subject} its type {inputs[buffer]}",
                f"name the buffer of a parameter NAME as NAME{BUFFER}, as onnxruntime does",
            )
        named[buffer] = alike[0]
        unowned = [tensor for tensor in unowned if tensor.name != alike[0]]
    return [named[node.input[0]] for node in adds]


def _trained(
    node: NodeProto, name: str, inputs: Mapping[str, TensorType], trained: Mapping[str, Stored],
    moments: Mapping[str, tuple[Stored, ...]],
) -> Trained:  # fmt: skip
    buffer, gradient = node.input[:2]
    if name not in inputs:
        raise InputError(
            f"buffer {show(buffer)} belongs to {show(name)}, which is not an input of the training graph", TOGETHER
        )
    if name not in trained:
        raise InputError(
            f"parameter {show(name)} of the training graph is not among those the checkpoint trains", TOGETHER
        )
    _check_type(trained[name], inputs[name])
    if inputs[buffer] != inputs[name]:
        raise InputError(
            f"buffer {show(buffer)} is {inputs[buffer]}, and its parameter {show(name)} {inputs[name]}", TOGETHER
        )
    states = moments.get(name, ())
    for row in states:
        if row.type != inputs[name]:
            raise InputError(
                f"{show(row.name)} of {show(name)} is {row.type} in the checkpoint, and the parameter {inputs[name]}",
                TOGETHER,
            )
    return Trained(name, inputs[name], gradient, trained[name], states)


def _check_type(stored: Stored, type: TensorType) -> None:
    if stored.type != type:
        raise InputError(
            f"{show(stored.name)} is {stored.type} in the checkpoint, and {type} in the training graph", TOGETHER
        )


def _check_counts(
    parameters: tuple[Trained, ...], trained: Mapping[str, Stored],
    moments: Mapping[str, tuple[Stored, ...]], optimized: bool,
) -> None:  # fmt: skip
    """The optimizer's sequences have a place for each trained parameter: lists of other lengths are no pair."""
    names = {parameter.name for parameter in parameters}
    for what, names_used in (
        ("parameter", [parameter.name for parameter in parameters]),
        ("gradient", [parameter.gradient for parameter in parameters]),
    ):
        twice = next((name for name, count in Counter(names_used).items() if count > 1), None)
        if twice is not None:
            raise InputError(f"{what} {show(twice)} has two accumulators", TOGETHER)
    surplus = trained.keys() - names
    if surplus:
        raise InputError(
            f"{show(min(surplus))} is trained by the checkpoint, and the training graph has no gradient of it", TOGETHER
        )
    if optimized and moments.keys() != names:
        raise InputError(
            f"the checkpoint has optimizer states of {len(moments)} parameters, and the training graph trains "
            f"{len(names)}: {show(min(moments.keys() ^ names))} has no counterpart",
            TOGETHER,
        )


def _statistics(
    nodes: Iterable[NodeProto], inputs: Mapping[str, TensorType], frozen: Mapping[str, Stored], stored: set[str]
) -> Iterator[Statistic]:
    """Inputs 3 and 4 of each BatchNormInternal; its kernel writes results 1 and 2 over them."""
    for node in nodes:
        if node.op_type != "BatchNormInternal" or node.domain != DOMAIN:
            continue
        for statistic, output in zip(node.input[3:5], [*node.output[1:3], "", ""]):
            if statistic not in stored and statistic not in frozen:
                raise InputError(f"statistic {show(statistic)} of {show(node.name)} has no value", TOGETHER)
            if not output:
                raise InputError(
                    f"BatchNormInternal {show(node.name)} does not show the new {show(statistic)}",
                    "export the forward in training mode, and generate the artifacts again",
                )
            yield Statistic(statistic, output, frozen.get(statistic) if statistic in inputs else None)
