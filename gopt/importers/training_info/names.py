"""Names of a graph: each stands for one value, and is defined before a node reads it."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto

from gopt.errors import InputError
from gopt.ir.nodes import reads
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, dtype_name, known
from gopt.text.sanitize import show


def broken(text: str, *hints: str) -> InputError:
    """The refusal of an entry that contradicts itself; it says by default who can mend it."""
    return InputError(f"training_info: {text}", *(hints or ("correct it in the program that wrote the model",)))


def stored_types(graph: GraphProto) -> dict[str, TensorType]:
    """Initializers with their types; sparse ones are not among them."""
    return {each.name: TensorType(dtype_name(each.data_type), tuple(each.dims)) for each in graph.initializer}


def join(graph: GraphProto, algorithm: GraphProto) -> None:
    """Put the algorithm behind the inference graph; an input of both is one.

    Raises InputError where the two define a value twice, or declare an input as two types.
    """
    _refuse_second_definitions(graph, algorithm)
    shared = _shared_inputs(graph, algorithm)
    outputs = _outputs(graph, algorithm)
    graph.node.extend(algorithm.node)
    graph.initializer.extend(algorithm.initializer)
    graph.sparse_initializer.extend(algorithm.sparse_initializer)
    graph.input.extend(each for each in algorithm.input if each.name not in shared)
    graph.output.extend(each for each in algorithm.output if each.name not in outputs)
    graph.value_info.extend(algorithm.value_info)


def check_reads(graph: GraphProto, what: str) -> None:
    """Raise InputError where a node reads what is not defined, or not yet; ``what`` is the graph's name in messages."""
    made = {name for name, _ in _defined(graph)}
    known = {each.name for each in graph.input} | {name for name, verb in _defined(graph) if verb == "stores"}
    for node in graph.node:
        for name in sorted(reads(node) - known):
            label = f"{node.op_type} {show(next((each for each in node.output if each), node.name))}"
            if name in made:
                raise broken(f"{label} of {what} reads {show(name)} before a node makes it", "sort the nodes")
            raise broken(f"{label} of {what} reads {show(name)}, which nothing makes")
        known.update(node.output)


def _defined(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """The values that a graph stores and makes, each with that verb."""
    for each in graph.initializer:
        yield each.name, "stores"
    for sparse in graph.sparse_initializer:
        yield sparse.values.name, "stores"
    for node in graph.node:
        for name in node.output:
            if name:
                yield name, "makes"


def _refuse_second_definitions(graph: GraphProto, algorithm: GraphProto) -> None:
    found: dict[str, str] = {}
    fed = {each.name for each in graph.input}
    for owner, part in (("the inference graph", graph), ("the algorithm", algorithm)):
        own = {each.name for each in part.input}
        for name, verb in _defined(part):
            if name in found:
                raise broken(f"{show(name)} names two values: {found[name]} it, and {owner} {verb} it again")
            if name in fed and (verb == "makes" or name not in own):
                raise broken(f"{show(name)} names two values: an input of the inference graph, and {owner} {verb} it")
            if name in own and verb == "makes":
                raise broken(f"{show(name)} names two values: an input of {owner}, which makes it too")
            found[name] = f"{owner} {verb}"
    for each in algorithm.input:
        if found.get(each.name) == "the inference graph makes":
            raise broken(
                f"{show(each.name)} is an input of the algorithm, and the inference graph makes it",
                "leave it out of the algorithm's inputs: it reads values of the inference graph by their names",
            )


def _outputs(graph: GraphProto, algorithm: GraphProto) -> set[str]:
    """Outputs of the inference graph; raises InputError for one that the algorithm declares as another type."""
    types = {each.name: read_type(each.type) for each in graph.output}
    for each in algorithm.output:
        first, second = types.get(each.name), read_type(each.type)
        agrees = first is None or (second.dtype == first.dtype and second.may_have_shape_of(first))
        if not agrees and known(second.dtype):
            raise broken(
                f"output {show(each.name)} of the algorithm is {second}, in the inference graph it is {first}",
                "declare it the same way in both",
            )
    return set(types)


def _shared_inputs(graph: GraphProto, algorithm: GraphProto) -> set[str]:
    """Inputs of both graphs; raises InputError for one of two types."""
    types = stored_types(graph) | {each.name: read_type(each.type) for each in graph.input}
    for each in algorithm.input:
        first, second = types.get(each.name), read_type(each.type)
        if first is not None and second != first:
            raise broken(
                f"input {show(each.name)} of the algorithm is {second}, in the inference graph it is {first}",
                "declare it the same way in both",
            )
    return {each.name for each in graph.input}
