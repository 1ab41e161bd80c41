"""Open shapes: states without elements to share out, and values of a pass without a fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gopt.analysis.role_hints import batch_option, others
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.types import TensorType
from gopt.operators.kinds import ELEMENTWISE


def refuse_dynamic(index: GraphIndex, pairs: Mapping[str, str]) -> None:
    """Raise when a state's shape is not known; ``pairs``: output -> input."""
    for name in pairs.values():
        if not index.graph.types[name].static:
            raise UnsupportedError(
                f"state {name!r} has the dynamic shape {index.graph.types[name]}: its elements cannot be shared out",
                _known(index.graph, name),
                f"if it is fed, say {batch_option([name])}",
            )


def refuse_open_shapes(step: StepSkeleton) -> None:
    """Raise UnsupportedError for an input of an open shape, taken for a batch, from which an output outside of the
    forward is made element by element.

    Shape inference may find another size for the new value, or a known size, so that the two types differ."""
    index, graph = step.index, step.index.graph
    settled = {*step.updated, *step.roles.batch}
    open_ = {name for name, type in graph.inputs.items() if not type.static and name not in settled}
    dynamic: dict[str, str] = {}
    for output in graph.outputs if open_ else ():
        node = index.producers.get(output)
        if output not in step.replaces and node is not None and id(node) not in step.forward:
            name = _made_of(index, output, open_, step.forward)
            if name:
                dynamic.setdefault(name, output)
    if dynamic:
        name, output = next(iter(dynamic.items()))
        raise UnsupportedError(
            f"input {name!r}{others(len(dynamic) - 1, 'input')} has the dynamic shape {graph.types[name]}, and output "
            f"{output!r} is made of it element by element: a state has a known shape, and a batch no new value",
            _known(graph, name),
            f"if it is fed, say {batch_option(dynamic)}",
        )


def fix_sizes(inputs: Mapping[str, TensorType]) -> str:
    """The hint for a value of an open shape: a command to fix the sizes of inputs."""
    tool = "python -m onnxruntime.tools.make_dynamic_shape_fixed"
    for name, type in inputs.items():
        if type.shape is not None and not type.static:
            symbols = [size for size in type.shape if isinstance(size, str)]
            shape = ",".join(str(size) if isinstance(size, int) else "8" for size in type.shape)
            how = f"--dim_param {symbols[0]} --dim_value 8" if symbols else f"--input_name {name} --input_shape {shape}"
            return f"fix the sizes of inputs, such as: {tool} {how} step.onnx fixed.onnx"
    return "export the step with fixed sizes"


def _known(graph: Graph, name: str) -> str:
    stored = graph.initializers.get(name)
    value = f": its stored value is {stored.type}" if stored is not None else ""
    return f"if it is a state, export the step with static shapes for parameters and states{value}"


def _made_of(index: GraphIndex, output: str, inputs: set[str], forward: set[int]) -> str:
    """The first of ``inputs`` that an output reads element by element, behind the forward; '' without such an input."""
    types = index.graph.types
    want = types.get(output)
    if want is None or want.shape is None or not want.shape:
        return ""

    def following(name: str) -> Iterable[str]:
        operands = index.operands(name, lambda node: id(node) not in forward and node.is_in(ELEMENTWISE))
        return (operand for operand in operands if operand in types and types[operand].may_have_shape_of(want))

    return next((name for name in walk([output], following) if name in inputs and types[name].dtype == want.dtype), "")
