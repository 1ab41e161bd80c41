"""Checks whose elements the messages of trainers have: each push the pieces of its keys' gradients, in order, and each
parameter the pieces its keys bring.

The plan has the pieces of each bucket. The contents of a message are followed through the trainers' graph, whatever the
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from gopt.artifact.server_entries import PullAt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.ir.node_kinds import record_of
from gopt.operators.kinds import SCALES, UNMOVED
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.plan import KeyBucket, ServerPlan
from gopt.spmd.program import SpmdProgram

Range: TypeAlias = tuple[str, int, int]
"""Some elements of a flattened tensor: its name, the first, and the one behind the last."""


def check_trainer_messages(program: SpmdProgram, plan: ServerPlan, options: SplitOptions) -> int:
    """Raise InvariantError for a message with other elements than its keys have; returns how many pieces were
    followed. Linear in the messages and in what stands between them and the gradients."""
    check = _MessageCheck(program, plan)
    for node in program.graph.nodes:
        if node.domain == COMM and node.op_type == "Push":
            check.push(node)
    states = {state.slices[0].tensor: state.output for state in program.states}
    for name in plan.owners:
        value = states.get(name, "") if options.pulls is PullAt.END else plan.read_name(name)
        if value in check.producers:
            check.parameter(name, value)
    return check.followed


class _MessageCheck:
    def __init__(self, program: SpmdProgram, plan: ServerPlan) -> None:
        self.graph, self.plan = program.graph, plan
        self.gradients = program.training.gradients
        self.producers: Mapping[str, Node] = program.graph.producers()
        self._ends = set(self.gradients.values())
        self._sums = {accumulator.input: accumulator.added for accumulator in program.accumulators}
        self._buckets = {bucket.number: bucket for bucket in plan.buckets}
        self._pieces = {
            bucket.number: [piece for unit in bucket.units for piece in unit.pieces] for bucket in plan.buckets
        }
        self.followed = 0

    def push(self, node: Node) -> None:
        """Compare the operands of a push with the gradients of the bucket; values beside them have no bucket."""
        bucket = self._buckets.get(node.attributes["bucket"])
        if bucket is None:
            return
        ranges, due = [self._range(name) for name in node.inputs[2:]], list(self._gradients(bucket))
        for real, wanted in zip(ranges, due, strict=True):
            if real != wanted:
                raise InvariantError(f"Push {node.label!r} has {_told(real)}", f"its key has {_told(wanted)}")
        self.followed += len(ranges)

    def parameter(self, name: str, value: str) -> None:
        """Compare a parameter's joined parts with its pieces."""
        pieces = [self._piece(*span) for span in self._joined(value)]
        due = [(piece.parameter, piece.start, piece.stop) for piece in self.plan.owners[name]]
        if pieces != due:
            real, wanted = (", ".join(map(_told, ranges)) for ranges in (pieces, due))
            raise InvariantError(f"trainers take {real} for {name!r}", f"its pieces are {wanted}")
        self.followed += len(pieces)

    # --- what the plan says -----------------------------------------------------------------------------------------

    def _gradients(self, bucket: KeyBucket) -> Iterator[Range]:
        for unit in bucket.units:
            if unit.split:
                yield from ((self.gradients[p.parameter], p.start, p.stop) for p in unit.pieces)
            else:
                yield from ((name, 0, self.graph.types[name].elements) for name in unit.gradients)

    def _piece(self, number: int, index: int) -> Range:
        """The piece of a parameter at a place of a bucket."""
        piece = self._pieces[number][index]
        return piece.parameter, piece.start, piece.stop

    # --- what the graph has -----------------------------------------------------------------------------------------

    def _range(self, name: str) -> Range:
        """The elements of a gradient in a value."""
        while name not in self._ends:
            node = self.producers.get(name)
            if node is None:
                if name not in self._sums:
                    raise InvariantError(f"a push has {name!r}, which is made of no gradient")
                node = self.producers[self._sums[name]]
                name = next(input_name for input_name in node.inputs if input_name != name)  # what a micro-step adds
            elif node.is_a("Slice"):
                base, start, _ = self._range(node.inputs[0])
                type = self.graph.types[node.inputs[0]]
                row = type.elements // max(type.dims[0], 1)
                start_row, last = (self._number(name) * row for name in node.inputs[1:3])
                return base, start + start_row, start + last
            elif node.is_in(UNMOVED | SCALES):
                name = node.inputs[0]
            elif record_of(node).elementwise and record_of(node).choosers:  # zeros where nothing is weighed
                name = node.inputs[2]
            else:
                raise InvariantError(f"a push has {name!r}, which {node.op_type} {node.label!r} makes")
        return name, 0, self.graph.types[name].elements

    def _joined(self, name: str) -> list[tuple[int, int]]:
        """Bucket and place of a parameter's joined parts."""
        node = self.producers.get(name)
        if node is not None and node.domain == COMM and node.op_type == "Pull":
            return [(node.attributes["bucket"], node.outputs.index(name))]
        if node is not None and record_of(node).joins:
            return [span for name in node.inputs for span in self._joined(name)]
        if node is not None and node.is_in(UNMOVED):
            return self._joined(node.inputs[0])
        raise InvariantError(f"{name!r} of a parameter is not pulled")

    def _number(self, name: str) -> int:
        """The only element of a constant."""
        value = self.producers[name].attributes["value_ints"]
        return int(value[0])


def _told(elements: Range) -> str:
    name, start, stop = elements
    return f"elements {start} to {stop} of {name!r}"
