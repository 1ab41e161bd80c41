"""Lowering of the layout operator between stages of a pipeline: a Send on one rank, a Recv on another."""

from __future__ import annotations

from gopt.collectives.layout import format_shape
from gopt.ir.graph import COMM, Node
from gopt.ir.types import TensorType
from gopt.lower.lowered import AHEAD_RECEIVE, AHEAD_SEND, RECEIVE, SEND, SHOWN, Lowered, LoweringContext, make
from gopt.records.placements import FULLY_REPLICATED
from gopt.tensor_parallel.builder import PASS


def transfer(node: Node, context: LoweringContext) -> Lowered:
    """Send the values to the target, or a value to all receivers; receive them there.

    Of a transfer in halves (``stage_phases``) an action sends and a later action receives. A value for all stages is
    received ahead by later stages, and shown in the end.
    """
    group, source, target = str(node.attributes["group"]), node.attributes["source"], node.attributes["target"]
    member, output, mesh = context.coordinates[group], node.outputs[0], context.mesh
    half = node.attributes.get("half", "")
    receivers = [at for at in range(mesh.size(group)) if at != source]
    later = [at for at in receivers if at in node.attributes.get("later", ())]
    targets = [target] if target >= 0 else receivers
    if half in (AHEAD_SEND, AHEAD_RECEIVE):
        targets = later
    elif half == SHOWN:
        targets = [at for at in receivers if at not in later]
    sends, receives = half not in (RECEIVE, AHEAD_RECEIVE), half not in (SEND, AHEAD_SEND)
    shows = target < 0 and half in ("", SHOWN)

    def rank_at(peer: int) -> int:
        return mesh.members(group, context.rank)[peer]

    def call(op_type: str, inputs: list[str], outputs: list[str], peer: int, **attributes: object) -> Node:
        attributes = {"group": group, "peer": peer, "tag": node.attributes["tag"], **attributes}
        node_on_rank = Node(op_type, inputs, outputs, domain=COMM, attributes=attributes, made_by=node.made_by or PASS)
        node_on_rank.phase = node.phase
        return node_on_rank

    if shows and half and member in later:
        return Lowered("hands on", lambda: [make(node, "Identity", [node.inputs[1]], output)])
    if member == source and sends and (targets or shows):
        peers = tuple(map(rank_at, targets))

        def calls() -> list[Node]:
            shown = [make(node, "Identity", [node.inputs[0]], output)] if shows else []
            sent = node.inputs[: len(node.outputs)]  # behind them: what a later stage received ahead
            return [*(call("Send", sent, [], peer) for peer in peers), *shown]

        return Lowered(("send", *peers), calls, absent=not shows)
    if member not in targets or not receives:
        return Lowered("elsewhere", list, absent=True)
    peer = rank_at(source)
    local: dict[str, TensorType] = {}
    for name in node.outputs:
        type, sharding = context.types[name], context.sharded.get(name, FULLY_REPLICATED)
        local[name] = TensorType(type.dtype, sharding.local_shape(type.dims, context.coordinates))
    attributes = {"dtype": local[output].dtype, "shapes": [format_shape(type.dims) for type in local.values()]}
    key = "receive", peer, *local.values()
    return Lowered(key, lambda: [call("Recv", [], node.outputs, peer, **attributes)], types=local)
