"""Lowering of the layout operator between stages of a pipeline: a Send on one rank, a Recv on another."""

from __future__ import annotations

from gopt.collectives.layout import format_shape
from gopt.ir.graph import COMM, Node
from gopt.lower.lowered import Lowered, LoweringContext, make
from gopt.tensor_parallel.builder import PASS


def transfer(node: Node, context: LoweringContext) -> Lowered:
    """Send the value to the target, or to all others; receive it there."""
    group, source, target = str(node.attributes["group"]), node.attributes["source"], node.attributes["target"]
    member, (value,), (output,) = context.coordinates[group], node.inputs, node.outputs
    mesh = context.mesh
    targets = [target] if target >= 0 else [at for at in range(mesh.size(group)) if at != source]
    if member != source and member not in targets:
        return Lowered("elsewhere", list, absent=True)

    def rank_at(peer: int) -> int:
        return mesh.index_at("+".join(axis for axis, _ in mesh.axes), {**context.coordinates, group: peer})

    def call(op_type: str, inputs: list[str], outputs: list[str], peer: int, **attributes: object) -> Node:
        attributes = {"group": group, "peer": peer, "tag": node.attributes["tag"], **attributes}
        made = Node(op_type, inputs, outputs, domain=COMM, attributes=attributes, made_by=node.made_by or PASS)
        made.phase = node.phase
        return made

    if member == source:
        peers = tuple(map(rank_at, targets))

        def sends() -> list[Node]:
            own = [make(node, "Identity", [value], output)] if target < 0 else []
            return [*(call("Send", [value], [], peer) for peer in peers), *own]

        return Lowered(("send", *peers), sends, absent=target >= 0)
    peer = rank_at(source)
    type = context.types[output]
    dims = node.sharding.local_shape(type.dims, context.coordinates)
    attributes = {"dtype": type.dtype, "shapes": [format_shape(dims)]}
    return Lowered(("receive", peer, dims), lambda: [call("Recv", [], [output], peer, **attributes)])
