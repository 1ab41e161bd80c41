"""Put opaque optimizer operators back where what is left of them is still what they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gopt.analysis.spmd import Step
from gopt.graph.edit import Draft
from gopt.graph.model import SPMD, Graph, Node
from gopt.graph.place import EVERYWHERE, Place, Span
from gopt.graph.types import TensorType
from gopt.passes.base import Pass
from gopt.report import Change
from gopt.sources.kept import KEEP, Covered, Kept, Member
from gopt.sources.operators import Values
from gopt.sources.origin import SHARED, Call, Origin

NAME = "keep-optimizers"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Nothing to choose."""


@dataclass(slots=True)
class _Pieces:
    """The nodes written for one call: as the source has them and as they now are, by weight and place in the body."""

    call: Call
    source: dict[int, list[Node]] = field(default_factory=dict)
    now: dict[int, dict[int, list[Node]]] = field(default_factory=dict)


class _NoFoldError(Exception):
    """Why the nodes of a weight are not the operator any more."""


def keep_optimizers(step: Step, options: Options) -> Change:
    """Fold what shard left of each opaque optimizer back into its operator.

    Requires: to run after shard. Guarantees: an operator is put back only over nodes that are, one by one, those of
    its body, on runs, owners or every rank; on a rank it lists the weights that the rank updates; what its update
    counts is still counted on every rank. Where a body was changed (a norm taken over all ranks' shares) its standard
    operators stay, and the facts say why. On the wire: nothing.
    """
    pieces = _pieces(step)
    if not pieces:
        return Change(note="no opaque optimizer")
    draft = Draft(step.graph, NAME)
    folder = _Folder(step, draft)
    rows = [folder.fold(each) for each in pieces.values()]
    draft.finish()
    return Change(facts={"operators": rows})


def _pieces(step: Step) -> dict[int, _Pieces]:
    found: dict[int, _Pieces] = {}
    for node in step.training.graph.nodes:
        if isinstance(node.origin, Origin):
            pieces = found.setdefault(node.origin.call.number, _Pieces(node.origin.call))
            pieces.source.setdefault(node.origin.weight, []).append(node)
    for node in step.graph.nodes:
        if isinstance(node.origin, Origin):
            held = found[node.origin.call.number].now.setdefault(node.origin.weight, {})
            held.setdefault(node.origin.place, []).append(node)
    return found


