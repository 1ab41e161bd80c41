"""Checks which parameter the elements of a bucket belong to: packing and unpacking must use the same order.

A ``FlatShard`` names the elements of a bucket on a member, but not the parameters. A sweep follows the parameters:
gradients, states and low-precision copies belong to a parameter, and so do the results of its update.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from typing import TypeAlias

from gopt.analysis.gradient_terms import gradient_terms
from gopt.analysis.training import Phase, StateKind
from gopt.collectives.layout import parse_shapes, total_elements
from gopt.collectives.messages import MESSAGES
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.opaque.refold import RefoldedCall
from gopt.operators.kinds import CASTS, ELEMENTWISE
from gopt.records.placements import FlatShard
from gopt.spmd.program import BucketSlice, SpmdProgram
from gopt.spmd.stage_plan import transfers

Contents: TypeAlias = tuple[BucketSlice, ...]
"""The parameters whose elements a part of a bucket has, by offset; elements that are no parameter's are not listed, and
none has two parameters."""


def check_bucket_order(program: SpmdProgram) -> None:
    """Raise InvariantError for the first node taking elements of a bucket for another parameter's.

    Shardings must have been inferred without an error. Dead nodes are not checked.
    """
    if not any(size > 1 for _, size in program.mesh.axes):
        return
    live = program.live_nodes()
    order = _BucketOrder(program)
    for node in _sums_first(program):
        if id(node) in live:
            order.visit(node)
    order.check_states()


def _sums_first(program: SpmdProgram) -> list[Node]:
    """Return the nodes in order, but nodes needed for sums over micro-steps first: the update reads the sums."""
    needed, sums = {accumulator.added for accumulator in program.accumulators}, set[int]()
    for node in reversed(program.graph.nodes) if needed else ():
        if not needed.isdisjoint(node.outputs):
            needed.update(node.reads)
            sums.add(id(node))
    return sorted(program.graph.nodes, key=lambda node: id(node) not in sums) if sums else program.graph.nodes


@dataclass(slots=True)
class _BucketOrder:
    """``owners``: whole value -> its parameter; ``contents``: part of a bucket -> the parameters in it. Values of size
    1 have no owner: they are scalars of the update."""

    program: SpmdProgram
    owners: dict[str, str] = field(default_factory=dict)
    contents: dict[str, Contents] = field(default_factory=dict)
    _expected: dict[str, str] = field(default_factory=dict)
    """A name of the source -> the parameter whose elements it must have."""
    _accumulators: dict[str, str] = field(default_factory=dict)
    """The sum after a micro-step -> the accumulator."""
    _gradients: set[str] = field(default_factory=set)
    """Gradients of one parameter each, where what stands for them is made by calls."""

    def __post_init__(self) -> None:
        program, training = self.program, self.program.training
        for state in training.states:
            whole = state.kind in (StateKind.PARAMETER, StateKind.STATISTIC)  # a statistic belongs to itself
            parameter = state.tensor if whole else state.of
            if parameter is not None:
                self._expected.update({state.tensor: parameter, state.updated: parameter})
        shared = Counter(training.gradients.values())  # a gradient of several parameters determines no owner
        unshared = {name for name, parameters in shared.items() if parameters == 1}
        self._expected.update((name, of) for of, name in training.gradients.items() if name in unshared)
        sent = any(node.domain == COMM and node.op_type in MESSAGES for node in program.graph.nodes)
        self._gradients = set() if sent else unshared  # a message does not say whose elements it brings
        for node in training.graph.nodes:
            if node.is_in(CASTS) and node.inputs[0] in self._expected:
                self._expected.setdefault(node.outputs[0], self._expected[node.inputs[0]])
        for sharded in program.states:
            if sharded.copy:
                self._expected[sharded.output] = sharded.slices[0].tensor
            if sharded.sharding.flat is not None:
                self.contents[sharded.input] = self._placed(sharded.slices)
            else:
                self._own([sharded.input], self._expected.get(sharded.slices[0].tensor))
        self._own(training.gradients.values())
        for term, gradient in gradient_terms(training).items():
            if gradient in unshared:
                self._expected[term] = self._expected[gradient]
                self._own([term])
        self._accumulators = {accumulator.added: accumulator.input for accumulator in program.accumulators}

    def visit(self, node: Node) -> None:
        """Follow the operands of a node, and compare them with the source."""
        if node.source is not None and node.inputs != node.source.inputs:
            self._check_read(node, node.source)
        if node.domain == COMM:
            if _follows(node):  # forward and backward of a source may join what they like
                self._call(node)
        elif isinstance(node.origin, RefoldedCall) and node.domain == SPMD:
            for member in node.origin.members:
                self._compute(node, list(member.inputs.values()), list(member.outputs.values()), elementwise=True)
        elif node.domain == SPMD:
            self._layout(node)
        elif _follows(node):
            self._compute(node, node.inputs, node.outputs, elementwise=node.is_in(ELEMENTWISE))
        if node.source is not None and node.outputs != node.source.outputs:
            for old, new in zip(node.source.outputs, node.outputs):
                self._own([new], self._expected.get(old))
        for name in node.outputs:
            if name in self._accumulators:
                self._same(name, self._accumulators[name])

    def check_states(self) -> None:
        """Every shard of a state lists the parameters whose elements it has."""
        for state in self.program.states:
            slices = self.contents.get(state.output, ())
            if state.sharding.flat is not None and (wrong := _conflict((*slices, *self._placed(state.slices)))):
                raise InvariantError(
                    f"the new value of state {state.input!r} has {wrong[0]}, and is held with {wrong[1]}"
                )

    # --- kinds of nodes ---------------------------------------------------------------------------------------------

    def _check_read(self, node: Node, source: Node) -> None:
        """A node of the source with another operand now, such as a gathered parameter, reads the same parameter."""
        for old, new in zip(source.inputs, node.inputs):
            expected, owner = self._expected.get(old), self.owners.get(new)
            if old == new or expected in (None, owner):
                continue
            if owner is not None or (old in self._gradients and self._several(new)):
                of = repr(owner) if owner is not None else "no parameter that is known"
                raise InvariantError(
                    f"{node.op_type} {node.label!r} reads {new!r} for {old!r}: these are elements of {of}",
                    f"they must be elements of {expected!r}",
                )

    def _call(self, node: Node) -> None:
        attributes = node.attributes
        if node.op_type in ("AllReduce", "Reduce", "Broadcast"):
            for old, new in zip(node.inputs, node.outputs):
                self._same(old, new)
                self._check_result(node, new, self.owners.get(new))
        elif node.op_type == "ReduceScatter" and "cuts" in attributes:
            joined = self.contents[node.outputs[0]] = self._joined(node.inputs)
            foreign = next((name for name in node.inputs if name not in self.owners and self._several(name)), None)
            if joined and foreign is not None:
                raise InvariantError(
                    f"{node.op_type} {node.label!r} reads {foreign!r} in a bucket of gradients: it is no parameter's"
                )
        elif node.op_type == "AllGather" and "cuts" in attributes and node.inputs[0] in self.contents:
            self._gather(node, self.contents[node.inputs[0]])

    def _gather(self, node: Node, contents: Contents) -> None:
        """Cut a bucket up into whole tensors."""
        owners, offset = {piece.offset: piece for piece in contents}, 0
        for name, shape in zip(node.outputs, parse_shapes(node.attributes["shapes"])):
            elements = total_elements([shape])
            expected = self._expected.get(name)
            member_slice = owners.get(offset)
            if not elements:
                continue  # an empty part belongs to no parameter
            if member_slice is not None and member_slice.elements == elements:
                self._check_result(node, name, member_slice.tensor)
                self._own([name], member_slice.tensor)
            elif expected is not None and (wrong := _conflict((*contents, BucketSlice(expected, offset, elements)))):
                raise InvariantError(f"{node.op_type} {node.label!r} makes {name!r} of {wrong[0]}: it reads {wrong[1]}")
            offset += elements

    def _check_result(self, node: Node, name: str, owner: str | None) -> None:
        expected = self._expected.get(name)
        if owner is not None and expected not in (None, owner):
            raise InvariantError(
                f"{node.op_type} {node.label!r} makes {name!r} of elements of {owner!r}",
                f"they must be elements of {expected!r}",
            )

    def _layout(self, node: Node) -> None:
        flat = node.sharding.flat
        if node.op_type == "LocalSlice":
            firsts = node.attributes.get("firsts", [0] * len(node.inputs))
            rows = zip(node.inputs, node.attributes["starts"], node.attributes["sizes"], firsts)
            self._keep(node.outputs, _in_order(node, self._named(rows)))
        elif node.op_type == "ShardSlice" and flat is not None and node.inputs[0] in self.contents:
            self._keep(node.outputs, _inside(self.contents[node.inputs[0]], flat[1]))
        elif transfers(node):
            for name, result in zip(node.inputs, node.outputs):
                self._same(name, result)
        elif node.op_type == "LocalConcat":
            parts = [self.contents[name] for name in node.inputs if name in self.contents]
            self._keep(node.outputs, self._merged(node, parts) if parts else self._joined(node.inputs))

    def _compute(self, node: Node, inputs: Sequence[str], outputs: Sequence[str], *, elementwise: bool) -> None:
        """Assign the results of an update or pass node to the one parameter it reads."""
        parts = [self.contents[name] for name in inputs if name in self.contents]
        if parts and elementwise:
            self._keep(outputs, self._merged(node, parts))
            return
        if parts:  # on the one member that has the tensor: whole again
            self._own(outputs, parts[0][0].tensor if len(parts) == len(parts[0]) == 1 else None)
            return
        owners = {self.owners[name] for name in inputs if name in self.owners}
        self._own(outputs, owners.pop() if len(owners) == 1 else None)

    # --- the tables -------------------------------------------------------------------------------------------------

    def _own(self, names: Iterable[str], owner: str | None = "") -> None:
        """Note the parameter of whole values, by default the expected parameter. Scalars get no parameter."""
        for name in names:
            parameter = self._expected.get(name) if owner == "" else owner
            if parameter is not None and self._several(name):
                self.owners[name] = parameter

    def _several(self, name: str) -> bool:
        """Return whether a value is known to have several elements."""
        types = self.program.graph.types
        return name in types and types[name].elements > 1

    def _keep(self, names: Iterable[str], contents: Contents) -> None:
        if contents:
            self.contents.update((name, contents) for name in names if name)

    def _same(self, old: str, new: str) -> None:
        """``new`` has the elements of ``old``."""
        if old in self.contents:
            self.contents[new] = self.contents[old]
        elif old in self.owners:
            self.owners[new] = self.owners[old]

    def _placed(self, slices: Sequence[BucketSlice]) -> Contents:
        """Return tensors of the source in a bucket as parameters."""
        owners = ((self._expected.get(piece.tensor), piece) for piece in slices)
        owned = [
            BucketSlice(of, piece.offset, piece.elements, piece.start)
            for of, piece in owners if of is not None and piece.elements
        ]  # fmt: skip
        return tuple(sorted(owned, key=_offset))

    def _named(self, rows: Iterable[tuple[str, int, int, int]]) -> Contents:
        """Return values, with offsets and sizes in a bucket and start elements, as parameters."""
        return tuple(
            BucketSlice(self.owners[name], offset, size, start)
            for name, offset, size, start in rows if size and name in self.owners
        )  # fmt: skip

    def _joined(self, names: Sequence[str]) -> Contents:
        """Return whole values in a row."""
        types = self.program.graph.types
        sizes = [types[name].elements for name in names]
        return self._named(zip(names, accumulate(sizes, initial=0), sizes, repeat(0)))

    def _merged(self, node: Node, parts: Sequence[Contents]) -> Contents:
        """Return the common content of the operands; raises InvariantError if they differ."""
        contents = parts[0]
        if all(part is contents or part == contents for part in parts):
            return contents
        return _in_order(node, {piece for part in parts for piece in part})


def _follows(node: Node) -> bool:
    """Return whether a node is of the update, or a pass made it."""
    return node.phase is Phase.UPDATE or node.added


def _in_order(node: Node, pieces: Collection[BucketSlice]) -> Contents:
    """Return the parameters read by a node, by offset; raises InvariantError for overlapping elements."""
    wrong = _conflict(pieces)
    if wrong is not None:
        raise InvariantError(f"{node.op_type} {node.label!r} reads {wrong[0]} beside {wrong[1]}")
    return tuple(sorted(pieces, key=_offset))


def _conflict(pieces: Iterable[BucketSlice]) -> tuple[str, str] | None:
    """Return two parameters at the same place of a bucket, in words, or None."""
    ordered = sorted(set(pieces), key=lambda piece: (piece.offset, piece.tensor))
    for one, following in pairwise(ordered):
        if one.offset + one.elements > following.offset:
            return _said(one), _said(following)
    return None


def _said(piece: BucketSlice) -> str:
    return f"elements {piece.offset} to {piece.offset + piece.elements} of a bucket as elements of {piece.tensor!r}"


def _inside(contents: Contents, part: FlatShard) -> Contents:
    """The parameters of a part of a bucket."""
    start = bisect_right(contents, part.start, key=_end)
    return contents[start : bisect_left(contents, part.stop, lo=start, key=_offset)]


def _offset(piece: BucketSlice) -> int:
    return piece.offset


def _end(piece: BucketSlice) -> int:
    return piece.offset + piece.elements
