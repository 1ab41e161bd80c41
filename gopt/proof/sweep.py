"""One sweep over the graphs of all ranks, side by side, from call to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gopt.collectives.call import Type
from gopt.collectives.node import call_signature
from gopt.errors import GoptError, InvariantError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.proof.calls import Members
from gopt.proof.expressions import Expressions, elements
from gopt.proof.operators import Constants, Reader
from gopt.records.mesh import Mesh

Values = dict[str, int]
"""Name of a value -> the number of its expression."""


@dataclass(slots=True)
class RankSweep:
    """A graph of one rank and the expressions of its values so far; ``at``: the node that comes next."""

    rank: int
    graph: Graph
    reader: Reader
    values: Values
    at: int = 0
    memo: dict[tuple[bytes, tuple[int, ...]], list[int]] = field(default_factory=dict)
    """Shared by all ranks: a node of a file and its operands -> its results."""

    def to_call(self) -> Node | None:
        """Read nodes up to the next call; None at the end of the graph."""
        values, memo, nodes = self.values, self.memo, self.graph.nodes
        for self.at in range(self.at, len(nodes)):
            node = nodes[self.at]
            if node.domain == COMM:
                return node
            operands = [values.get(name) if name else None for name in node.reads if name]
            if None in operands:
                raise InvariantError(f"{node.op_type} {node.label!r} reads a value that rank {self.rank} does not have")
            key = (node.encoded, tuple(operands)) if node.encoded is not None and node.op_type != "Cast" else None
            results = memo.get(key) if key is not None else None
            if results is None:
                full = [values[name] if name else None for name in node.inputs]
                captured = [values[name] for name in node.captures]
                results = self.reader.results(node, [*full, *captured])
                if key is not None:
                    memo[key] = results
            for name, number in zip(node.outputs, results):
                if name:
                    values[name] = number
        self.at = len(nodes)
        return None


class Sweep:
    """The graphs of one phase of all ranks; ``extents``-axes of ``expressions`` are those of ``mesh``."""

    def __init__(self, expressions: Expressions, constants: Constants, mesh: Mesh, own: frozenset[str]) -> None:
        self.expressions, self.constants, self.mesh, self.own = expressions, constants, mesh, own
        self._places = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
        self._memo: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}

    def run(self, graphs: Sequence[Graph], given: Sequence[Values]) -> list[Values]:
        """The expressions of all values of all ranks; ``given``: of the inputs of each. Raises InvariantError for
        calls that do not meet."""
        sweeps = [
            RankSweep(rank, graph, self.reader(graph), self.start(graph, values), memo=self._memo)
            for rank, (graph, values) in enumerate(zip(graphs, given))
        ]
        waiting = {sweep.rank: node for sweep in sweeps if (node := sweep.to_call()) is not None}
        while waiting:
            ready = self._ready(waiting)
            for members in ready:
                self._call([sweeps[rank] for rank in members], [waiting.pop(rank) for rank in members])
                for rank in members:
                    sweeps[rank].at += 1
                    node = sweeps[rank].to_call()
                    if node is not None:
                        waiting[rank] = node
        return [sweep.values for sweep in sweeps]

    def reader(self, graph: Graph) -> Reader:
        return Reader(self.expressions, graph, self.own, self.constants)

    def start(self, graph: Graph, given: Values) -> Values:
        """The inputs and the constants of a graph."""
        stored = {
            name: self.constants.stored(tensor) for name, tensor in graph.initializers.items() if name not in given
        }
        return stored | given

    def _ready(self, waiting: Mapping[int, Node]) -> list[tuple[int, ...]]:
        """The groups whose members all wait in one call. Raises InvariantError where there is none."""
        groups: dict[tuple[int, ...], int] = {}
        for rank, node in waiting.items():
            members = self.mesh.members(str(node.attributes["group"]), rank)
            groups[members] = groups.get(members, 0) + 1
        ready = [members for members, count in groups.items() if count == len(members)]
        if not ready:
            rank, node = min(waiting.items())
            raise InvariantError(
                f"rank {rank} waits in {node.op_type} {node.label!r} over {node.attributes['group']} for ranks that "
                "never come to it"
            )
        return ready

    def _call(self, members: Sequence[RankSweep], nodes: Sequence[Node]) -> None:
        group = str(nodes[0].attributes["group"])
        axes = self.mesh.split(group)
        signatures = []
        for sweep, node in zip(members, nodes):
            try:
                signatures.append(call_signature(node.op_type, node.attributes, self._types(sweep, node)))
            except GoptError as error:
                raise InvariantError(f"rank {sweep.rank}: {node.op_type} {node.label!r}: {error.message}") from None
        for sweep, node, signature in zip(members, nodes, signatures):
            if signature != signatures[0]:
                raise InvariantError(
                    f"ranks {members[0].rank} and {sweep.rank} meet in different calls: {signatures[0]}, and {signature}"
                )
        places = [{axis: self._places[sweep.rank][axis] for axis in axes} for sweep in members]
        operands = [[sweep.values[name] for name in node.inputs] for sweep, node in zip(members, nodes)]
        results = Members(self.expressions, axes, places).call(nodes[0], operands)
        for sweep, node, numbers in zip(members, nodes, results):
            sweep.values.update(zip(node.outputs, numbers or ()))

    def _types(self, sweep: RankSweep, node: Node) -> list[Type]:
        """The types of a call's operands; a shape that the file leaves open is that of the expression."""
        known = (sweep.graph.types[name].dtype for name in (*node.inputs, *node.outputs) if name in sweep.graph.types)
        dtype = next(known, str(node.attributes.get("dtype", "")))
        shapes = [self.expressions.shape(sweep.values[name]) for name in node.inputs]
        if any(elements(shape) is None for shape in shapes):
            raise UnsupportedError(f"{node.op_type} {node.label!r}: the size of what it sends is open")
        return [(dtype, tuple(map(int, shape or ()))) for shape in shapes]  # type: ignore[arg-type]
