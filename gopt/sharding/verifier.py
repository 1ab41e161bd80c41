"""Derives the sharding of every value of the rank-independent graph: one sweep over the nodes, without building ranks.

Each node is checked against the rule of its operator, axis by axis; the error names the first violation. Conditions on
the final states are in ``gopt.lower.agreement``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.graph_walks import GraphIndex
from gopt.analysis.linearity import is_zero
from gopt.analysis.operators import ELEMENTWISE, MAY_DRAW, draws
from gopt.collectives.messages import MESSAGES
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.types import TensorType
from gopt.opaque.refold import RefoldedCall
from gopt.program import Accumulator, ShardedState, SpmdProgram
from gopt.sharding.bucket_order import check_bucket_order
from gopt.sharding.calls import Conversion, beside, convert
from gopt.sharding.layouts import Layout, lay
from gopt.sharding.placements import (
    EVERYWHERE,
    PER_MEMBER,
    REPLICATED,
    FlagCount,
    FlatShard,
    OnMember,
    PerMember,
    Place,
    Placement,
    Placements,
    Replicated,
    Shard,
    Sharding,
    holder,
)
from gopt.sharding.rules import Mismatch, Operand, Use, result


@dataclass(slots=True)
class Shardings:
    """The sharding of every value that is not replicated along all axes. ``axes``: those with several members."""

    program: SpmdProgram
    strict: bool = True
    """If true, a violated rule is an error; else the node's results get the placement at which it runs."""
    axes: tuple[str, ...] = field(init=False)
    known: dict[str, Placements] = field(default_factory=dict)
    _equal: Placements = field(init=False)
    _own: Placements = field(init=False)
    _everywhere: Placements = field(init=False)
    """Each member's own along all axes."""
    _placed_values: set[str] = field(default_factory=set)
    """Values of some members only, as in ``specialise``: sharded states, and results of nodes with a place."""
    _symbols: set[str] = field(default_factory=set)
    """Names of dimensions of inputs: all ranks have batches of one shape."""
    _index: GraphIndex | None = None
    """Producers of each value, built on first use."""

    def __post_init__(self) -> None:
        mesh = self.program.mesh
        self.axes = tuple(name for name, size in mesh.axes if size > 1)
        self._everywhere = tuple(PER_MEMBER for _ in self.axes)
        self._equal = tuple(REPLICATED for _ in self.axes)
        self._own = tuple(PER_MEMBER if name in mesh.data_axes else REPLICATED for name in self.axes)

    def of(self, name: str) -> Placements:
        """The sharding of a value."""
        return self.known.get(name, self._equal)

    def sharding(self, name: str) -> Sharding:
        """The sharding of a value, by the names of axes."""
        by_axis = zip(self.axes, self.known.get(name, ()))
        return Sharding(tuple((axis, each) for axis, each in by_axis if not isinstance(each, Replicated)))

    def parts(self) -> dict[str, Sharding]:
        """Every value of which ranks hold parts of a bucket. Shards of a dimension are not listed: their types in the
        graph are those of one rank."""
        found: dict[str, Sharding] = {}
        flat: dict[int, Sharding | None] = {}
        """By the id of placements, which many values share: their sharding, None where no part of a bucket is held."""
        for name, placements in self.known.items():
            if id(placements) not in flat:
                cut = any(isinstance(placement, FlatShard) for placement in placements)
                flat[id(placements)] = self.sharding(name) if cut else None
            sharding = flat[id(placements)]
            if sharding is not None:
                found[name] = sharding
        return found

    def state(self, state: ShardedState) -> Placements:
        """Return the placements that a state must have, before the step and after it."""
        if state.local:
            return self._own
        placed = self._placed(self._equal, state.sharding)
        apart = self.program.parts.get(state.slices[0].tensor) if state.slices else None
        if apart is None:
            return placed
        axes = apart.sharding_axes
        return tuple(PER_MEMBER if axis in axes else place for axis, place in zip(self.axes, placed))

    def _batch(self, name: str) -> Placements:
        """Return the placements of a batch input: rank-local, also along axes that receive parts of it."""
        fed = self.program.fed.get(name)
        axes = fed.sharding_axes if fed is not None else ()
        return tuple(PER_MEMBER if axis in axes else own for axis, own in zip(self.axes, self._own))

    def accumulator(self, held: Accumulator) -> Placements:
        """Return the placements of an accumulator: rank-local sums, or shards of sums over the sharding group."""
        if held.reduced:
            return self._equal
        placed = self._placed(self._own, held.sharding)
        return tuple(PER_MEMBER if axis in held.own_along else place for axis, place in zip(self.axes, placed))

    def infer(self) -> Shardings:
        """Fill the table; raises InvariantError for the first node that breaks a rule. Returns itself."""
        if not self.axes:
            return self
        program = self.program
        self.known.update((name, self._batch(name)) for name in program.training.batch)
        for state in program.states:
            self._note(state.input, self._own if state.input in program.loop_carried else self.state(state))
        for held in program.accumulators:
            self._note(held.input, self.accumulator(held))
        self._placed_values = {state.input for state in program.states if state.sharded}
        shapes = [type.shape or () for type in program.training.graph.inputs.values()]
        self._symbols = {size for shape in shapes for size in shape if isinstance(size, str)}
        live = self._live() if self.strict else set()
        for node in program.graph.nodes:
            try:
                self._visit(node)
            except InvariantError:
                if id(node) in live:  # a dead one is seen by nothing, and prune takes it
                    raise
                self._give(node, self._placed(self._equal, node.sharding))
        for held in program.accumulators:  # zeros, which are sharded as the sums are
            self._note(held.output, self.accumulator(held))
        if self.strict:
            check_bucket_order(program, live)
        return self

    def _visit(self, node: Node) -> None:
        if node.sharding.by_axis or node.domain == SPMD:
            self._placed_values.update(node.outputs)
        if node.domain == COMM and node.op_type in MESSAGES:
            self._give(node, self._placed(self._equal, node.sharding))
        elif node.domain == COMM:
            self._call(node)
        elif node.domain == SPMD:
            self._layout(node)
        elif node.op_type in MAY_DRAW and draws(node):
            self._node(node, drawn=True)
            self.known.update((name, self._everywhere) for name in node.outputs if name)
        else:
            self._node(node)

    def _live(self) -> set[int]:
        """Nodes on which a result of the step depends, by id."""
        needed, live = self.program.results(), set()
        for node in reversed(self.program.graph.nodes):
            if node.domain == COMM or not needed.isdisjoint(node.outputs):
                live.add(id(node))
                needed.update(node.reads)
        return live

    # --- kinds of nodes ---------------------------------------------------------------------------------------------

    def _node(self, node: Node, *, drawn: bool = False) -> None:
        if node.op_type in ("Shape", "Size") and node.is_a("Shape", "Size") and not node.sharding.by_axis:
            self._shape(node)
            return
        known = self.known
        found = [known[name] for name in node.inputs if name in known]
        if node.captures:
            found += [known[name] for name in node.captures if name in known]
        if not node.sharding.by_axis:
            if not found:
                return
            if all(each is self._own for each in found):  # nearly all of forward and backward
                self._give(node, self._own)
                return
        elif (shard := self._shard_of(node, found)) is not None:  # nearly all of an update that is cut
            self._give(node, shard)
            return
        operands = node.inputs[:1] if node.is_a("CastLike") else node.reads  # the other gives its type
        uses = [self._use(node, operands, axis) for axis in range(len(self.axes))]
        uses = [replace(use, standard=False) for use in uses] if drawn else uses
        self._give(node, tuple(self._checked(node, axis, use) for axis, use in enumerate(uses)))

    def _shard_of(self, node: Node, found: Sequence[Placements]) -> Placements | None:
        """Return the placements of an elementwise node that runs on the part of a bucket which its operands have.

        ``found``: the placements of its operands that are not replicated. All others must have one element. None for
        any other node: the rule of its operator decides.
        """
        by_axis = node.sharding.by_axis
        if not found or len(by_axis) != 1 or not isinstance(by_axis[0][1], FlatShard) or not node.is_in(ELEMENTWISE):
            return None
        shard = found[0]
        if shard != self._placed(self._equal, node.sharding):
            return None
        for other in found:
            if other is not shard and other != shard:
                return None
        types = self.program.graph.types
        for name in node.inputs:
            if name and name not in self.known and (name not in types or types[name].elements != 1):
                return None
        return shard

    def _shape(self, node: Node) -> None:
        """The shape of a shard is each member's own, and so is one that follows data; no other is."""
        type = self.program.graph.types.get(node.inputs[0])
        same = type is not None and all(
            isinstance(size, int) or size in self._symbols for size in type.shape or (None,)
        )
        made: list[Placement] = []
        for axis, (operand,) in enumerate(self._operands(node.inputs, axis) for axis in range(len(self.axes))):
            if isinstance(operand.placement, OnMember):
                raise self._offence(node, axis, Mismatch(operand, "a value that all members have"))
            whole = isinstance(operand.placement, Replicated) or (same and not isinstance(operand.placement, _SHARDS))
            made.append(REPLICATED if whole else PER_MEMBER)
        self._give(node, tuple(made))

    def _use(self, node: Node, names: Sequence[str], axis: int) -> Use:
        place = self._place(node.sharding, axis)
        types = self.program.graph.types
        made = [types.get(name) for name in node.outputs if name]
        single = all(type is not None and type.elements == 1 for type in made)
        standard = node.domain in ("", "ai.onnx")
        dtype = made[0].dtype if made and made[0] is not None else ""
        operands = self._operands(names, axis)
        if any(isinstance(operand.placement, FlagCount) for operand in operands):
            operands = tuple(replace(operand, zero=self._zero(operand.name)) for operand in operands)
        return Use(node.op_type, operands, place, single, dtype, standard)

    def _zero(self, name: str) -> bool:
        """Return whether a value is a constant zero."""
        if self._index is None:
            self._index = GraphIndex(self.program.graph)
        return is_zero(self._index, name)

    def _checked(self, node: Node, axis: int, use: Use) -> Placement:
        try:
            return result(use)
        except Mismatch as wrong:
            raise self._offence(node, axis, wrong) from None

    def _layout(self, node: Node) -> None:
        if isinstance(node.origin, RefoldedCall):
            self._kept(node, node.origin)
            return
        made: list[Placement] = []
        for axis in range(len(self.axes)):
            operands, place = self._operands(node.inputs, axis), self._place(node.sharding, axis)
            if isinstance(place, Replicated) and node.attributes.get("group") != self.axes[axis]:
                made.append(self._checked(node, axis, Use(node.op_type, operands, standard=False)))
                continue
            self._check_there(node, axis, operands)
            size = self.program.mesh.size(self.axes[axis])
            try:
                made.append(lay(Layout(node.op_type, node.attributes, place, size), operands))
            except Mismatch as wrong:
                raise self._offence(node, axis, wrong) from None
        self._give(node, tuple(made))

    def _check_there(self, node: Node, axis: int, operands: Sequence[Operand]) -> None:
        """Check that the operands of a guard or join have a place: only nodes with a place, and states, provide one."""
        if node.op_type in ("Select", "LocalConcat"):
            for operand in operands:
                if operand.name not in self._placed_values:
                    raise self._offence(node, axis, Mismatch(operand, "a value of nodes that some members run"))

    def _kept(self, node: Node, kept: RefoldedCall) -> None:
        """An opaque operator acts on the elements of each member's weights, with scalars that all have."""
        scalars = list(kept.scalars.values())
        for axis in range(len(self.axes)):
            for name in kept.results.values():
                given = self._checked(node, axis, Use(node.op_type, self._operands(scalars, axis), standard=False))
                self._set(name, axis, given)
            for member in kept.members:
                place = self._place(member.sharding, axis)
                operands = self._operands([*member.inputs.values(), *scalars], axis)
                placement = self._acts_on(node, axis, place, operands)
                for name in member.outputs.values():
                    self._set(name, axis, placement)

    def _acts_on(self, node: Node, axis: int, place: Place, operands: tuple[Operand, ...]) -> Placement:
        if isinstance(place, Replicated):
            return self._checked(node, axis, Use(node.op_type, operands, standard=False))
        one = holder(place)
        for operand in operands:
            same = operand.placement == place or (one is not None and holder(operand.placement) == one)
            if not same and not isinstance(operand.placement, Replicated):
                raise self._offence(node, axis, Mismatch(operand, f"{place}, or a value equal on all members"))
        return place

    def _call(self, node: Node) -> None:
        axes = [self._converted(node, axis) for axis in range(len(self.axes))]
        rows = [tuple(placements) for placements in zip(*axes)]  # operand by operand
        if node.op_type in ("AllReduce", "Reduce", "Broadcast") and rows:  # result by result; else one for all
            for name, row in zip(node.outputs, rows):
                self._note(name, row)
            return
        made = rows[0] if rows else self._everywhere
        for name, row in zip(node.inputs, rows):
            made = made if row == made else self._mixed(node, name, made, row)
        self._give(node, made)

    def _converted(self, node: Node, axis: int) -> list[Placement]:
        """Return the placements of a call's results along an axis, inside or outside its group."""
        group = self.program.mesh.live(str(node.attributes["group"]))
        operands = self._operands(node.inputs, axis)
        inside = self.axes[axis] in group
        place = self._place(node.sharding, axis)
        if not inside and not isinstance(place, Replicated):
            return [self._checked(node, axis, Use("Identity", (operand,), place)) for operand in operands]
        # Calls over axes that see other data are gopt's: those of the source were taken over, or refused.
        own = self.axes[axis] in self.program.mesh.data_axes
        call = Conversion(node.op_type, node.attributes, len(group) == 1, own)
        try:
            if inside and node.op_type == "Broadcast":
                new = self.program.training.new_statistics
                return [convert(replace(call, statistic=to in new), each) for each, to in zip(operands, node.outputs)]
            if inside:
                return [convert(call, operand) for operand in operands]
            moved = [any(self._differs(each.name, other) for other in group) for each in operands]
            return [beside(call, operand, each) for operand, each in zip(operands, moved)]
        except Mismatch as wrong:
            raise self._offence(node, axis, wrong) from None

    def _mixed(self, node: Node, name: str, one: Placements, other: Placements) -> Placements:
        """Return the placements of a call's result if its operands differ along axes outside its group."""
        made: list[Placement] = []
        for axis, (a, b) in enumerate(zip(one, other)):
            if a != b and not {type(a), type(b)} <= {Replicated, PerMember}:
                raise self._offence(node, axis, Mismatch(Operand(name, b), f"{a}, as the others are"))
            made.append(a if a == b else PER_MEMBER)
        return tuple(made)

    def _differs(self, name: str, axis: str) -> bool:
        return not isinstance(self.of(name)[self.axes.index(axis)], Replicated)

    # --- the table --------------------------------------------------------------------------------------------------

    def _operands(self, names: Sequence[str], axis: int) -> tuple[Operand, ...]:
        types = self.program.graph.types
        return tuple(_operand(name, self.of(name)[axis], types.get(name)) for name in names if name)

    def _set(self, name: str, axis: int, placement: Placement) -> None:
        row = list(self.of(name))
        row[axis] = placement
        self._note(name, tuple(row))

    def _note(self, name: str, sharding: Placements) -> None:
        if name and sharding != self._equal:
            self.known[name] = sharding

    def _give(self, node: Node, sharding: Placements) -> None:
        if sharding is not self._equal and sharding != self._equal:
            sharding = self._own if sharding == self._own else sharding
            for name in node.outputs:
                if name:  # an absent result is no value
                    self.known[name] = sharding

    def _placed(self, placements: Placements, sharding: Sharding) -> Placements:
        """Return ``placements``, replaced along the axes for which ``sharding`` gives others."""
        if sharding is EVERYWHERE:
            return placements
        said = dict(sharding.by_axis)
        return tuple([said.get(axis, placement) for axis, placement in zip(self.axes, placements)])

    def _place(self, sharding: Sharding, axis: int) -> Place:
        """Return the members that run a node along an axis."""
        place = sharding.on(self.axes[axis]) if sharding is not EVERYWHERE else REPLICATED
        assert isinstance(place, (Replicated, OnMember, FlatShard))
        return place

    def _offence(self, node: Node, axis: int, wrong: Mismatch) -> InvariantError:
        name, given = wrong.operand.name, wrong.operand.placement
        return InvariantError(
            f"{node.op_type} {node.label!r} reads {name!r}, which is {given} along {self.axes[axis]}",
            f"it takes {wrong.expected}",
        )


_SHARDS = (Shard, FlatShard)


def _operand(name: str, placement: Placement, type: TensorType | None) -> Operand:
    if type is None or isinstance(placement, PerMember):
        return Operand(name, placement)
    return Operand(name, placement, type.elements == 1 and not isinstance(placement, _SHARDS), type.dtype)