class _Folder:
    """Folds call after call into one draft."""

    def __init__(self, step: Step, draft: Draft) -> None:
        self.step, self.draft = step, draft
        self.graph: Graph = step.graph
        self.types = step.training.graph.types
        self.readers = step.graph.readers()
        self.producer = step.graph.producers()
        self.position = {id(node): place for place, node in enumerate(step.graph.nodes)}
        self.holdings = {holding.input: holding for holding in step.holdings}

    def fold(self, pieces: _Pieces) -> dict[str, object]:
        """Fold what is left of one call; returns what the report says of it."""
        call = pieces.call
        members: list[tuple[Member, list[Node]]] = []
        reasons: dict[str, list[str]] = {}
        elsewhere = []
        for weight in range(len(call.given.weights)):
            try:
                match = _Match(self, pieces, weight)
                if match.gone():
                    elsewhere.append(match.title)
                    continue
                members.append(match.member())
            except _NoFoldError as why:
                reasons.setdefault(str(why), []).append(self._title(call, weight))
        row: dict[str, object] = {"name": call.label, "operator": call.op_type, "kept": len(members)}
        if elsewhere:
            row["merged"] = elsewhere
        if reasons:
            row["expanded"] = [{"weights": titles, "why": why} for why, titles in reasons.items()]
        if members:
            self._add(pieces, members, whole=len(members) == len(call.given.weights))
        return row

    @staticmethod
    def _title(call: Call, weight: int) -> str:
        table = call.given.weights[weight]
        return table.get("weight") or next(iter(table.values()))

    def _add(self, pieces: _Pieces, members: list[tuple[Member, list[Node]]], *, whole: bool) -> None:
        call, name = pieces.call, f"gopt.{NAME}.{pieces.call.number}"
        scalars, results = slots(call, self.types)
        gone = [node for _, nodes in members for node in nodes]
        every = [node for table in pieces.now.values() for held in table.values() for node in held]
        if whole and all(member.place == EVERYWHERE for member, _ in members) and self._lone(every, results):
            gone = every
        else:
            made = {slot: f"{name}.{slot}" for slot in results}
            self.graph.types.update((made[slot], self.graph.type_of(value)) for slot, value in results.items())
            results = made
        for node in gone:
            self.draft.discard(node.outputs[0])
        kept = Kept(call, scalars, results, tuple(member for member, _ in members), name)
        inputs = [*scalars.values(), *(value for member, _ in members for value in member.inputs.values())]
        outputs = [*results.values(), *(value for member, _ in members for value in member.outputs.values())]
        last = max(gone, key=lambda node: self.position[id(node)])
        types = {value: self.graph.type_of(value) for value in outputs}
        node = self.draft.add(
            KEEP, list(dict.fromkeys(inputs)), types, domain=SPMD, after=last,
            attributes={"operator": call.op_type, "members": len(members)},
        )  # fmt: skip
        node.origin = kept

    def _lone(self, nodes: Iterable[Node], results: Values) -> bool:
        """Whether nothing but these nodes reads what they make, the operator's own results aside."""
        own = {id(node) for node in nodes}
        shown = {*results.values(), *self.graph.outputs}
        for node in nodes:
            made = [name for name in node.outputs if name not in shown]
            if any(id(reader) not in own for name in made for reader in self.readers.get(name, ())):
                call: Call = node.origin.call
                if not any(name in table.values() for name in made for table in call.given.updated):
                    return False
        return True


def slots(call: Call, types: Mapping[str, TensorType]) -> tuple[Values, Values]:
    """The scalars a call reads and makes; of a function of the model, its one-element operands beside larger ones."""
    if call.operator is not None:
        return dict(call.given.scalars), dict(call.given.results)
    return _single(call.given.weights[0], types), _single(call.given.updated[0], types)


def _single(table: Values, types: Mapping[str, TensorType]) -> Values:
    return {slot: name for slot, name in table.items() if name in types and types[name].elements == 1}


