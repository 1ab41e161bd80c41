"""Derives the sharding of every value of the rank-independent graph: one sweep over the nodes, without building ranks.

Each node is checked against the operator's rule, axis by axis; the error names the first violation. Conditions on the
final states are in ``gopt.lower.agreement``.
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
from gopt.operators.kinds import ELEMENTWISE, MAY_DRAW, SIZES, TYPED
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
from gopt.spmd.stage_plan import transfers


def infer_shardings(program: SpmdProgram, *, strict: bool = True) -> Shardings:
    """The sharding of every value; raises InvariantError for the first node that breaks a rule.

    ``strict``: whether a violated rule is an error; else the node's results get the node's placement.
    """
    return ShardingInference(program, strict).run()


def shardings_so_far(program: SpmdProgram, shardings: Shardings | None = None) -> Shardings:
    """Return the sharding of every value of an unfinished program, without verification.

    ``shardings``: known, if only the order of nodes has changed.
    """
    return program.once("shardings", lambda: shardings or infer_shardings(program, strict=False))


def parts_so_far(program: SpmdProgram) -> dict[str, Sharding]:
    """Return the values held in parts of a bucket, of an unfinished program, without verification."""
    return program.once("parts", lambda: shardings_so_far(program).parts())


class ShardingInference:
    """A sweep over a program, which fills ``table``."""

    __slots__ = (
        "_index", "_joined", "_members", "_placed_values", "_rows", "axes", "known", "program", "strict", "table",
    )  # fmt: skip

    def __init__(self, program: SpmdProgram, strict: bool) -> None:
        self.program = program
        self.strict = strict
        self.table = Shardings(program)
        self.axes, self.known = self.table.axes, self.table.known
        self._placed_values: set[str] = set()
        """Values of some members only, as in ``specialise``: sharded states, and results of nodes with a place."""
        self._rows = {row: row for row in (self.table.equal, self.table.own)}
        """One object for equal placements: other tables go by the identities of these."""
        self._members: dict[Sharding, Placements | None] = {}
        self._joined: dict[tuple[int, int, int], tuple[Placements, Placements, Placements, Placements | None]] = {}
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
            row = self.table.placed(self.table.own, state.sharding) if carried else self.table.state(state)
            self.table.note(state.input, row)
        for accumulator in program.accumulators:
            self.table.note(accumulator.input, self.table.accumulator(accumulator))
        self._placed_values = {state.input for state in program.states if state.sharded}
        live: set[int] | None = None
        for node in program.graph.nodes:
            try:
                self._visit(node)
            except InvariantError:
                if self.strict:
                    live = program.live_nodes() if live is None else live
                    if id(node) in live:  # a dead one is seen by nothing, and prune takes it
                        raise
                self.table.give(node.outputs, self.table.placed(self.table.equal, node.sharding))
        for accumulator in program.accumulators:  # zeros, which are sharded as the sums are
            self.table.note(accumulator.output, self.table.accumulator(accumulator))
        return self.table

    def _visit(self, node: Node) -> None:
        if node.sharding.by_axis or node.domain == SPMD:
            self._placed_values.update(node.outputs)
        if node.domain == COMM and node.op_type in MESSAGES:
            self.table.give(node.outputs, self.table.placed(self.table.equal, node.sharding))
        elif node.domain == COMM:
            self._call(node)
        elif node.domain == SPMD:
            self._layout(node)
        elif node.op_type in MAY_DRAW and draws(node):
            self._node(node, drawn=True)
            drawn = self.table.placed(self.table.everywhere, node.sharding)
            self.known.update((name, drawn) for name in node.outputs if name)
        else:
            self._node(node)

    # --- kinds of nodes ---

    def _node(self, node: Node, *, drawn: bool = False) -> None:
        if node.op_type in SIZES and node.is_in(SIZES) and node.sharding.flat is None:
            self._shape(node)
            return
        rows = self.known
        typed = node.is_in(TYPED)  # its second operand gives a type alone
        read = [rows[name] for name in (node.inputs[:1] if typed else node.inputs) if name in rows]
        if node.captures:
            read += [rows[name] for name in node.captures if name in rows]
        if not node.sharding.by_axis:
            if not read:
                return
            if all(row is self.table.own for row in read):  # nearly all of forward and backward
                self.table.give(node.outputs, self.table.own)
                return
        elif not typed and (shard := self._shard_of(node, read)) is not None:  # nearly all of an update that is cut
            self.table.give(node.outputs, shard)
            return
        members = self._place(node.sharding)
        if members is not None and (row := self._whole(members, read)) is not None:  # on stages: nearly all nodes
            self.table.give(node.outputs, row)
            return
        operands = node.inputs[:1] if typed else node.reads
        uses = [self._use(node, operands, axis) for axis in range(len(self.axes))]
        uses = [replace(use, standard=False) for use in uses] if drawn else uses
        self.table.give(node.outputs, tuple(self._checked(node, axis, use) for axis, use in enumerate(uses)))

    def _place(self, sharding: Sharding) -> Placements | None:
        """Return the placement of nodes on single members of some axes, and on all members of others, one object for
        equal ones; None for nodes on parts of a bucket."""
        if sharding not in self._members:
            parts = all(isinstance(part, OnMember) for _, part in sharding.by_axis)
            row = self.table.placed(self.table.equal, sharding)
            self._members[sharding] = self._rows.setdefault(row, row) if parts else None
        return self._members[sharding]

    def _whole(self, members: Placements, placements: Sequence[Placements]) -> Placements | None:
        """Return the placements of a result of whole operands, equal or each member's own (``rules.whole``), or on the
        member that runs the node (``rules.on_member``); None with any other operand."""
        union = members
        for row in placements:
            key = id(members), id(union), id(row)
            if key not in self._joined:  # the objects stay, so that their ids stay theirs
                new = _join(members, union, row)
                self._joined[key] = members, union, row, None if new is None else self._rows.setdefault(new, new)
            joined = self._joined[key][3]
            if joined is None:
                return None
            union = joined
        return union

    def _shard_of(self, node: Node, rows: Sequence[Placements]) -> Placements | None:
        """Return the placements of an elementwise node on a part of a bucket.

        ``rows``: the placements of operands that are not replicated. Other operands must be scalars. None for any
        other node: the operator's rule decides.
        """
        by_axis = node.sharding.by_axis
        if not rows or len(by_axis) != 1 or not isinstance(by_axis[0][1], FlatShard) or not node.is_in(ELEMENTWISE):
            return None
        shard = rows[0]
        if shard != self.table.placed(self.table.equal, node.sharding):
            return None
        for row in rows:
            if row is not shard and row != shard:
                return None
        types = self.program.graph.types
        for name in node.inputs:
            if name and name not in self.known and (name not in types or types[name].elements != 1):
                return None
        return shard

    def _shape(self, node: Node) -> None:
        """Open shapes of members' own values, as of a shard, are each member's own; other shapes are equal."""
        type = self.program.graph.types.get(node.inputs[0])
        static = type is not None and type.static
        row: list[Placement] = []
        for axis, (operand,) in enumerate(self.table.operands(node.inputs, axis) for axis in range(len(self.axes))):
            if isinstance(place := self.table.place(node.sharding, axis), OnMember):
                row.append(self._checked(node, axis, Use(node.op_type, (operand,), place)))
                continue
            if isinstance(operand.placement, OnMember):
                raise self._offence(node, axis, Mismatch(operand, "a value that all members have"))
            whole = isinstance(operand.placement, Replicated) or (static and not isinstance(operand.placement, SHARDS))
            row.append(REPLICATED if whole else PER_MEMBER)
        self.table.give(node.outputs, tuple(row))

    def _use(self, node: Node, names: Sequence[str], axis: int) -> Use:
        placement = self.table.place(node.sharding, axis)
        types = self.program.graph.types
        backwards = [types.get(name) for name in node.outputs if name]
        single = all(type is not None and type.elements == 1 for type in backwards)
        standard = node.domain in ("", "ai.onnx")
        dtype = backwards[0].dtype if backwards and backwards[0] is not None else ""
        operands = self.table.operands(names, axis)
        if any(isinstance(operand.placement, FlagCount) for operand in operands):
            operands = tuple(replace(operand, zero=self._zero(operand.name)) for operand in operands)
        return Use(node.op_type, operands, placement, single, dtype, standard)

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
        elif transfers(node):
            for sent, received in zip(node.inputs, node.outputs):
                self.table.give([received], self._row(node, [sent]))
        else:
            self.table.give(node.outputs, self._row(node, node.inputs))

    def _row(self, node: Node, inputs: Sequence[str]) -> Placements:
        """The placements that a layout operator gives a result of ``inputs``, by axis."""
        row: list[Placement] = []
        flat = node.sharding.flat[0] if node.sharding.flat is not None else None
        for axis in range(len(self.axes)):
            operands, placement = self.table.operands(inputs, axis), self.table.place(node.sharding, axis)
            beside = node.attributes.get("group", flat) != self.axes[axis]
            if beside and transfers(node):
                row.append(self._checked(node, axis, Use("Identity", operands, placement)))
                continue
            if beside and isinstance(placement, (Replicated, OnMember)):
                row.append(self._checked(node, axis, Use(node.op_type, operands, placement, standard=False)))
                continue
            self._check_there(node, axis, operands)
            size = self.program.mesh.size(self.axes[axis])
            try:
                row.append(lay(LayoutUse(node.op_type, node.attributes, placement, size), operands))
            except Mismatch as wrong:
                raise self._offence(node, axis, wrong) from None
        return tuple(row)

    def _check_there(self, node: Node, axis: int, operands: Sequence[Operand]) -> None:
        """Check that the operands of a guard or join have a place: only placed nodes and states provide a place."""
        if node.op_type in ("Select", "LocalConcat"):
            for operand in operands:
                if operand.name not in self._placed_values:
                    raise self._offence(node, axis, Mismatch(operand, "a value of nodes that some members run"))

    def _kept(self, node: Node, call: RefoldedCall) -> None:
        """An opaque operator acts on each member's elements of the weights, with common scalars."""
        scalars = list(call.scalars.values())
        for axis in range(len(self.axes)):
            for name in call.results.values():
                part = self._checked(node, axis, Use(node.op_type, self.table.operands(scalars, axis), standard=False))
                self.table.set(name, axis, part)
            for member in call.members:
                shard = self.table.place(member.sharding, axis)
                operands = self.table.operands([*member.inputs.values(), *scalars], axis)
                placement = self._acts_on(node, axis, shard, operands)
                for name in member.outputs.values():
                    self.table.set(name, axis, placement)

    def _acts_on(self, node: Node, axis: int, placement: Place, operands: tuple[Operand, ...]) -> Placement:
        if isinstance(placement, Replicated):
            return self._checked(node, axis, Use(node.op_type, operands, standard=False))
        one = holder(placement)
        for operand in operands:
            holds = operand.placement == placement or (one is not None and holder(operand.placement) == one)
            if not holds and not isinstance(operand.placement, Replicated):
                raise self._offence(node, axis, Mismatch(operand, f"{placement}, or a value equal on all members"))
        return placement

    def _call(self, node: Node) -> None:
        axes = [self._converted(node, axis) for axis in range(len(self.axes))]
        rows = [tuple(placements) for placements in zip(*axes)]  # operand by operand
        if node.op_type in ("AllReduce", "Reduce", "Broadcast") and rows:  # result by result; else one for all
            for name, row in zip(node.outputs, rows):
                self.table.note(name, row)
            return
        outcome = rows[0] if rows else self.table.everywhere
        for name, row in zip(node.inputs, rows):
            outcome = outcome if row == outcome else self._mixed(node, name, outcome, row)
        self.table.give(node.outputs, outcome)

    def _converted(self, node: Node, axis: int) -> list[Placement]:
        """Return the placements of a call's results along an axis, inside or outside its group."""
        group = self.program.mesh.live(str(node.attributes["group"]))
        operands = self.table.operands(node.inputs, axis)
        inside = self.axes[axis] in group
        placement = self.table.place(node.sharding, axis)
        if not inside and not isinstance(placement, Replicated):
            return [self._checked(node, axis, Use("Identity", (value,), placement)) for value in operands]
        # Calls over axes that see other data are gopt's: the source's calls were taken over, or refused.
        data = self.axes[axis] in self.program.mesh.data_axes
        call = CollectiveUse(node.op_type, node.attributes, len(group) == 1, data, node.made_by == "statistics")
        try:
            if inside and node.op_type == "Broadcast":
                new = self.program.training.new_statistics
                return [convert(replace(call, statistic=to in new), value) for value, to in zip(operands, node.outputs)]
            if inside:
                return [convert(call, value) for value in operands]
            moved = [any(self._differs(value.name, peer) for peer in group) for value in operands]
            return [beside(call, value, differs) for value, differs in zip(operands, moved)]
        except Mismatch as wrong:
            raise self._offence(node, axis, wrong) from None

    def _mixed(self, node: Node, name: str, one: Placements, row: Placements) -> Placements:
        """Return the placements of a call's result for operands that differ along axes outside the group."""
        mixed: list[Placement] = []
        for axis, (a, b) in enumerate(zip(one, row)):
            if a != b and not {type(a), type(b)} <= {Replicated, PerMember}:
                raise self._offence(node, axis, Mismatch(Operand(name, b), f"{a}, as the others are"))
            mixed.append(a if a == b else PER_MEMBER)
        return tuple(mixed)

    def _differs(self, name: str, axis: str) -> bool:
        return not isinstance(self.table.of(name)[self.axes.index(axis)], Replicated)

    def _offence(self, node: Node, axis: int, wrong: Mismatch) -> InvariantError:
        name, placement = wrong.operand.name, wrong.operand.placement
        return InvariantError(
            f"{node.op_type} {node.label!r} reads {name!r}, which is {placement} along {self.axes[axis]}",
            f"it takes {wrong.expected}",
        )


def _join(members: Placements, so_far: Placements, operand: Placements) -> Placements | None:
    """Return the placements of a node's result once it reads one more operand; None where ``rules`` decide."""
    joined = []
    for runs, one, read in zip(members, so_far, operand):
        if isinstance(runs, OnMember):
            if not isinstance(read, Replicated) and holder(read) != runs.member:
                return None
            joined.append(one)
        elif isinstance(read, (Replicated, PerMember)):
            joined.append(one if isinstance(read, Replicated) else read)
        else:
            return None
    return tuple(joined)
