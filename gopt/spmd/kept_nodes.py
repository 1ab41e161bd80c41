"""Checks that passes keep what forward and backward compute, and the calls along axes splitting the computation.

Placements along an axis splitting the computation are checked where the step is split (``gopt.tensor_parallel.check``),
in logical types; behind it, rules see values of a rank. Whatever later passes keep of the split step stays right.
Passes may replace gradients, states, and casts of both. All other operands of the step's nodes must stay the same
values, made by the same nodes or by a call packing the node.
"""

from __future__ import annotations

from functools import cached_property

from gopt.analysis.isomorphism import signature
from gopt.analysis.synchronised_values import as_read
from gopt.analysis.training import Phase, StateKind
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.ir.graph_index import copy_chain
from gopt.ir.node_kinds import record_of
from gopt.operators.kinds import CASTS, MAY_DRAW, MOVES, SIZES
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers

PACKED = ("AllReduce", "Reduce", "Broadcast")
"""Calls of any number of tensors, which keep each of them apart."""


def check_kept_nodes(program: SpmdProgram) -> None:
    """Raise InvariantError for the first node changing what the step computes."""
    checker = _KeptNodes(program)
    for node in program.graph.nodes:
        checker.check_phase(node)
        if node.source is not None:
            checker.check_node(node, node.source)
        else:
            checker.check_added(node)


