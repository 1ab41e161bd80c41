"""How every value of the rank-independent graph stands on the ranks: one sweep in order, no rank is made.

Of each value: the axes along which it still follows a rank's own data (no reduction has brought the ranks together),
the axes along which members hold different things, and, along the sharding axis, which part of a whole each holds.
Values that are equal on all ranks are left out of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gopt.analysis.operators import draws, elementwise, reads_shape_only
from gopt.analysis.spmd import Accumulator, Holding, Step
from gopt.collectives.layout import parse_shapes, total_elements
from gopt.graph.model import COMM, SPMD, Node
from gopt.graph.place import Everywhere, Owner, Place, Span
from gopt.sources.kept import Kept


@dataclass(frozen=True, slots=True)
class Owners:
    """Whole tensors one behind the other, each on one member: what a ``Join`` of owned tensors makes."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """``own``: bits of the axes along which a value follows a rank's own data or is a member's share of a scalar;
    ``apart``: bits of the axes along which members hold different things; ``part``: what of a whole each member of the
    sharding group holds, None where that is no clean part."""

    own: int = 0
    apart: int = 0
    part: Place | Owners | None = None


EQUAL = Standing()
"""The same on all ranks."""


def alone(part: Place | Owners | None) -> int | None:
    """The one member that holds all of a part; None where several do."""
    if isinstance(part, Owner):
        return part.member
    if isinstance(part, Span):
        for member, (low, high) in enumerate(pairwise(part.cuts)):
            if low <= part.start < part.stop <= high:
                return member
    return None


@dataclass(slots=True)
class Sweep:
    """The table of a step's values, and the bits of its axes."""

    step: Step
    bits: dict[str, int] = field(init=False)
    data: int = field(init=False)
    shard: int = field(init=False)
    known: dict[str, Standing] = field(default_factory=dict)
    _masks: dict[str, int] = field(default_factory=dict)
    _raw: Standing = field(init=False)

    def __post_init__(self) -> None:
        mesh = self.step.mesh
        live = [name for name, size in mesh.axes if size > 1]
        self.bits = {name: 1 << place for place, name in enumerate(live)}
        self.data = sum(self.bits[name] for name in mesh.data_axes if name in self.bits)
        self.shard = self.bits.get(self.step.group, 0) if self.step.sharding else 0
        self._raw = Standing(self.data)

    def axes(self, mask: int) -> list[str]:
        """The names of some bits, in mesh order."""
        return [name for name, bit in self.bits.items() if mask & bit]

    def of(self, name: str) -> Standing:
        return self.known.get(name, EQUAL)

    def held(self, holding: Holding) -> Standing:
        """How a state must stand, before the step and behind it."""
        if holding.local:
            return self._raw
        return EQUAL if isinstance(holding.place, Everywhere) else self._there(0, holding.place)

    def summed(self, held: Accumulator) -> Standing:
        """How an accumulator stands: a rank's own sums, or a member's part of sums over the sharding group."""
        if held.reduced:
            return EQUAL
        if held.cuts is not None:
            return self._there(self.data & ~self.shard, Span(held.cuts, 0, held.cuts[-1]))
        if isinstance(held.place, Everywhere):
            return self._raw
        return self._there(self.data & ~self.shard, held.place)

    def fits(self, found: Standing, wanted: Standing) -> bool:
        """Whether a value stands as it must: it may follow less, and be held by the same one member."""
        if found.own & ~wanted.own or (found.apart & self.shard) != (wanted.apart & self.shard):
            return False
        if found.apart & ~wanted.apart:
            return False
        one = alone(wanted.part)
        return found.part == wanted.part or (one is not None and one == alone(found.part))

    def run(self) -> Sweep:
        """Fill the table; returns itself."""
        step, known = self.step, self.known
        if not self.bits:
            return self
        known.update(dict.fromkeys(step.training.batch, self._raw))
        for holding in step.holdings:
            self._note(holding.input, self._raw if holding.input in step.carried else self.held(holding))
        for held in step.accumulators:
            self._note(held.input, self.summed(held))
        everything = Standing(sum(self.bits.values()))
        for node in step.graph.nodes:
            if node.domain == COMM:
                self._call(node)
            elif node.domain == SPMD:
                self._layout(node)
            elif draws(node):
                self._give(node, everything)
            else:
                operands = node.inputs if node.op_type != "CastLike" else node.inputs[:1]  # the other gives its type
                found = [known[name] for name in operands if name in known]
                if node.captures:
                    found += [known[name] for name in node.captures if name in known]
                if isinstance(node.place, Owner) or (found and not reads_shape_only(node)):
                    self._give(node, self._made(node, found))
        return self

    def _note(self, name: str, standing: Standing) -> None:
        if standing != EQUAL:
            self.known[name] = standing

    def _give(self, node: Node, standing: Standing) -> None:
        if standing is not EQUAL and standing != EQUAL:
            self.known.update(dict.fromkeys(node.outputs, standing))
            self.known.pop("", None)  # an absent result is no value

    def _there(self, own: int, place: Place | Owners) -> Standing:
        return Standing(own, self.shard, place) if self.shard else Standing(own)

    def _mask(self, node: Node) -> int:
        """The bits of a call's group."""
        group = str(node.attributes["group"])
        if group not in self._masks:
            self._masks[group] = sum(self.bits[axis] for axis in self.step.mesh.live(group))
        return self._masks[group]

    def _join(self, found: Iterable[Standing]) -> tuple[int, int]:
        own = apart = 0
        for each in found:
            own |= each.own
            apart |= each.apart
        return own, apart

    # --- what a node makes of its operands --------------------------------------------------------------------------

    def _made(self, node: Node, found: Sequence[Standing]) -> Standing:
        """An operator of the graph: it runs where it is placed, on what is there."""
        first = found[0] if found else EQUAL
        if not first.apart and all(each is first for each in found) and isinstance(node.place, Everywhere):
            return first  # nearly all of forward and backward
        own, apart = self._join(found)
        if isinstance(node.place, Owner):
            lost = any(each.apart & self.shard and alone(each.part) != node.place.member for each in found)
            here = self._there(own | (self.shard if lost else 0), node.place)
            return replace(here, apart=here.apart | apart)
        if not apart & self.shard:
            return Standing(own, apart)
        part = self._part(node, [each for each in found if each.apart & self.shard])
        return Standing(own if part is not None else own | self.shard, apart, part)

    def _part(self, node: Node, parts: Sequence[Standing]) -> Place | None:
        """Of which part of a whole the result is the same part; None when it is a share, or nonsense."""
        wanted = node.place if isinstance(node.place, Span) else parts[0].part
        if not isinstance(wanted, Span):
            return None
        member = alone(wanted)
        if all(each.part == wanted for each in parts) and elementwise(node) and self._scalars(node):
            return wanted
        if member is not None and isinstance(node.place, Span) and all(alone(each.part) == member for each in parts):
            return Owner(member)
        return None

    def _scalars(self, node: Node) -> bool:
        """Whether all operands that are no parts have one element."""
        types = self.step.graph.types
        for name in node.inputs:
            if name and not self.of(name).apart & self.shard:
                type = types.get(name)
                if type is not None and type.elements > 1:
                    return False
        return True

    # --- layout operators -------------------------------------------------------------------------------------------

    def _layout(self, node: Node) -> None:
        if isinstance(node.origin, Kept):
            self._kept(node.origin)
            return
        found = [self.of(name) for name in node.inputs]
        own, apart = self._join(found)
        part: Place | Owners | None = None
        if node.op_type == "Local":
            part = None if apart & self.shard else node.place
        elif node.op_type == "Segment":
            part = node.place if self._inside(found[0].part, node.place) else None
        elif node.op_type == "Join":
            part = _joined([each.part for each in found])
        here = self._there(own if part is not None else own | self.shard, part) if part else Standing(own | self.shard)
        self._give(node, replace(here, apart=here.apart | apart | self.shard))

    def _inside(self, whole: Place | Owners | None, part: Place) -> bool:
        if not isinstance(whole, Span) or not isinstance(part, Span):
            return not self.shard
        return whole.cuts == part.cuts and whole.start <= part.start and part.stop <= whole.stop

    def _kept(self, kept: Kept) -> None:
        """An opaque operator acts on the elements of each member's weights, and on its scalars."""
        scalars = [self.of(name) for name in kept.scalars.values()]
        own, apart = self._join(scalars)
        for name in kept.results.values():
            self._note(name, Standing(own, apart))
        for member in kept.members:
            found = [self.of(name) for name in member.inputs.values()]
            mine, off = self._join(found)
            standing = Standing(own | mine, apart | off)
            if not isinstance(member.place, Everywhere):
                clean = all(not each.apart & self.shard or self._same(each.part, member.place) for each in found)
                standing = self._there(standing.own | (0 if clean else self.shard), member.place)
            for name in member.outputs.values():
                self._note(name, standing)

    @staticmethod
    def _same(part: Place | Owners | None, place: Place) -> bool:
        one = alone(place)
        return part == place or (one is not None and one == alone(part))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _call(self, node: Node) -> None:
        group, found = self._mask(node), [self.of(name) for name in node.inputs]
        if node.op_type in ("AllReduce", "Reduce"):
            for each, name in zip(found, node.outputs):
                self._note(name, self._reduced(node, each, group))
            return
        own, apart = self._join(found)
        if node.op_type == "Broadcast":
            for each, name in zip(found, node.outputs):
                self._note(name, self._sent(node, each, group))
        elif node.op_type == "ReduceScatter":
            self._give(node, self._scattered(node, own, found, group))
        elif node.op_type == "AllGather":
            self._give(node, self._gathered(node, found[0], group))
        else:
            self._give(node, Standing(own, apart | group))

    def _reduced(self, node: Node, given: Standing, group: int) -> Standing:
        """All members of the group end with the same, or the root does; parts of a whole cannot be added up."""
        cut = given.part is not None and bool(group & self.shard)
        own = given.own & ~group | (self.shard if cut else 0)
        part = None if group & self.shard else given.part
        if node.op_type == "AllReduce":
            return Standing(own, given.apart & ~group, part)
        if str(node.attributes["group"]) == self.step.group:
            return replace(self._there(own, Owner(int(node.attributes["root"]))), apart=given.apart | self.shard)
        return Standing(own, given.apart | group, part)

    def _sent(self, node: Node, given: Standing, group: int) -> Standing:
        """Every member has what the root had: of data, one rank's own, which is no reduction."""
        own, part = given.own & (self.data | ~group), given.part
        if group & self.shard and given.apart & self.shard:
            own |= 0 if alone(part) == node.attributes["root"] else self.shard
            part = None
        return Standing(own, given.apart & ~group, part)

    def _scattered(self, node: Node, own: int, found: Sequence[Standing], group: int) -> Standing:
        """Reduced, and each member has another part of it."""
        cut = any(each.part is not None and group & self.shard for each in found)
        _, apart = self._join(found)
        own = own & ~group | (self.shard if cut else 0)
        cuts = node.attributes.get("cuts")
        if cuts is not None and group == self.shard and self.shard:
            return replace(self._there(own, Span(tuple(cuts), 0, cuts[-1])), apart=apart | group)
        return Standing(own, apart | group)

    def _gathered(self, node: Node, given: Standing, group: int) -> Standing:
        """Parts of a whole make it up; a rank's own values side by side are everybody's, but slices of them are not."""
        own = given.own
        if group & self.shard and given.part is not None:
            own |= 0 if self._covers(node, given.part) else self.shard
            own &= ~(group & ~self.data)
        else:
            own &= ~group | (self.data & given.apart)
        return Standing(own, given.apart & ~group, None if group & self.shard else given.part)

    def _covers(self, node: Node, part: Place | Owners) -> bool:
        """Whether the members' parts lie in a gather as its cuts say."""
        cuts = tuple(node.attributes.get("cuts", ()))
        if isinstance(part, Span):
            return part == Span(cuts, 0, cuts[-1] if cuts else -1)
        shapes = [total_elements([shape]) for shape in parse_shapes(node.attributes.get("shapes", ()))]
        if not isinstance(part, Owners) or len(shapes) != len(part.members) or len(cuts) <= max(part.members):
            return False
        place = 0
        for member, elements in zip(part.members, shapes):
            if not cuts[member] <= place <= place + elements <= cuts[member + 1]:
                return False
            place += elements
        return place == int(cuts[-1])


def _joined(parts: Sequence[Place | Owners | None]) -> Place | Owners | None:
    """Parts one behind the other: of one bucket without a gap, or whole tensors of owners."""
    if all(isinstance(part, Owner) for part in parts):
        return Owners(tuple(part.member for part in parts if isinstance(part, Owner)))
    spans = [part for part in parts if isinstance(part, Span)]
    if len(spans) != len(parts) or any(a.cuts != b.cuts or a.stop != b.start for a, b in pairwise(spans)):
        return None
    return Span(spans[0].cuts, spans[0].start, spans[-1].stop)