class _Match:
    """One weight of a call, held against what became of it."""

    def __init__(self, folder: _Folder, pieces: _Pieces, weight: int) -> None:
        self.folder, self.pieces, self.weight, self.call = folder, pieces, weight, pieces.call
        scalars, results = slots(self.call, folder.types)
        self.inputs = {s: n for s, n in self.call.given.weights[weight].items() if s not in scalars}
        self.outputs = {s: n for s, n in self.call.given.updated[weight].items() if s not in results}
        self.title = self.inputs.get("weight") or next(iter(self.inputs.values()), self.call.label)
        self.scalars, self.results = scalars, results
        self.running = self._running()

    def _running(self) -> list[Node]:
        """The source's nodes that handle a weight's own values; the others are constants and scalars of the node."""
        local = set(self.inputs.values())
        found = []
        for node in self.pieces.source.get(self.weight, []):
            if any(name in local for name in node.reads):
                local.update(node.outputs)
                found.append(node)
        return found

    def gone(self) -> bool:
        """Whether the weight's update runs as a part of another's: no node of it is left."""
        now = self.pieces.now.get(self.weight, {})
        return not any(node.origin.place in now for node in self.running)

    def member(self) -> tuple[Member, list[Node]]:
        """The weight as a member of the kept operator, and the nodes it replaces."""
        now = self.pieces.now.get(self.weight, {})
        renamed: dict[str, str] = {}
        local = set(self.inputs.values())
        found: list[Node] = []
        for node in self.running:
            held = now.get(node.origin.place, [])
            if len(held) != 1:
                raise _NoFoldError(f"its {node.op_type} is taken over the shares of all ranks")
            self._follow(node, held[0], local, renamed)
            local.update(node.outputs)
            found.append(held[0])
        place = self._place(found)
        self._check_scalars(found, place)
        self._check_inside(found, renamed)
        unread = self.inputs if place == EVERYWHERE else {}
        inputs = {slot: renamed.get(name, name if slot in unread else "") for slot, name in self.inputs.items()}
        for slot, name in inputs.items():
            if not name:
                raise _NoFoldError(f"its {slot} is not read by its body")
        outputs = {slot: renamed[name] for slot, name in self.outputs.items() if name in renamed}
        return Member(place, self.weight, inputs, outputs, self._covers(place, inputs)), found

    def _follow(self, source: Node, now: Node, local: set[str], renamed: dict[str, str]) -> None:
        """Compare a node with the source's, operand by operand, and learn the names of today."""
        if len(source.inputs) != len(now.inputs) or len(source.outputs) != len(now.outputs):
            raise _NoFoldError(f"its {source.op_type} has other operands")
        for old, new in zip(source.inputs, now.inputs):
            if new != (renamed.setdefault(old, new) if old in local else old):
                raise _NoFoldError(f"its {source.op_type} reads {new} in place of {renamed.get(old, old)}")
        renamed.update(zip(source.outputs, now.outputs))

    def _place(self, nodes: list[Node]) -> Place:
        places = list(dict.fromkeys(node.place for node in nodes))
        if len(places) != 1:
            raise _NoFoldError("its body stands in several places")
        return places[0]

    def _check_scalars(self, nodes: list[Node], place: Place) -> None:
        """The operator's scalars must be there wherever it is, and be what the source says."""
        for held in self.pieces.source.get(SHARED, []) + self._constants():
            now = self.pieces.now.get(held.origin.weight, {}).get(held.origin.place, [])
            if len(now) != 1 or now[0].inputs != held.inputs or now[0].outputs != held.outputs:
                read = any(name in node.inputs for node in nodes for name in held.outputs)
                if read or now:
                    raise _NoFoldError(f"its {held.op_type} on scalars was changed")
        for name in self.scalars.values():
            maker = self.folder.producer.get(name)
            if maker is not None and maker.place not in (EVERYWHERE, place):
                raise _NoFoldError(f"{name} is known to one rank alone")

    def _constants(self) -> list[Node]:
        running = set(map(id, self.running))
        return [node for node in self.pieces.source.get(self.weight, []) if id(node) not in running]

    def _check_inside(self, nodes: list[Node], renamed: Mapping[str, str]) -> None:
        """Nobody else may read, or be shown, what is inside the body."""
        own, shown = set(map(id, nodes)), {renamed.get(name, name) for name in self.outputs.values()}
        for node in nodes:
            for name in node.outputs:
                outside = [each for each in self.folder.readers.get(name, ()) if id(each) not in own]
                if name not in shown and (outside or name in self.folder.graph.outputs):
                    raise _NoFoldError(f"{name}, inside its body, is read elsewhere")

    def _covers(self, place: Place, inputs: Values) -> tuple[Covered, ...]:
        """The source tensors that the member updates, with their elements in the bucket."""
        if isinstance(place, Span):
            for name in inputs.values():
                maker, holding = self.folder.producer.get(name), self.folder.holdings.get(name)
                if maker is not None and maker.domain == SPMD and "sizes" in maker.attributes:
                    starts, sizes = maker.attributes["starts"], maker.attributes["sizes"]
                    return tuple(Covered(t, a, a + n) for t, a, n in zip(maker.inputs, starts, sizes))
                if holding is not None:
                    return tuple(Covered(p.tensor, p.offset, p.offset + p.elements) for p in holding.parts)
        return (Covered(self.title, 0, 0),)


PASS = Pass(NAME, Options, keep_optimizers, after=("shard",))
