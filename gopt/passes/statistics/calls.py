"""Calls for statistics that are no plain means: reduced values, and the same computation from them on every rank."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from gopt.analysis.statistic_points import StatisticPoint, StatisticReduction, path_nodes
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.constant_folding import Constants
from gopt.ir.graph import COMM, Node
from gopt.ir.graph_index import GraphIndex, ancestors, walk
from gopt.ir.node_kinds import random
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import scalar_of
from gopt.operators.kinds import SIZES
from gopt.passes.statistics.rows import RowCalls
from gopt.spmd.program import Accumulator, SpmdProgram


def readers_in_update(training: TrainingGraph) -> dict[str, list[Node]]:
    """Statistic whose old value is read in the update of other states -> the reading nodes."""
    names = {state.tensor for state in training.states if state.kind is StateKind.STATISTIC}
    nodes = training.graph.nodes if names else ()
    updating = [node for node in nodes if node.phase is Phase.UPDATE and not names.isdisjoint(node.reads)]
    if not updating:
        return {}
    results = [state.updated for state in training.states if state.tensor not in names]
    needed = ancestors(GraphIndex(training.graph), results)[0]
    result: dict[str, list[Node]] = {}
    for node in updating:
        for name in names.intersection(node.reads) if id(node) in needed else ():
            result.setdefault(name, []).append(node)
    return result


def refuse_apart(states: Iterable[State], read: Collection[str], rule: str) -> None:
    """Raise UnsupportedError where the update would read a value that differs between ranks."""
    name = next((state.tensor for state in states if state.tensor in read), None)
    if name is not None:
        raise UnsupportedError(
            f"the update of parameters reads the statistic {name!r}, which ranks hold apart with {rule}",
            f"combine it: --statistics {name}=mean, sum, max or min",
        )


class StatisticCalls:
    """Emits the calls of some statistics, each in every micro-step; readers in the step keep the rank's own values."""

    def __init__(
        self, program: SpmdProgram, group: str, rewriter: GraphRewriter, local: dict[str, str]
    ) -> None:  # fmt: skip
        """``local``: new value of a statistic -> the name of the rank's own value; ``group``: '' of one rank."""
        self.program, self.group, self.rewriter, self.local = program, group, rewriter, local
        self.graph = program.graph
        self.producers, self.users = self.graph.producers(), self.graph.users()
        self.nodes = list(self.graph.nodes)
        self.constants = Constants(self.graph, self.producers)
        self.reduced: dict[tuple[str, str], str] = {}
        """Value and reduction -> the reduced value."""
        self.calls = 0

    def emit(self, states: Sequence[State], readers: Mapping[str, Sequence[Node]]) -> None:
        """Emit the calls of statistics, and the nodes from the results to new values.

        ``readers``: statistic -> the nodes of the update that read the old value after micro-steps."""
        reductions = {s.tensor: self.program.reductions[s.tensor] for s in states}
        paths = {
            s.tensor: path_nodes(self.nodes, self.producers, list(map(self._own, reductions[s.tensor].cut)), s.updated)
            for s in states
        }
        for state in states:
            name, local = state.updated, f"gopt.statistics.of.{state.tensor}.local"
            self.rewriter.rename_output(self.producers[name], name, local)
            for reader in self.users.get(name, ()):
                self.rewriter.rewire(reader, name, local)
            self.producers[local], self.local[name] = self.producers[name], local
        for state in states:
            reduction = reductions[state.tensor]
            if reduction.rule == "gather":
                values = self._gathered(state, reduction, readers)
            else:
                values = {self._own(p.value): self._call(state, self._own(p.value), p.reduce) for p in reduction.points}
            reading = {node.first_output for node in readers.get(state.tensor, ())}
            self._emit(state, values, paths[state.tensor], reading)

    def _gathered(self, state: State, reduction: StatisticReduction, readers: Container[str]) -> dict[str, str]:
        """The replacements of a rank's own values: the rows of all ranks, or the queue with these rows."""
        if state.tensor in readers:
            raise UnsupportedError(
                f"the update of parameters reads the statistic {state.tensor!r}, into which each micro-step of "
                "--accumulate writes rows",
                "leave --accumulate out",
            )
        emitted = RowCalls(self.program, self.group, self.rewriter, state.tensor)
        rows = [self._rows(emitted, state, point) for point in reduction.points]
        if reduction.queue is not None:
            joined = emitted.queue(reduction.queue, rows, f"gopt.statistics.of.{state.tensor}")
            return {self._own(reduction.queue.value): joined}
        return {self._own(point.value): row for point, row in zip(reduction.points, rows)}

    def _rows(self, emitted: RowCalls, state: State, point: StatisticPoint) -> str:
        """The rows of all ranks; one call for all statistics of the same rows."""
        value, key = self._own(point.value), f"{point.reduce} along {point.axis}"
        if (value, key) not in self.reduced:
            name = f"gopt.statistics.reduced{len(self.reduced)}"
            if point.ring is not None:
                emitted.places(value, name, point.axis, point.ring)
            else:
                self.calls += 1
                emitted.rows(value, name, point.axis, self._producer(state, value, "rows"))
            self.reduced[value, key] = name
        return self.reduced[value, key]

    def _own(self, name: str) -> str:
        return self.local.get(name, name)

    def _emit(self, state: State, values: dict[str, str], path: list[Node], readers: Collection[str]) -> None:
        name, type = state.updated, self.graph.types[state.updated]
        prefix = f"gopt.statistics.of.{state.tensor}"
        moved = self._moved(state, prefix, readers) if readers else state.tensor
        new = self._repeated(state, values | {state.tensor: moved}, path, prefix)
        if not readers:
            self.rewriter.add("Identity", [new], {name: type})
            return
        term, sum_, out = f"{prefix}.term", f"{prefix}.sum", f"{prefix}.zero"
        self.rewriter.add("Sub", [new, moved], {term: type})
        self.rewriter.add("Add", [sum_, term], {f"{prefix}.next": type})
        self.rewriter.zeros(sum_, out, f"{prefix}.shape")
        self.rewriter.add("Add", [state.tensor, sum_], {name: type})
        self.program.accumulators.append(Accumulator(sum_, out, f"{prefix}.next", type, reduced=True))

    def _call(self, state: State, value: str, reduce: str) -> str:
        """The reduced value; one call for all statistics with the same reduction.

        A fixed size of a batch is the same on every rank: the sum is known without a call."""
        if not self.group:
            return value
        reduced = self.reduced.get((value, reduce))
        if reduced is not None:
            return reduced
        if self.constants.value(value) is not None or self._is_size(value):
            return self.reduced.setdefault((value, reduce), self._times_ranks(value))
        producer = self._producer(state, value, reduce)
        reduced = f"gopt.statistics.reduced{len(self.reduced)}"
        self.calls += 1
        self.rewriter.add(
            "AllReduce", [value], {reduced: self.graph.types[value]}, domain=COMM,
            attributes={"group": self.group, "reduce": reduce}, after=producer,
        )  # fmt: skip
        self.reduced[value, reduce] = reduced
        return reduced

    def _is_size(self, value: str) -> bool:
        """Return whether a value is made of fixed shapes and constants alone."""

        def following(name: str) -> Sequence[str]:
            node = self.producers.get(name)
            return () if node is None or node.is_in(SIZES) else node.reads

        for name in walk([value], following):
            node = self.producers.get(name)
            if node is None and (name in self.graph.inputs or name not in self.graph.initializers):
                return False
            if node is None:
                continue
            if node.is_in(SIZES):
                if not self.graph.types[node.inputs[0]].static:
                    return False  # each rank's batch has a size of its own
                continue
            if node.captures or random(node):
                return False
        return True

    def _producer(self, state: State, value: str, what: str) -> Node | None:
        """The node behind a value; None for an input."""
        producer = self.producers.get(value)
        if producer is None and value not in self.graph.inputs:
            raise UnsupportedError(
                f"statistic {state.tensor!r} follows {value!r}, which this mesh splits: its {what} over ranks is not "
                "supported",
                "leave out the axes that split the computation",
            )
        return producer

    def _times_ranks(self, value: str) -> str:
        type, many = self.graph.types[value], f"gopt.statistics.ranks{len(self.reduced)}"
        product = f"gopt.statistics.reduced{len(self.reduced)}"
        self.rewriter.constant(many, scalar_of(self.program.mesh.size(self.group), type.dtype))
        self.rewriter.add("Mul", [value, many], {product: type})
        return product

    def _repeated(self, state: State, values: dict[str, str], path: list[Node], prefix: str) -> str:
        """Write the nodes between reduced values and the new value once more; returns the result.

        Nodes without other readers are left unread: prune removes them."""
        renamed = dict(values)
        for position, node in enumerate(path):
            if not renamed.keys().isdisjoint(node.captures):
                raise UnsupportedError(
                    f"statistic {state.tensor!r}: the body of {node.op_type} {node.label!r} reads a value that ranks "
                    "reduce",
                    f"combine the new values themselves: --statistics {state.tensor}=mean",
                )
            outputs = {name: f"{prefix}.{position}.{at}" for at, name in enumerate(node.outputs) if name}
            types = {new: self.graph.types[old] for old, new in outputs.items()}
            copy = self.rewriter.repeat(node, [renamed.get(name, name) for name in node.inputs], types, node.sharding)
            copy.origin = None
            renamed |= outputs
        return renamed[self._own(state.updated)]

    def _moved(self, state: State, prefix: str, readers: Collection[str]) -> str:
        """The old value plus the movement in earlier micro-steps; read by all but the update."""
        type, moved = self.graph.types[state.tensor], f"{prefix}.moved"
        self.graph.types[f"{prefix}.sum"] = type
        self.rewriter.add("Add", [state.tensor, f"{prefix}.sum"], {moved: type})
        for reader in self.users.get(state.tensor, ()):
            if reader.first_output not in readers:
                self.rewriter.rewire(reader, state.tensor, moved)
        return moved
