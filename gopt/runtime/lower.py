"""Make half-precision arithmetic explicit for the CPU, so that results do not depend on where a graph is cut.

onnxruntime computes most float16 operators in float32 and drops the casts between neighbours; for bfloat16 it has no
kernels at all. Here every such operator gets its own casts up and down: each rounds once.
"""

from __future__ import annotations

from gopt.errors import UnsupportedError
from gopt.graph.model import COMM, Graph, Node
from gopt.graph.types import HALVES, TensorType, dtype_code

NATIVE = frozenset(
    "Cast ConcatFromSequence Concat Constant ConstantOfShape EyeLike Flatten Gather Identity Reshape Shape Size Slice "
    "Split Transpose Unsqueeze RandomNormal RandomUniform".split()
)
"""Operators that only move halves, or make them, with a kernel for both kinds."""


def lower_halves(graph: Graph) -> Graph:
    """A graph in which no operator computes in half precision; the given one when none does."""
    if not any(type.dtype in HALVES for type in graph.types.values()):
        return graph
    lowered = graph.copy()
    nodes: list[Node] = []
    wide: dict[str, str] = {}
    for node in lowered.nodes:
        if node.domain == COMM or node.is_a(*NATIVE) or not _touches(lowered, node):
            nodes.append(node)
            continue
        if node.captures:
            raise UnsupportedError(f"control flow {node.label!r} over half-precision values cannot run on the CPU")
        for place, name in enumerate(node.inputs):
            if _half(lowered, name):
                if name not in wide:
                    wide[name] = f"{name}::f32"
                    nodes.append(_cast(lowered, name, wide[name], "float32"))
                node.inputs[place] = wide[name]
        after = []
        for place, name in enumerate(node.outputs):
            if _half(lowered, name):
                node.outputs[place] = f"{name}::raw"
                after.append(_cast(lowered, f"{name}::raw", name, lowered.types[name].dtype))
                lowered.types[f"{name}::raw"] = TensorType("float32", lowered.types[name].shape)
        nodes += [node, *after]
    lowered.nodes = nodes
    return lowered


def _half(graph: Graph, name: str) -> bool:
    return bool(name) and graph.type_of(name).dtype in HALVES


def _touches(graph: Graph, node: Node) -> bool:
    return any(_half(graph, name) for name in (*node.inputs, *node.outputs))


def _cast(graph: Graph, source: str, target: str, dtype: str) -> Node:
    if target not in graph.types:
        graph.types[target] = TensorType(dtype, graph.types[source].shape)
    return Node("Cast", [source], [target], attributes={"to": dtype_code(dtype)})
