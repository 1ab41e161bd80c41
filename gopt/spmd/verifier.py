"""Derives the sharding of every value of the rank-independent graph: one sweep over the nodes, without building ranks.

Each node is checked against the rule of its operator, axis by axis; the error names the first violation. Conditions on
the final states are in ``gopt.lower.agreement``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gopt.collectives.messages import MESSAGES
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import draws
from gopt.ir.opaque.refold import RefoldedCall
from gopt.operators.kinds import ELEMENTWISE, MAY_DRAW, SIZES
from gopt.records.placements import (
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
    Sharding,
    holder,
)
from gopt.spmd.calls import CollectiveUse, beside, convert
from gopt.spmd.layouts import LayoutUse, lay
from gopt.spmd.program import SpmdProgram
from gopt.spmd.rules import Mismatch, Operand, Use, result
from gopt.spmd.shardings import SHARDS, Shardings


def infer_shardings(program: SpmdProgram, *, strict: bool = True) -> Shardings:
    """The sharding of every value; raises InvariantError for the first node that breaks a rule.

    ``strict``: whether a violated rule is an error; else the node's results get the placement at which it runs.
    """
    return ShardingInference(program, strict).run()


def shardings_so_far(program: SpmdProgram, known: Shardings | None = None) -> Shardings:
    """The sharding of every value of a program that passes still change. Nothing is verified.

    ``known``: the shardings where they are known already, because a pass changed the order of nodes and nothing else.
    """
    return program.once("shardings", lambda: known or infer_shardings(program, strict=False))


def parts_so_far(program: SpmdProgram) -> dict[str, Sharding]:
    """The values of which ranks hold parts of a bucket, of a program that passes still change. Nothing is verified."""
    return program.once("parts", lambda: shardings_so_far(program).parts())


class ShardingInference:
    """One sweep over a program, which fills ``table``."""

    __slots__ = ("_index", "_pairs", "_placed_values", "_symbols", "axes", "known", "program", "strict", "table")

    def __init__(self, program: SpmdProgram, strict: bool) -> None:
        self.program = program
        self.strict = strict
        self.table = Shardings(program)
        self.axes, self.known = self.table.axes, self.table.known
        self._placed_values: set[str] = set()
        """Values of some members only, as in ``specialise``: sharded states, and results of nodes with a place."""
        self._symbols: set[str] = set()
        """Names of dimensions of inputs: all ranks have batches of one shape."""
        self._pairs: dict[tuple[int, int], tuple[Placements, Placements, Placements | None]] = {}
        self._index: GraphIndex | None = None
        """Producers of each value, built on first use."""

    def run(self) -> Shardings:
        """Fill the table. Raises InvariantError as ``infer_shardings`` does."""
        if not self.axes:
            return self.table
        program = self.program
        self.known.update((name, self.table.batch(name)) for name in program.training.batch)
        for state in program.states:
            carried = state.input in program.loop_carried
            self.table.note(state.input, self.table.own if carried else self.table.state(state))
        for held in program.accumulators:
            self.table.note(held.input, self.table.accumulator(held))
        self._placed_values = {state.input for state in program.states if state.sharded}
        shapes = [type.shape or () for type in program.training.graph.inputs.values()]
        self._symbols = {size for shape in shapes for size in shape if isinstance(size, str)}
        live: set[int] | None = None
        for node in program.graph.nodes:
            try:
                self._visit(node)
            except InvariantError:
                if self.strict:
                    live = program.live_nodes() if live is None else live
                    if id(node) in live:  # a dead one is seen by nothing, and prune takes it
                        raise
                self.table.give(node, self.table.placed(self.table.equal, node.sharding))
        for held in program.accumulators:  # zeros, which are sharded as the sums are
            self.table.note(held.output, self.table.accumulator(held))
        return self.table

    def _visit(self, node: Node) -> None:
        if node.sharding.by_axis or node.domain == SPMD:
            self._placed_values.update(node.outputs)
        if node.domain == COMM and node.op_type in MESSAGES:
            self.table.give(node, self.table.placed(self.table.equal, node.sharding))
        elif node.domain == COMM:
            self._call(node)
        elif node.domain == SPMD:
            self._layout(node)
        elif node.op_type in MAY_DRAW and draws(node):
            self._node(node, drawn=True)
            self.known.update((name, self.table.everywhere) for name in node.outputs if name)
        else:
            self._node(node)

    # --- kinds of nodes ---

    def _node(self, node: Node, *, drawn: bool = False) -> None:
        if node.op_type in SIZES and node.is_in(SIZES) and not node.sharding.by_axis:
            self._shape(node)
            return
        known = self.known
        typed = node.op_type == "CastLike" and node.is_a("CastLike")  # its second operand gives a type alone
        found = [known[name] for name in (node.inputs[:1] if typed else node.inputs) if name in known]
        if node.captures:
            found += [known[name] for name in node.captures if name in known]
        if not node.sharding.by_axis:
            if not found:
                return
            if all(each is self.table.own for each in found):  # nearly all of forward and backward
                self.table.give(node, self.table.own)
                return
            if (whole := self._whole(found)) is not None:
                self.table.give(node, whole)
                return
        elif not typed and (shard := self._shard_of(node, found)) is not None:  # nearly all of an update that is cut
            self.table.give(node, shard)
            return
        operands = node.inputs[:1] if typed else node.reads
        uses = [self._use(node, operands, axis) for axis in range(len(self.axes))]
        uses = [replace(use, standard=False) for use in uses] if drawn else uses
        self.table.give(node, tuple(self._checked(node, axis, use) for axis, use in enumerate(uses)))

    def _whole(self, found: Sequence[Placements]) -> Placements | None:
        """The placements of what is made of values that members have whole, equal or each its own, as ``rules.whole``
        says; None where other operands are among them."""
        made = self.table.equal
        for row in found:
            key = id(made), id(row)
            if key not in self._pairs:
                simple = all(isinstance(each, (Replicated, PerMember)) for each in row)
                joined = tuple(a if isinstance(b, Replicated) else b for a, b in zip(made, row)) if simple else None
                self._pairs[key] = made, row, joined  # whose ids are theirs as long as they are here
            joined = self._pairs[key][2]
            if joined is None:
                return None
            made = joined
        return made

    def _shard_of(self, node: Node, found: Sequence[Placements]) -> Placements | None:
        """Return the placements of an elementwise node that runs on the part of a bucket which its operands have.

        ``found``: the placements of its operands that are not replicated. All others must have one element. None for
        any other node: the rule of its operator decides.
        """
        by_axis = node.sharding.by_axis
        if not found or len(by_axis) != 1 or not isinstance(by_axis[0][1], FlatShard) or not node.is_in(ELEMENTWISE):
            return None
        shard = found[0]
        if shard != self.table.placed(self.table.equal, node.sharding):
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
            isinstance(size, int) or size in self._symbols for size in ((None,) if type.shape is None else type.shape)
        )
        made: list[Placement] = []
        for axis, (operand,) in enumerate(self.table.operands(node.inputs, axis) for axis in range(len(self.axes))):
            if isinstance(operand.placement, OnMember):
                raise self._offence(node, axis, Mismatch(operand, "a value that all members have"))
            whole = isinstance(operand.placement, Replicated) or (same and not isinstance(operand.placement, SHARDS))
            made.append(REPLICATED if whole else PER_MEMBER)
        self.table.give(node, tuple(made))

    def _use(self, node: Node, names: Sequence[str], axis: int) -> Use:
        place = self.table.place(node.sharding, axis)
        types = self.program.graph.types
        made = [types.get(name) for name in node.outputs if name]
        single = all(type is not None and type.elements == 1 for type in made)
        standard = node.domain in ("", "ai.onnx")
        dtype = made[0].dtype if made and made[0] is not None else ""
        operands = self.table.operands(names, axis)
        if any(isinstance(operand.placement, FlagCount) for operand in operands):
            operands = tuple(replace(operand, zero=self._zero(operand.name)) for operand in operands)
        return Use(node.op_type, operands, place, single, dtype, standard)

    def _zero(self, name: str) -> bool:
        """Return whether a value is a constant zero."""
        if self._index is None:
            self._index = GraphIndex(self.program.graph)
        return self._index.constants.zero(name)

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
            operands, place = self.table.operands(node.inputs, axis), self.table.place(node.sharding, axis)
            if isinstance(place, Replicated) and node.attributes.get("group") != self.axes[axis]:
                made.append(self._checked(node, axis, Use(node.op_type, operands, standard=False)))
                continue
            self._check_there(node, axis, operands)
            size = self.program.mesh.size(self.axes[axis])
            try:
                made.append(lay(LayoutUse(node.op_type, node.attributes, place, size), operands))
            except Mismatch as wrong:
                raise self._offence(node, axis, wrong) from None
        self.table.give(node, tuple(made))

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
                given = self._checked(node, axis, Use(node.op_type, self.table.operands(scalars, axis), standard=False))
                self.table.set(name, axis, given)
            for member in kept.members:
                place = self.table.place(member.sharding, axis)
                operands = self.table.operands([*member.inputs.values(), *scalars], axis)
                placement = self._acts_on(node, axis, place, operands)
                for name in member.outputs.values():
                    self.table.set(name, axis, placement)

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
                self.table.note(name, row)
            return
        made = rows[0] if rows else self.table.everywhere
        for name, row in zip(node.inputs, rows):
            made = made if row == made else self._mixed(node, name, made, row)
        self.table.give(node, made)

    def _converted(self, node: Node, axis: int) -> list[Placement]:
        """Return the placements of a call's results along an axis, inside or outside its group."""
        group = self.program.mesh.live(str(node.attributes["group"]))
        operands = self.table.operands(node.inputs, axis)
        inside = self.axes[axis] in group
        place = self.table.place(node.sharding, axis)
        if not inside and not isinstance(place, Replicated):
            return [self._checked(node, axis, Use("Identity", (operand,), place)) for operand in operands]
        # Calls over axes that see other data are gopt's: those of the source were taken over, or refused.
        own = self.axes[axis] in self.program.mesh.data_axes
        call = CollectiveUse(node.op_type, node.attributes, len(group) == 1, own, node.made_by == "statistics")
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
        return not isinstance(self.table.of(name)[self.axes.index(axis)], Replicated)

    def _offence(self, node: Node, axis: int, wrong: Mismatch) -> InvariantError:
        name, given = wrong.operand.name, wrong.operand.placement
        return InvariantError(
            f"{node.op_type} {node.label!r} reads {name!r}, which is {given} along {self.axes[axis]}",
            f"it takes {wrong.expected}",
        )