class _KeptNodes:
    """A sweep over a program. ``renamed``: a value a pass renamed or averaged -> its name in the step."""

    def __init__(self, program: SpmdProgram) -> None:
        training, synchronised = program.training, program.synchronised
        self._program = program
        self.renamed: dict[str, str] = {}
        self._graph, self._types, self._split = training.graph, training.graph.types, frozenset(program.split)
        self._step: dict[str, Node] = {}
        """The producers of the step, once they are asked for: most programs read nothing else for an inner value."""
        self._points = frozenset(as_read(training.graph, synchronised.points))
        self._corrected = frozenset((constant.output, constant.constant) for constant in synchronised.corrected)
        self._replaced = {state.tensor for state in training.states} | set(training.gradients.values())
        self._replaced.update(training.gradients)  # trainers pull parameters, and have none as a state
        """Values for which nodes may read others: passes reduce, gather or cast them."""
        self._carried = program.loop_carried
        self._statistics = {state.updated for state in training.states if state.kind is StateKind.STATISTIC}
        self._news = {state.updated for state in training.states}
        self._ran: set[int] = set()
        """Ids of the nodes of the step that ran up to here."""
        self._updated: set[str] = set()
        """Values that the update made up to here."""
        self._makers: dict[str, Node] = {}
        """A value of the step that a node of a pass makes now -> the node that made it."""
        self._calls: dict[str, Node] = {}
        """A result of a call of the step -> the call."""
        self._senders: dict[str, Node] = {}
        """An operand of a call of the step -> the call."""
        added = {name for node in program.graph.nodes if node.source is None for name in node.outputs}
        for node in training.graph.nodes:
            if node.is_in(CASTS) and node.inputs[0] in self._replaced:
                self._replaced.update(node.outputs)
            if node.domain == COMM:
                self._calls.update(dict.fromkeys(node.outputs, node))
                self._senders.update(dict.fromkeys(node.inputs, node))
            if not added.isdisjoint(node.outputs):
                self._makers.update((name, node) for name in node.outputs if name in added)

    def check_phase(self, node: Node) -> None:
        """Check that forward and backward read nothing the update makes, such as the mean of a gradient."""
        if node.phase is Phase.UPDATE:
            self._updated.update(node.outputs)
        elif node.phase is not None and not self._updated.isdisjoint(node.reads):
            name = next(name for name in node.reads if name in self._updated)
            raise InvariantError(
                f"{node.op_type} {node.label!r} of the {node.phase.value} reads {name!r} of the update"
            )

    def check_node(self, node: Node, source: Node) -> None:
        """Check operator, attributes and operands of a node of the step."""
        if id(source) in self._ran:
            self._check_again(node, source)
        self._ran.add(id(source))
        same = node.encoded is source.encoded and node.encoded is not None
        equal = same or (node.encoded is None and node.attributes == source.attributes)
        alike = len(node.inputs) == len(source.inputs) and len(node.outputs) == len(source.outputs)
        if not equal or not alike or node.op_type != source.op_type or node.domain != source.domain:
            raise InvariantError(f"{node.op_type} {node.label!r} is not the {source.op_type} of the step any more")
        if node.inputs != source.inputs:
            for old, new in zip(source.inputs, node.inputs):
                self._check_read(node, old, new)
        if node.outputs != source.outputs:
            self.renamed.update((new, old) for old, new in zip(source.outputs, node.outputs) if new != old)

    def _check_again(self, node: Node, source: Node) -> None:
        """Check a second copy of a node of the step: a view, or a node of the forward that computes the same again."""
        updated = next((name for name in source.outputs if name in self._news), "")
        again = source.phase is Phase.FORWARD or source.is_in(MOVES)
        why = {
            f"it is of the {source.phase and source.phase.value}": not again,
            "it draws other numbers": source.op_type in MAY_DRAW,
            "it would be called twice": source.domain == COMM,
            f"it makes {updated!r}, the new value of a state": bool(updated),
        }
        if any(why.values()):
            raise InvariantError(
                f"{node.op_type} {node.label!r} runs {source.label!r} of the step a second time",
                next(text for text, holds in why.items() if holds),
            )

    def _check_read(self, node: Node, old: str, new: str) -> None:
        corrected = any((name, old) in self._corrected for name in node.outputs)
        if not (self._is(new, old) or self._replaces(new, old) or corrected):
            raise InvariantError(
                f"{node.op_type} {node.label!r} reads {new!r} for {old!r}, which no pass may replace",
                "passes replace gradients, states and their casts, and what the update makes",
            )

    def _replaces(self, new: str, old: str) -> bool:
        """Return whether a node may read one value for another: a replacement made by a pass, the operand of an
        Identity for the result, or the result of an equal call, such as a gather for the backward."""
        if old in self._replaced:
            return new not in self._types or new in self._replaced
        if not self._step:
            self._step = self._graph.producers()
        if new not in self._types:
            maker = self._step.get(old)
            return maker is not None and maker.phase is Phase.UPDATE and maker.domain != COMM
        earlier, later = self._calls.get(old), self._calls.get(new)
        if earlier is not None and later is not None and earlier.outputs.index(old) == later.outputs.index(new):
            return signature(earlier) == signature(later) and earlier.inputs == later.inputs
        return new in copy_chain(self._step, old)[1:]

    def check_added(self, node: Node) -> None:
        """Check a node of a pass: the results for nodes of the step, and the receivers."""
        if node.domain == COMM:
            self._check_call(node)
        copies = transfers(node) or node.is_a("Identity")
        if copies:
            self.renamed |= {new: self.renamed.get(old, old) for old, new in zip(node.inputs, node.outputs)}
        for name in node.outputs:
            maker = self._makers.get(name)
            if maker is None or not self._keeps(maker):
                continue
            if node.domain == COMM and maker.domain == COMM:
                self._check_packed(node, name, maker)
            elif name in self._statistics and maker.domain != COMM:
                continue  # reduced over ranks, or made of what is: verify compares it
            elif maker.domain == COMM and not maker.added and maker.op_type not in PACKED:
                continue  # the source's own, which gathers or scatters in a bucket: slices of the bucket make it
            elif not (copies and self._is_again(node.inputs[node.outputs.index(name)], name)):
                raise InvariantError(
                    f"{node.op_type} {node.label!r} makes {name!r}",
                    f"in the step {maker.op_type} {maker.label!r} makes it",
                )

    def _keeps(self, maker: Node) -> bool:
        """Return whether passes must keep a node of the step: all nodes but the update's; calls of the update
        are kept, too, and casts and shapes of gathered values."""
        gathered = maker.is_in(CASTS | SIZES) and maker.inputs[0] in self._replaced
        return maker.domain == COMM or not (gathered or maker.phase is Phase.UPDATE)

    def _is(self, name: str, value: str) -> bool:
        """Return whether a name stands for a value of the step."""
        return name == value or self.renamed.get(name) == value

    def _is_again(self, name: str, value: str) -> bool:
        """Return whether a name stands for a value of the step, or for the same value computed from reduced values."""
        return self.renamed.get(name) == value or (value in self._statistics and self._repeated.get(name) == value)

    @cached_property
    def _repeated(self) -> dict[str, str]:
        """Return value made by a pass -> the same value of the step, computed from reduced values.

        The new value of a statistic is made of reduced parts in the same way as of a rank's own parts."""
        repeats = {(signature(node), *node.inputs): node for node in self._graph.nodes}
        sums = {accumulator.input for accumulator in self._program.accumulators}
        renamed: dict[str, str] = {}
        for node in self._program.graph.nodes:
            if node.source is not None:
                renamed.update((new, old) for old, new in zip(node.source.outputs, node.outputs) if new != old)
                continue
            read = [renamed.get(name, name) for name in node.inputs]
            if node.domain == COMM and not _axes(node) & self._split:
                renamed.update((new, old) for old, new in zip(read, node.outputs) if old not in self._replaced)
            elif record_of(node).adds and node.inputs[-1] in sums:  # the old value, moved by earlier micro-steps
                renamed[node.outputs[0]] = read[0]
            elif (signature(node), *read) in repeats:
                renamed.update(zip(node.outputs, repeats[signature(node), *read].outputs))
        return renamed

    # --- calls ----------------------------------------------------------------------------------------------------

    def _check_call(self, node: Node) -> None:
        """Check an added call: along an axis splitting the computation, only values sent by calls of the step may be
        sent. Reduced parts of a synchronised value or of a statistic stand for the value."""
        for old, new in zip(node.inputs, node.outputs):
            if (name := self.renamed.get(old)) in self._points or name in self._statistics:
                self.renamed[new] = self.renamed[old]
            sender = self._senders.get(old) if node.op_type in PACKED and new not in self._makers else None
            if sender is not None and _axes(sender) == _axes(node) and _kind(sender) == _kind(node):
                self.renamed.setdefault(new, sender.outputs[sender.inputs.index(old)])  # sent on to all stages
        split = _axes(node) & self._split if self._split and "group" in node.attributes else frozenset()
        for name in node.inputs if split and self._makers.keys().isdisjoint(node.outputs) else ():
            sender = self._senders.get(name) or self._senders.get(self._repeated.get(name, ""))
            if sender is None or _axes(sender) & self._split != split:
                raise InvariantError(
                    f"{node.op_type} {node.label!r} sends {name!r} along {'+'.join(sorted(split))}",
                    "no call of the step does: a reduction of gradients is over ranks that see different data",
                )

    def _check_packed(self, node: Node, name: str, maker: Node) -> None:
        """Check a result of a packed call: the sent value and the ranks must be the same as in the step's call."""
        if not maker.added and (maker.op_type != node.op_type or maker.op_type not in PACKED):
            return  # the source's own, such as a Reduce and a Broadcast that are one AllReduce
        read, sent = node.inputs[node.outputs.index(name)], maker.inputs[maker.outputs.index(name)]
        if name in self._statistics and self.renamed.get(self._carried.get(read, read)) == name:
            return  # the mean over ranks, or one rank's, of what the step's call makes
        group, above = _axes(maker), self._calls.get(sent)
        while not self._is(read, sent) and above is not None and _is_sum(above) and _is_sum(maker):
            sent = above.inputs[above.outputs.index(sent)]  # a sum over one axis and then over another: one over both
            group, above = group | _axes(above), self._calls.get(sent)
        if not self._is(read, sent) or group != _axes(node) or _kind(maker) != _kind(node):
            raise InvariantError(
                f"{node.op_type} {node.label!r} makes {name!r} of {read!r} over {node.attributes['group']}",
                f"the step makes it of {sent!r} by {maker.op_type} over {maker.attributes['group']}",
            )


def _axes(call: Node) -> frozenset[str]:
    return frozenset(str(call.attributes.get("group", "")).split("+"))


def _kind(call: Node) -> tuple[object, ...]:
    """Return the properties, besides groups, in which calls must agree to be packed."""
    if call.op_type not in PACKED:
        return call.op_type, call.attributes
    return call.op_type, call.attributes.get("reduce", "sum"), call.attributes.get("root")


def _is_sum(call: Node) -> bool:
    """Return whether a call is a sum gopt inserted: two sums may become a sum over the axes of both."""
    return call.added and _kind(call)[:2] == ("AllReduce", "sum")
