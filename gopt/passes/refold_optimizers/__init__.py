"""Put opaque optimizer operators back where their nodes are unchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gopt.analysis.training import Phase, StateKind
from gopt.ir.graph import SPMD, Graph, Node
from gopt.ir.opaque.operator_schema import Values
from gopt.ir.opaque.origin import OpaqueCall, Origin
from gopt.ir.opaque.refold import REFOLD, RefoldedCall, RefoldedWeight
from gopt.ir.rewriter import GraphRewriter
from gopt.passes.base import Pass
from gopt.passes.refold_optimizers.match import CurrentGraph, Match, NoFoldError, Pieces, slots
from gopt.records.pass_facts import ExpandedWeights, OperatorFacts, PassOptions, RefoldFacts
from gopt.records.placements import FULLY_REPLICATED
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram

NAME = "refold-optimizers"


@dataclass(frozen=True, kw_only=True)
class RefoldOptions(PassOptions):
    """Nothing to choose."""


def refold_optimizers(program: SpmdProgram, options: RefoldOptions) -> PassResult:
    """Fold what shard left of each opaque optimizer back into its operator.

    Requires: to run after shard. Guarantees: an operator is put back only over nodes equal, one by one, to its body, on
    runs, owners or every rank; on a rank the operator lists the weights that the rank updates; counters of the update
    still count on every rank. Where a body was changed (a norm taken over all ranks' shares) its standard
    operators stay, and the facts say why. On the wire: nothing.
    """
    pieces = _pieces(program)
    if not pieces:
        return PassResult(note="no opaque optimizer")
    if program.stages is not None:
        return PassResult(note="on pipeline stages an opaque optimizer stays in standard operators")
    rewriter = GraphRewriter(program.graph, NAME)
    folder = _Folder(program, rewriter)
    facts = RefoldFacts(tuple(folder.fold(piece) for piece in pieces.values()))
    rewriter.finish()
    return PassResult(facts=facts)


def _pieces(program: SpmdProgram) -> dict[int, Pieces]:
    result: dict[int, Pieces] = {}
    for node in program.source.graph.nodes:  # a body that is split is no longer one
        if isinstance(node.origin, Origin):
            pieces = result.setdefault(node.origin.call.number, Pieces(node.origin.call))
            pieces.source.setdefault(node.origin.weight, []).append(node)
    types = program.source.graph.types
    for node in program.source.looked_through:
        wide = node.outputs[0] not in types or types[node.outputs[0]].elements != 1
        if wide and isinstance(node.origin, Origin) and node.origin.call.number in result:
            result[node.origin.call.number].dropped.append(node)
    for node in program.graph.nodes:
        if isinstance(node.origin, Origin):
            members = result[node.origin.call.number].now.setdefault(node.origin.weight, {})
            members.setdefault(node.origin.place, []).append(node)
    return result


class _Folder:
    """Folds call after call into one rewriter."""

    def __init__(self, program: SpmdProgram, rewriter: GraphRewriter) -> None:
        self.program, self.rewriter = program, rewriter
        self.graph: Graph = program.graph
        states = {state.input: state for state in program.states}
        users, producers = program.graph.users(), program.graph.producers()
        types = program.source.graph.types
        self.now = CurrentGraph(types, program.graph.types, program.graph.outputs, users, producers, states)
        self.statistics = {s.updated for s in program.training.states if s.kind is StateKind.STATISTIC}
        self.position = {id(node): position for position, node in enumerate(program.graph.nodes)}

    def fold(self, pieces: Pieces) -> OperatorFacts:
        """Restore the operator of one call from the body's nodes; returns the facts for the report."""
        call = pieces.call
        members: list[tuple[RefoldedWeight, list[Node]]] = []
        reasons: dict[str, list[str]] = {}
        elsewhere = []
        for weight in range(len(call.slot_values.weights)):
            try:
                if any(node.phase is not Phase.UPDATE for node in pieces.source.get(weight, ())):
                    raise NoFoldError("it is not in the update alone")  # a layer's backward may be a function, too
                match = Match(self.now, pieces, weight)
                if match.gone():
                    elsewhere.append(match.title)
                    continue
                member, nodes = match.member()
                self._check_joined(call, member)
                if not self.statistics.isdisjoint(member.outputs.values()):
                    raise NoFoldError("it makes a statistic that ranks average")
                members.append((member, nodes))
            except NoFoldError as why:
                reasons.setdefault(str(why), []).append(self._title(call, weight))
        if members:
            self._add(pieces, members, whole=len(members) == len(call.slot_values.weights))
        expanded = tuple(ExpandedWeights(tuple(titles), why) for why, titles in reasons.items())
        return OperatorFacts(call.label, call.op_type, len(members), tuple(elsewhere), expanded)

    def _check_joined(self, call: OpaqueCall, member: RefoldedWeight) -> None:
        """Refuse a run with states of other functions and equal bodies: the operands' roles are unknown."""
        for slot, name in member.inputs.items():
            state = self.now.states.get(name)
            for part in state.slices if state is not None else ():
                if part.tensor not in self._tensors[call.op_type, slot]:
                    raise NoFoldError(f"its run has {part.tensor}, which another function updates")

    @cached_property
    def _tensors(self) -> Mapping[tuple[str, str], set[str]]:
        """Operator and slot -> the tensors of the source at this slot, in any call."""
        result: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for call in {node.origin.call.number: node.origin.call for node in self.program.source.graph.nodes
                     if isinstance(node.origin, Origin)}.values():  # fmt: skip
            for table in call.slot_values.weights:
                for slot, name in table.items():
                    result[call.op_type, slot].add(name)
        return result

    @staticmethod
    def _title(call: OpaqueCall, weight: int) -> str:
        table = call.slot_values.weights[weight]
        return table.get("weight") or next(iter(table.values()))

    def _add(self, pieces: Pieces, members: list[tuple[RefoldedWeight, list[Node]]], *, whole: bool) -> None:
        call, name = pieces.call, f"gopt.{NAME}.{pieces.call.number}"
        scalars, results = slots(call, self.now.types)
        gone = [node for _, nodes in members for node in nodes]
        every = [node for table in pieces.now.values() for members in table.values() for node in members]
        if whole and all(member.sharding == FULLY_REPLICATED for member, _ in members) and self._lone(every, results):
            gone = every
        else:
            renamed = {slot: f"{name}.{slot}" for slot in results}
            self.graph.types.update((renamed[slot], self.graph.type_of(value)) for slot, value in results.items())
            results = renamed
        for node in gone:
            self.rewriter.discard(node.outputs[0])
        origin = RefoldedCall(call, scalars, results, tuple(member for member, _ in members), name)
        inputs = [*scalars.values(), *(value for member, _ in members for value in member.inputs.values())]
        outputs = [*results.values(), *(value for member, _ in members for value in member.outputs.values())]
        last = max(gone, key=lambda node: self.position[id(node)])
        types = {value: self.graph.type_of(value) for value in outputs}
        node = self.rewriter.add(
            REFOLD, list(dict.fromkeys(inputs)), types, domain=SPMD, after=last,
            attributes={"operator": call.op_type, "members": len(members)},
        )  # fmt: skip
        node.origin = origin

    def _lone(self, nodes: Iterable[Node], results: Values) -> bool:
        """Return whether these nodes are the only readers of their results, apart from the operator's own results."""
        inside = {id(node) for node in nodes}
        shown = {*results.values(), *self.graph.outputs}
        for node in nodes:
            outputs = [name for name in node.outputs if name not in shown]
            if any(id(reader) not in inside for name in outputs for reader in self.now.users.get(name, ())):
                call: OpaqueCall = node.origin.call
                if not any(name in table.values() for name in outputs for table in call.slot_values.updated):
                    return False
        return True


PASS = Pass(NAME, RefoldOptions, refold_optimizers, after=("shard",), facts=RefoldFacts)
