"""Names of a graph: each is unique, and defined before reading."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto

from gopt.errors import InputError
from gopt.ir.nodes import reads
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, dtype_name, known
from gopt.text.sanitize import show


def broken(text: str, *hints: str) -> InputError:
    """The refusal of a contradictory entry; the default hint says who can mend it."""
    return InputError(f"training_info: {text}", *(hints or ("correct it in the program that wrote the model",)))


def stored_types(graph: GraphProto) -> dict[str, TensorType]:
    """Initializers with types, without sparse initializers."""
    return {tensor.name: TensorType(dtype_name(tensor.data_type), tuple(tensor.dims)) for tensor in graph.initializer}


def join(graph: GraphProto, algorithm: GraphProto) -> None:
    """Put the algorithm behind the inference graph; a common input is a single input.

    Raises InputError for a value defined twice, or an input declared with two types.
    """
    _refuse_second_definitions(graph, algorithm)
    shared = _shared_inputs(graph, algorithm)
    outputs = _outputs(graph, algorithm)
    graph.node.extend(algorithm.node)
    graph.initializer.extend(algorithm.initializer)
    graph.sparse_initializer.extend(algorithm.sparse_initializer)
    graph.input.extend(value for value in algorithm.input if value.name not in shared)
    graph.output.extend(value for value in algorithm.output if value.name not in outputs)
    graph.value_info.extend(algorithm.value_info)


def check_reads(graph: GraphProto, what: str) -> None:
    """Raise InputError for a node with an operand not defined, or not yet; ``what``: the graph's name in messages."""
    names = {name for name, _ in _defined(graph)}
    available = {value.name for value in graph.input} | {name for name, verb in _defined(graph) if verb == "stores"}
    for node in graph.node:
        for name in sorted(reads(node) - available):
            label = f"{node.op_type} {show(next((value for value in node.output if value), node.name))}"
            if name in names:
                raise broken(f"{label} of {what} reads {show(name)} before a node makes it", "sort the nodes")
            raise broken(f"{label} of {what} reads {show(name)}, which nothing makes")
        available.update(node.output)


def _defined(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """The values stored and made in a graph, each with the verb."""
    for tensor in graph.initializer:
        yield tensor.name, "stores"
    for sparse in graph.sparse_initializer:
        yield sparse.values.name, "stores"
    for node in graph.node:
        for name in node.output:
            if name:
                yield name, "makes"


def _refuse_second_definitions(graph: GraphProto, algorithm: GraphProto) -> None:
    owners: dict[str, str] = {}
    fed = {value.name for value in graph.input}
    for owner, part in (("the inference graph", graph), ("the algorithm", algorithm)):
        inputs = {value.name for value in part.input}
        for name, verb in _defined(part):
            if name in owners:
                raise broken(f"{show(name)} names two values: {owners[name]} it, and {owner} {verb} it again")
            if name in fed and (verb == "makes" or name not in inputs):
                raise broken(f"{show(name)} names two values: an input of the inference graph, and {owner} {verb} it")
            if name in inputs and verb == "makes":
                raise broken(f"{show(name)} names two values: an input of {owner}, which makes it too")
            owners[name] = f"{owner} {verb}"
    for info in algorithm.input:
        if owners.get(info.name) == "the inference graph makes":
            raise broken(
                f"{show(info.name)} is an input of the algorithm, and the inference graph makes it",
                "leave it out of the algorithm's inputs: it reads values of the inference graph by their names",
            )


def _outputs(graph: GraphProto, algorithm: GraphProto) -> set[str]:
    """Outputs of the inference graph; raises InputError for an output declared with another type in the algorithm."""
    types = {value.name: read_type(value.type) for value in graph.output}
    for info in algorithm.output:
        declared, second = types.get(info.name), read_type(info.type)
        agrees = declared is None or (second.dtype == declared.dtype and second.may_have_shape_of(declared))
        if not agrees and known(second.dtype):
            raise broken(
                f"output {show(info.name)} of the algorithm is {second}, in the inference graph it is {declared}",
                "declare it the same way in both",
            )
    return set(types)


def _shared_inputs(graph: GraphProto, algorithm: GraphProto) -> set[str]:
    """Inputs of both graphs; raises InputError for one of two types."""
    types = stored_types(graph) | {value.name: read_type(value.type) for value in graph.input}
    for info in algorithm.input:
        declared, second = types.get(info.name), read_type(info.type)
        if declared is not None and second != declared:
            raise broken(
                f"input {show(info.name)} of the algorithm is {second}, in the inference graph it is {declared}",
                "declare it the same way in both",
            )
    return {value.name for value in graph.input}
