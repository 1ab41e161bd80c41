"""A sweep over the graphs of all ranks, side by side, from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gopt.collectives.call import Type
from gopt.collectives.node import call_signature
from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.operators.kinds import CASTS
from gopt.records.mesh import Mesh
from gopt.verification.proof.calls import Members
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.expressions import elements
from gopt.verification.proof.operators import NodeReader

_NARROW = frozenset({"int8", "uint8", "int16", "uint16", "bool"})


class UnpairedCall(Exception):
    """A call without all members of the group: the rank, the node, the actual and the expected call."""

    def __init__(self, rank: int, node: Node, actual: str, expected: str) -> None:
        super().__init__(rank, node.label, actual, expected)
        self.rank, self.node, self.actual, self.expected = rank, node.label, actual, expected


def unsized(node: Node) -> UnsupportedError:
    """The refusal of a call or a message with an operand of unknown type or size."""
    return UnsupportedError(
        f"{node.op_type} {node.label!r}: the type or the size of an operand is unknown",
        "fix open dimensions of the inputs, and give values their types (onnx.shape_inference)",
    )


Values = dict[str, int]
"""Name of a value -> the number of its expression."""


@dataclass(slots=True)
class RankSweep:
    """A graph of a rank and the expressions so far; ``at``: the next node."""

    rank: int
    graph: Graph
    reader: NodeReader
    values: Values
    at: int = 0
    memo: dict[tuple[bytes, tuple[int, ...]], list[int]] = field(default_factory=dict)
    """Shared by all ranks: a node of a file and its operands -> its results."""

    def to_call(self) -> Node | None:
        """Read nodes up to the next call; return the call, or None at the end of the graph."""
        nodes = self.graph.nodes
        while self.at < len(nodes):
            if nodes[self.at].domain == COMM:
                return nodes[self.at]
            self._read(nodes[self.at])
            self.at += 1
        return None

    def operands(self, node: Node, names: Iterable[str]) -> tuple[int, ...]:
        """The expressions of values that a node reads. Raises UnpairedCall for a value that nothing makes."""
        values = self.values
        try:
            return tuple([values[name] for name in names])
        except KeyError as lacking:
            raise UnpairedCall(
                self.rank, node, f"reads {lacking}, which it does not have", "a value of its own"
            ) from None

    def _read(self, node: Node) -> None:
        values = self.values
        operands = self.operands(node, node.reads)
        key = (node.encoded, operands) if node.encoded is not None and node.op_type not in CASTS else None
        results = self.memo.get(key) if key is not None else None
        if results is None:
            absent: list[int | None] = [values[name] if name else None for name in node.inputs]
            try:
                results = self.reader.results(node, [*absent, *(values[name] for name in node.captures)])
                self._check_shapes(node, results)
            except (ValueError, TypeError, IndexError) as error:
                raise InputError(
                    f"rank {self.rank}: {node.op_type} {node.label!r} does not fit its operands: {error}",
                    "gopt inspect FILE --text shows the graph",
                ) from None
            if key is not None:
                self.memo[key] = results
        values.update(zip(node.outputs, results))

    def _check_shapes(self, node: Node, results: Sequence[int]) -> None:
        """Raise ValueError for a result of another shape than the file or the inference of types says."""
        for name, number in zip(node.outputs, results):
            type, shape = self.graph.types.get(name), self.reader.expressions.shape(number)
            if type is not None and type.static and elements(shape) is not None and shape != type.shape:
                raise ValueError(f"{name!r} is of shape {list(type.dims)}, not {list(shape or ())}")


class Sweep:
    """The graphs of a phase of all ranks of a mesh; ``first``: the number of the mesh's first rank."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, mesh: Mesh, reader: Callable[[Graph], NodeReader],
        first: int = 0,
    ) -> None:  # fmt: skip
        self.expressions, self.constants, self.mesh, self.reader = expressions, constants, mesh, reader
        self.first, self.sweeps = first, list[RankSweep]()
        self._places = {first + rank: mesh.coordinates(rank) for rank in range(mesh.ranks)}
        self._memo: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}

    def run(self, graphs: Sequence[Graph], inputs: Sequence[Values]) -> list[Values]:
        """The expressions of all values of all ranks; ``inputs``: expressions of the inputs of each rank. Raises
        UnpairedCall."""
        self.sweeps = sweeps = [
            RankSweep(rank, graph, self.reader(graph), self.start(graph, values), memo=self._memo)
            for rank, (graph, values) in enumerate(zip(graphs, inputs))
        ]
        waiting = {sweep.rank: node for sweep in sweeps if (node := sweep.to_call()) is not None}
        while waiting:
            for members in self._ready(waiting):
                self._call([sweeps[rank] for rank in members], [waiting.pop(rank) for rank in members])
                for rank in members:
                    sweeps[rank].at += 1
                    node = sweeps[rank].to_call()
                    if node is not None:
                        waiting[rank] = node
        return [sweep.values for sweep in sweeps]

    def start(self, graph: Graph, inputs: Values) -> Values:
        """The inputs and the constants of a graph."""
        stored = {
            name: self.constants.stored(tensor) for name, tensor in graph.initializers.items() if name not in inputs
        }
        return stored | inputs

    def _members(self, node: Node, rank: int) -> tuple[int, ...]:
        group = str(node.attributes["group"])
        return tuple(self.first + member for member in self.mesh.members(group, rank - self.first))

    def _ready(self, waiting: Mapping[int, Node]) -> list[tuple[int, ...]]:
        """The groups with all members in a call. Raises UnpairedCall if no group is ready."""
        groups: dict[tuple[int, ...], int] = {}
        for rank, node in waiting.items():
            members = self._members(node, rank)
            groups[members] = groups.get(members, 0) + 1
        ready = [members for members, count in groups.items() if count == len(members)]
        if not ready:
            rank, node = min(waiting.items())
            members = self._members(node, rank)
            missing = [str(member) for member in members if member not in waiting]
            late = f"ranks {', '.join(missing)} never come to it" if missing else "others of its group wait elsewhere"
            raise UnpairedCall(
                rank, node, f"{node.op_type} over {node.attributes['group']}, where {late}", "all members in one call"
            )
        return ready

    def _call(self, members: Sequence[RankSweep], nodes: Sequence[Node]) -> None:
        group = str(nodes[0].attributes["group"])
        axes = self.mesh.split(group)
        signatures = []
        for sweep, node in zip(members, nodes):
            try:
                signatures.append(call_signature(node.op_type, node.attributes, self._types(sweep, node)))
            except InputError as error:
                raise UnpairedCall(sweep.rank, node, error.message, "a call that its operands allow") from None
        for sweep, node, signature in zip(members, nodes, signatures):
            if signature != signatures[0]:
                raise UnpairedCall(sweep.rank, node, str(signature), f"{signatures[0]}, as rank {members[0].rank} has")
        if signatures[0].reduce in ("sum", "mean") and signatures[0].dtype in _NARROW:
            raise UnsupportedError(
                f"{nodes[0].op_type} {nodes[0].label!r} sums {signatures[0].dtype}, which may overflow",
                "cast the operand to int32 before the call",
            )
        all_coordinates = [{axis: self._places[sweep.rank][axis] for axis in axes} for sweep in members]
        operands = [sweep.operands(node, node.inputs) for sweep, node in zip(members, nodes)]
        results = Members(self.expressions, axes, all_coordinates).call(nodes[0], operands)
        for sweep, node, numbers in zip(members, nodes, results):
            sweep.values.update(zip(node.outputs, numbers or ()))

    def _types(self, sweep: RankSweep, node: Node) -> list[Type]:
        """The types of a call's operands; an open shape is taken from the expression."""
        dtypes = (sweep.graph.types[name].dtype for name in (*node.inputs, *node.outputs) if name in sweep.graph.types)
        dtype = next(dtypes, str(node.attributes.get("dtype", "")))
        shapes = [self.expressions.shape(sweep.values[name]) for name in node.inputs]
        if dtype in ("", "undefined") or any(elements(shape) is None for shape in shapes):
            raise unsized(node)
        return [(dtype, tuple(map(int, shape or ()))) for shape in shapes]  # type: ignore[arg-type]
