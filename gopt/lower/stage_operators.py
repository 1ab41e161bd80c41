"""Lowering of the layout operator between stages of a pipeline: a Send on one rank, a Recv on another."""

from __future__ import annotations

from gopt.collectives.layout import format_shape
from gopt.ir.graph import COMM, Node
from gopt.ir.types import TensorType
from gopt.lower.lowered import Lowered, LoweringContext, make
from gopt.records.placements import FULLY_REPLICATED
from gopt.tensor_parallel.builder import PASS


def transfer(node: Node, context: LoweringContext) -> Lowered:
    """Send the value to the target, or to all others; receive it there.

    Of a transfer to all in two halves, later stages receive in the first, and hand the value on in the second.
    """
    group, source, target = str(node.attributes["group"]), node.attributes["source"], node.attributes["target"]
    member, value, output, mesh = context.coordinates[group], node.inputs[0], node.outputs[0], context.mesh
    half = node.attributes.get("half", "")
    others = [at for at in range(mesh.size(group)) if at != source]
    targets = [target] if target >= 0 else [at for at in others if not half or (at > source) is (half == "forward")]
    hands_on = half == "backward" and member > source
    if not (member == source or member in targets or hands_on):
        return Lowered("elsewhere", list, absent=True)

    def rank_at(peer: int) -> int:
        return mesh.index_at("+".join(axis for axis, _ in mesh.axes), {**context.coordinates, group: peer})

    def call(op_type: str, inputs: list[str], outputs: list[str], peer: int, **attributes: object) -> Node:
        attributes = {"group": group, "peer": peer, "tag": node.attributes["tag"], **attributes}
        node_on_rank = Node(op_type, inputs, outputs, domain=COMM, attributes=attributes, made_by=node.made_by or PASS)
        node_on_rank.phase = node.phase
        return node_on_rank

    if hands_on:
        return Lowered("hands on", lambda: [make(node, "Identity", [node.inputs[1]], output)])
    if member == source:
        peers = tuple(map(rank_at, targets))
        shows = target < 0 and half != "forward"

        def sends() -> list[Node]:
            shown = [make(node, "Identity", [value], output)] if shows else []
            return [*(call("Send", [value], [], peer) for peer in peers), *shown]

        return Lowered(("send", *peers), sends, absent=not shows)
    peer = rank_at(source)
    type, sharding = context.types[output], context.sharded.get(output, FULLY_REPLICATED)
    local = TensorType(type.dtype, sharding.local_shape(type.dims, context.coordinates))
    attributes = {"dtype": local.dtype, "shapes": [format_shape(local.dims)]}
    receive = Lowered(("receive", peer, local), lambda: [call("Recv", [], [output], peer, **attributes)])
    receive.types[output] = local
    return receive
