"""A sweep over the graphs of all ranks, side by side, from call to call."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from gopt.collectives.call import Type
from gopt.collectives.node import CallSignature, call_signature
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError, UnsupportedError
from gopt.ir.alike_files import shared_parts
from gopt.ir.graph import Graph, Node
from gopt.records.mesh import Mesh
from gopt.verification.proof.calls import Members, Results
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import UnknownSize, elements
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.rank_sweep import NodeOrder, RankSweep, SweptValues, UnpairedCall, Values
from gopt.verification.proof.repeats import WholesOfRanges

_FIRSTS = 16
"""Ranks with the same nodes; other ranks follow the nearest."""
_FEW_ALIKE = 4
"""Inputs of a rank for each that another rank has alike, from where on the rank is one of the first."""
PAIRWISE = frozenset(name for name, record in COLLECTIVES.items() if record.pairwise)
_NARROW = frozenset({"int8", "uint8", "int16", "uint16", "bool"})


def unsized(node: Node) -> UnsupportedError:
    """The refusal of a call or a message with an operand of unknown type or size."""
    return UnsupportedError(
        f"{node.op_type} {node.label!r}: the type or the size of an operand is unknown",
        "fix open dimensions of the inputs, and give values their types (onnx.shape_inference)",
    )


class _Alike:
    """The sweeps over a list of nodes; ``firsts``: some sweeps to follow, with the inputs."""

    def __init__(self, order: NodeOrder) -> None:
        self.order, self.firsts = order, list[tuple[RankSweep, Values]]()
        self.sweeps: list[RankSweep] = []
        self._holders: dict[str, tuple[int, dict[int | None, RankSweep]]] = {}

    def with_input(self, name: str, number: int | None) -> RankSweep | None:
        """The first of the sweeps with an input."""
        count, holders = self._holders.get(name, (0, {}))
        for sweep in self.sweeps[count:]:
            holders.setdefault(sweep.values.get(name), sweep)
        self._holders[name] = len(self.sweeps), holders
        return holders.get(number)


class Sweep:
    """The graphs of a phase of all ranks of a mesh; ``first``: the number of the mesh's first rank."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, mesh: Mesh, reader: Callable[[Graph], NodeReader],
        first: int = 0,
    ) -> None:  # fmt: skip
        self.expressions, self.constants, self.mesh, self.reader = expressions, constants, mesh, reader
        self.first, self.sweeps = first, list[RankSweep]()
        self._places = {first + rank: mesh.coordinates(rank) for rank in range(mesh.ranks)}
        self._calls: dict[tuple[bytes | int, tuple[tuple[int, ...], ...]], Results] = {}
        """A call and the operands of each member -> the results of each: other groups make the call again."""
        self._wholes: WholesOfRanges = {}
        self._groups: dict[str, dict[int, tuple[int, ...]]] = {}
        """Axes -> the members in a rank's group, by rank."""
        self._mail: defaultdict[tuple[int, int, str, int], deque[tuple[CallSignature, Node, list[int]]]]
        self._mail = defaultdict(deque)
        """(sender, receiver, group, tag) -> what was sent and not yet received: the call, the node and the values."""
        self._distances: Sequence[int] = ()
        self._come: dict[int, None] = {}
        """Ranks that have come to a call since values were last moved."""
        self._signatures: dict[tuple[bytes, tuple[Type, ...]], CallSignature] = {}

    def run(
        self, graphs: Sequence[Graph], inputs: Sequence[Values], distances: Sequence[int] = ()
    ) -> list[SweptValues]:
        """The expressions of all values of all ranks, in a common mapping where ranks have the same; ``inputs``:
        expressions of the inputs of each rank, in common mappings too; ``distances``: what is added to the number of a
        peer in a rank's graph. Raises UnpairedCall."""
        alike: dict[tuple[int, ...], RankSweep] = {}
        self.sweeps, self._distances = [], distances or [0] * len(graphs)
        for rank, (graph, values) in enumerate(zip(graphs, inputs)):
            key = *shared_parts(graph), id(values)
            if key not in alike:
                alike[key] = RankSweep(rank, graph, self.reader(graph), self.start(graph, values))
            alike[key].ranks.append(rank)
            self.sweeps.append(alike[key])
        self._follow(list(alike.values()))
        waiting: dict[int, Node] = {}
        for sweep in alike.values():
            self._go_on(sweep, waiting)
        while waiting:
            results = self._moved(waiting)
            calls: dict[tuple[int, ...], Results] = {}
            for members in self._ready(waiting) if not results else ():
                group = tuple([id(self.sweeps[rank]) for rank in members])
                if group not in calls:
                    try:
                        calls[group] = self._call(members, [waiting[rank] for rank in members])
                    except UnknownSize:
                        raise unsized(waiting[members[0]]) from None
                results.update(zip(members, calls[group]))
            for sweep in dict.fromkeys(self.sweeps[rank] for rank in sorted(results)):  # leaders are ahead
                for part in self._parted(sweep, results):
                    part.end_call(results[part.rank])
                    self._go_on(part, waiting)
        return [sweep.values for sweep in self.sweeps]

    def _go_on(self, sweep: RankSweep, waiting: dict[int, Node]) -> None:
        """Sweep up to the next call."""
        node = sweep.to_call()
        for rank in sweep.ranks:
            if node is None:
                waiting.pop(rank, None)
            else:
                waiting[rank] = node
                self._come[rank] = None

    def _parted(self, sweep: RankSweep, results: Mapping[int, list[int] | None]) -> list[RankSweep]:
        """The sweep behind a call, split where ranks have other results of the call."""
        parts: dict[object, list[int]] = {}
        for rank in sweep.ranks:
            numbers = results.get(rank)
            parts.setdefault(rank in results if numbers is None else tuple(numbers), []).append(rank)
        if len(parts) == 1:
            return [sweep]
        sweep.alone()
        result = []
        (_, sweep.ranks), *further = parts.items()
        for _, ranks in further:
            part = RankSweep(
                ranks[0], sweep.graph, self.reader(sweep.graph), dict(sweep.values), sweep.at, ranks,
                undefined=set(sweep.undefined),
            )  # fmt: skip
            part.reader.widened = dict(sweep.reader.widened)
            for rank in ranks:
                self.sweeps[rank] = part
            result.append(part)
        return [part for part in (sweep, *result) if part.rank in results]

    def _follow(self, sweeps: Sequence[RankSweep]) -> None:
        """Let sweeps follow the nearest of the first with the same nodes, and these earlier ones with the same in
        front."""
        leaders: list[tuple[RankSweep, _Alike]] = []
        alike: dict[int, _Alike] = {}
        for sweep in sweeps:
            if id(sweep.graph.nodes) not in alike:
                alike[id(sweep.graph.nodes)] = _Alike(NodeOrder(sweep.graph, self._wholes))
            row = alike[id(sweep.graph.nodes)]
            order, firsts = row.order, row.firsts
            inputs = dict(sweep.values)
            near, nearest = max(
                ((len(inputs.items() & values.items()), place) for place, (_, values) in enumerate(firsts)),
                default=(0, 0),
            )
            near_one = [(firsts[nearest][0], order)] if firsts else []
            in_front = [(leader, near) for near in near_one for leader in self._in_front(sweep, *near, leaders)]
            earlier = ((leader, behind.order) for leader, behind in leaders)
            if not (
                any(sweep.follow(*leader, behind) for leader, behind in in_front)
                or any(sweep.follow(*leader) for leader in (*near_one, *earlier))
            ):
                leaders.append((sweep, row))
            if _FEW_ALIKE * near <= len(inputs) and len(firsts) < _FIRSTS:
                firsts.append((sweep, inputs))
            row.sweeps.append(sweep)

    def _in_front(
        self, sweep: RankSweep, near: RankSweep, order: NodeOrder, leaders: Sequence[tuple[RankSweep, _Alike]]
    ) -> Iterator[tuple[RankSweep, NodeOrder]]:
        """Sweeps over further nodes with the first input that a sweep has unlike the nearest sweep over its nodes."""
        name = order.unlike(sweep, near)
        for _, row in leaders if name else ():
            leader = row.with_input(name, sweep.values.get(name)) if row.order is not order else None
            if leader is not None:
                yield leader, row.order

    def start(self, graph: Graph, inputs: Values) -> Values:
        """The inputs and the constants of a graph."""
        stored = {
            name: self.constants.stored(tensor) for name, tensor in graph.initializers.items() if name not in inputs
        }
        return {**stored, **inputs}

    def _members(self, node: Node, rank: int) -> tuple[int, ...]:
        group = str(node.attributes["group"])
        groups = self._groups.setdefault(group, {})
        if rank not in groups:
            members = tuple(self.first + member for member in self.mesh.members(group, rank - self.first))
            groups.update(dict.fromkeys(members, members))
        return groups[rank]

    def _moved(self, waiting: Mapping[int, Node]) -> dict[int, list[int] | None]:
        """The results of waiting ranks that send a value, or receive one that was sent."""
        results: dict[int, list[int] | None] = {}
        sent: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        turns, self._come = deque(self._come), {}
        while turns:
            rank = turns.popleft()
            node = waiting.get(rank)
            if node is None or node.op_type not in PAIRWISE or rank in results:
                continue
            sweep, group, tag = self.sweeps[rank], str(node.attributes["group"]), node.attributes["tag"]
            peer, receives = self._peer(rank, node), node.op_type != "Send"
            if peer == rank or peer not in self._members(node, rank):
                raise UnpairedCall(rank, node, f"{node.op_type} with rank {peer}", f"another rank along {group}")
            if receives and not self._mail.get((peer, rank, group, tag)):
                continue  # the Send comes back to it
            signature = self._signature(node, self._types(sweep, node))
            if not receives:
                coordinates = {axis: self._places[rank][axis] for axis in self.mesh.split(group)}
                key = id(sweep), tuple(coordinates.values())
                if key not in sent:  # ranks with the same expressions wait at the same node
                    operands = sweep.operands(node, node.inputs)
                    sent[key] = [self.expressions.on_member(number, coordinates) for number in operands]
                self._mail[rank, peer, group, tag].append((signature._replace(op="Recv"), node, sent[key]))
                results[rank] = []
                turns.append(peer)
            else:
                message, _, values = self._mail[peer, rank, group, tag].popleft()
                if message != signature:
                    raise UnpairedCall(rank, node, str(signature), f"{message}, as rank {peer} sends")
                results[rank] = values
        return results

    def _peer(self, rank: int, node: Node) -> int:
        """The other rank of a Send or a Recv."""
        return int(self.first + node.attributes["peer"] + self._distances[rank])

    def check_received(self) -> None:
        """Raise UnpairedCall for a value that was sent and that no rank received."""
        for (rank, peer, group, _), mail in self._mail.items():
            for _, node, _ in mail:
                raise UnpairedCall(rank, node, f"Send over {group}, which rank {peer} never receives", "a Recv there")
        self._mail.clear()

    def _ready(self, waiting: Mapping[int, Node]) -> list[tuple[int, ...]]:
        """The groups with all members in a call. Raises UnpairedCall if no group is ready."""
        groups: dict[int, tuple[tuple[int, ...], int]] = {}
        for rank, node in waiting.items():
            members = self._members(node, rank)
            if node.op_type in PAIRWISE:
                continue
            groups[id(members)] = members, groups.get(id(members), (members, 0))[1] + 1
        ready = [members for members, count in groups.values() if count == len(members)]
        if not ready:
            rank, node = min(waiting.items(), key=lambda item: (item[1].op_type not in PAIRWISE, item[0]))
            if node.op_type in PAIRWISE:
                what = f"Recv over {node.attributes['group']}, which rank {self._peer(rank, node)} never sends"
                raise UnpairedCall(rank, node, what, "a Send of the same tag")
            members = self._members(node, rank)
            missing = [str(member) for member in members if member not in waiting]
            late = f"ranks {', '.join(missing)} never come to it" if missing else "others of its group wait elsewhere"
            raise UnpairedCall(
                rank, node, f"{node.op_type} over {node.attributes['group']}, where {late}", "all members in one call"
            )
        return ready

    def _call(self, ranks: Sequence[int], nodes: Sequence[Node]) -> Results:
        """The results of a call, of each member."""
        axes = self.mesh.split(str(nodes[0].attributes["group"]))
        read: dict[int, tuple[tuple[int, ...], CallSignature]] = {}
        """Ranks in one sweep wait at one node."""
        for rank, node in zip(ranks, nodes):
            sweep = self.sweeps[rank]
            try:
                if id(sweep) not in read:
                    read[id(sweep)] = sweep.operands(node, node.inputs), self._signature(node, self._types(sweep, node))
            except InputError as error:
                raise UnpairedCall(rank, node, error.message, "a call that its operands allow") from None
        members = [read[id(self.sweeps[rank])] for rank in ranks]
        operands, signatures = tuple([numbers for numbers, _ in members]), [signature for _, signature in members]
        for rank, node, signature in zip(ranks, nodes, signatures):
            if signature != signatures[0]:
                raise UnpairedCall(rank, node, str(signature), f"{signatures[0]}, as rank {ranks[0]} has")
        if signatures[0].reduce in ("sum", "mean") and signatures[0].dtype in _NARROW:
            raise UnsupportedError(
                f"{nodes[0].op_type} {nodes[0].label!r} sums {signatures[0].dtype}, which may overflow",
                "cast the operand to int32 before the call",
            )
        key = nodes[0].encoded or id(nodes[0]), operands
        if key not in self._calls:
            all_coordinates = [{axis: self._places[rank][axis] for axis in axes} for rank in ranks]
            self._calls[key] = Members(self.expressions, axes, all_coordinates).call(nodes[0], operands)
        return self._calls[key]

    def _signature(self, node: Node, types: Sequence[Type]) -> CallSignature:
        """The facts of a call that all members have alike. Raises InputError."""
        if node.encoded is None:
            return call_signature(node.op_type, node.attributes, types)
        key = node.encoded, tuple(types)
        if key not in self._signatures:
            self._signatures[key] = call_signature(node.op_type, node.attributes, types)
        return self._signatures[key]

    def _types(self, sweep: RankSweep, node: Node) -> list[Type]:
        """The types of a call's operands; an open shape is taken from the expression."""
        dtypes = (sweep.graph.types[name].dtype for name in (*node.inputs, *node.outputs) if name in sweep.graph.types)
        dtype = next(dtypes, str(node.attributes.get("dtype", "")))
        shapes = [self.expressions.shape(sweep.values[name]) for name in node.inputs]
        if dtype in ("", "undefined") or any(elements(shape) is None for shape in shapes):
            raise unsized(node)
        return [(dtype, cast(tuple[int, ...], shape)) for shape in shapes]
