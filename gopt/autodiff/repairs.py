"""Repairs of nodes from onnx-ad that runtimes read differently, by inferred shapes."""

from __future__ import annotations

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.text.sanitize import show


def repair_transposed_convolutions(graph: Graph, forward: set[str]) -> None:
    """Say where the backward of a Conv pads: by ``pads`` and ``output_padding``, and not by ``output_shape``.

    With ``output_shape`` the operator spreads the padding in halves: at a wrong place if the forward pads one side
    alone, and not at all if the stride leaves a remainder. ``forward``: values of the forward.
    """
    for index, node in enumerate(graph.nodes):
        if not node.is_a("ConvTranspose") or node.outputs[0] in forward or "output_shape" not in node.attributes:
            continue
        attributes = dict(node.attributes)
        wanted = attributes.pop("output_shape")
        kinds = [graph.type_of(name) for name in node.inputs[:2]]
        if not all(kind.static for kind in kinds):
            raise _unsized(graph)
        sizes, kernel = (kind.dims[2:] for kind in kinds)
        count = len(sizes)
        strides, dilations = (attributes.get(name, [1] * count) for name in ("strides", "dilations"))
        pads = attributes.get("pads", [0] * (2 * count))
        attributes["output_padding"] = [
            wanted[axis]
            - (strides[axis] * (sizes[axis] - 1) + dilations[axis] * (kernel[axis] - 1) + 1)
            + pads[axis] + pads[count + axis]
            for axis in range(count)
        ]  # fmt: skip
        graph.nodes[index] = Node(node.op_type, node.inputs, node.outputs, name=node.name, attributes=attributes)


def _unsized(graph: Graph) -> UnsupportedError:
    """Return the refusal of a pool with an operand of unknown shape, as behind a loop."""
    pools = (node for node in graph.nodes if node.is_a("AveragePool", "LpPool"))
    name = next((node.inputs[0] for node in pools if not graph.type_of(node.inputs[0]).static), "")
    what = f"the shape of {show(name)}, which a pool reads," if name else "the shape of what a pool reads"
    return UnsupportedError(
        f"{what} is unknown: it cannot be differentiated",
        "export the model with fixed shapes; behind a loop, a Reshape to constant sizes states them",
    )
