"""The report's section on opaque optimizers: weights removed from nodes, by rank, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gopt.artifact.pass_facts import operators
from gopt.artifact.removals import UNKNOWN
from gopt.artifact.report_groups import OpFact, RemovedVarFact, Shape
from gopt.ir.graph import Node
from gopt.ir.opaque.origin import OpaqueCall
from gopt.ir.opaque.refold import CoveredRange, RefoldedCall, RefoldedWeight
from gopt.ir.opaque.schema_roles import calls
from gopt.spmd.pass_records import PassRun
from gopt.spmd.program import SpmdProgram
from gopt.text.amounts import rank_ranges

PASS = "refold-optimizers"
UNREAD = "a result of an optimizer that nothing reads"
ELSEWHERE = "a new state that other ranks make, or ranks make in parts"
SEQUENCE = "tensors of an optimizer in a sequence: the rank's own are packed anew"
Holder = tuple[RefoldedCall, RefoldedWeight, CoveredRange]


def removed_optimizers(program: SpmdProgram, ran: Sequence[PassRun], ranks: Sequence[int]) -> list[OpFact]:
    """A fact per node and weight not updated on some ranks; ``ranks``: the ranks made."""
    coordinates = {rank: program.mesh.coordinates(rank) for rank in ranks}
    holders = _holders(program)
    reasons = _reasons(ran)
    facts: list[OpFact] = []
    for call in calls(program.training.graph):
        count = len(call.slot_values.weights)
        for table in call.slot_values.weights:
            title = table.get("weight") or next(iter(table.values()))
            holder = next((holders[name] for name in table.values() if name in holders), None)
            why, gone = _absent(call, holder, coordinates, reasons.get((call.label, title), ""))
            if gone:
                reason = why if count == 1 else f"one of {count} weights: {why}"
                facts.append(OpFact(PASS, reason, rank_ranges(gone), "update", title, call.label, call.op_type))
    return [*facts, *_removed_sequences(program, rank_ranges(list(coordinates)))]


def removed_optimizer_values(program: SpmdProgram, ranks: Sequence[int]) -> list[RemovedVarFact]:
    """A fact per sequence around an operator, and per result missing on some ranks.

    A sequence has the dtype and the bytes of its tensors, and no shape.
    """
    coordinates = {rank: program.mesh.coordinates(rank) for rank in ranks}
    types, facts = program.source.graph.types, list[RemovedVarFact]()

    def add(name: str, why: str, gone: list[int], dtype: str, shape: Shape | None, nbytes: int) -> None:
        facts.append(RemovedVarFact(PASS, why, rank_ranges(gone), "update", None, name, dtype, shape, nbytes))

    for name, tensors in _sequences(program).items():
        types_held = [types.get(tensor, UNKNOWN) for tensor in tensors]
        dtype = types_held[0].dtype if types_held else UNKNOWN.dtype
        add(name, SEQUENCE, list(ranks), dtype, None, sum(kind.nbytes for kind in types_held))
    optimizers = calls(program.training.graph)
    nodes = program.graph.nodes if optimizers else []
    shardings = {name: node.sharding for node in nodes for name in node.outputs}
    shardings |= {state.output: state.sharding for state in program.states}
    for call in optimizers:
        for name in _results(call):
            sharding = shardings.get(name)
            gone = [rank for rank, at in coordinates.items() if sharding is None or not sharding.covers(at)]
            if gone:
                type = types.get(name, UNKNOWN)
                why = ELSEWHERE if name in program.source.graph.outputs else UNREAD
                add(name, why, gone, type.dtype, type.shape, type.nbytes)
    return facts


def _results(call: OpaqueCall) -> list[str]:
    """The results of an operator, for all weights and for each weight."""
    slots = call.slot_values
    return [name for table in (slots.results, *slots.updated) for name in table.values() if name]


def _removed_sequences(program: SpmdProgram, ranks: str) -> list[OpFact]:
    """A fact per node packing tensors for an operator, or taking a result: no rank has these nodes."""
    return [
        OpFact(PASS, SEQUENCE, ranks, "update", None, node.label, node.op_type) for node in _sequence_nodes(program)
    ]


def _sequence_nodes(program: SpmdProgram) -> list[Node]:
    """Nodes of the file packing tensors for an operator, or taking a result."""
    graph = program.source.graph
    written = [node for node in graph.file_nodes or () if node.is_a("SequenceConstruct", "SequenceAt")]
    labels = {node.label for node in graph.nodes if node.origin is None} if written else set()
    return [node for node in written if node.label not in labels]


def _sequences(program: SpmdProgram) -> dict[str, list[str]]:
    """Sequence read or made by an operator of the file -> tensors."""
    sequences: dict[str, list[str]] = {}
    for node in _sequence_nodes(program):
        if node.is_a("SequenceConstruct"):
            sequences[node.outputs[0]] = list(node.inputs)
        else:
            sequences.setdefault(node.inputs[0], []).append(node.outputs[0])
    return sequences


def _holders(program: SpmdProgram) -> dict[str, Holder]:
    """Source tensor -> the refolded operator and its member updating the tensor."""
    return {
        covered.tensor: (node.origin, member, covered)
        for node in program.graph.nodes
        if isinstance(node.origin, RefoldedCall)
        for member in node.origin.members
        for covered in member.covers
    }


def _reasons(ran: Sequence[PassRun]) -> dict[tuple[str, str], str]:
    """(node, weight) -> the reason for keeping standard operators."""
    return {
        (row.name, weight): group.why
        for row in operators(run.record for run in ran)
        for group in row.expanded
        for weight in group.weights
    }


def _absent(
    call: OpaqueCall, holder: Holder | None, coordinates: Mapping[int, Mapping[str, int]], why: str
) -> tuple[str, list[int]]:
    """Return the reason why a node leaves out a weight on some ranks, and these ranks."""
    if holder is None:
        text = "written out in standard operators" + (f": {why}" if why else ", as a part of another weight's update")
        return text, list(coordinates)
    refolded, member, covered = holder
    if refolded.call is not call:
        return f"updated by {refolded.call.label}, over runs of weights of one class", list(coordinates)
    return "updated by other ranks", [rank for rank, at in coordinates.items() if not member.holds(covered, at)]
