"""A sweep over the graphs of trainers and servers in a round: messages of both, and calls among servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from gopt.artifact.server_entries import ServerPlanEntry
from gopt.collectives.layout import HALVES, parse_shapes
from gopt.collectives.messages import MESSAGES, ROUND_INPUT
from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.records.mesh import Mesh
from gopt.verification.proof.calls import Members
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.expected import weighed, weighted_mean
from gopt.verification.proof.expressions import ONE, Expressions, elements
from gopt.verification.proof.operators import as_type
from gopt.verification.proof.sweep import RankSweep, Sweep, UnpairedCall, Values


def check_tables(plan: ServerPlanEntry) -> None:
    """Raise UnsupportedError for tables: rows are pulled by number."""
    for table in plan.tables:
        raise UnsupportedError(
            f"trainers pull rows of table {table.parameter}: gopt prove has no law for rows",
            "gopt verify compares trainers and servers by numbers",
        )


def round_number(expressions: Expressions) -> int:
    """The number of the round: the token for the order of a trainer's messages."""
    return expressions.leaf("input", ROUND_INPUT, ())


@dataclass(frozen=True, slots=True)
class _Push:
    """The values of a trainer for a bucket, flat, their type, and the trainer's weight."""

    number: int
    dtype: str
    weight: int
    node: Node


class RoundSweep(Sweep):
    """The graphs of a phase of all trainers, and of all servers; ``mesh``: of the trainers."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, mesh: Mesh, drawn: frozenset[str],
        plan: ServerPlanEntry,
    ) -> None:  # fmt: skip
        super().__init__(expressions, constants, plan.mesh, drawn, mesh.ranks)
        self.trainers = range(mesh.ranks)
        self._buckets, self._round = plan.buckets, round_number(expressions)
        self._merged = Members(expressions, mesh.data_axes, [mesh.coordinates(rank) for rank in self.trainers])
        self._pushed: dict[tuple[int, int], dict[int, _Push]] = {}
        """Server and bucket -> the pushes so far, by trainer; a merge takes all."""

    def run(self, graphs: Sequence[Graph], inputs: Sequence[Values]) -> list[Values]:
        """The expressions of all values of all trainers and servers. Raises UnpairedCall."""
        self._pushed.clear()
        results = super().run(graphs, inputs)
        for (server, _), pushes in self._pushed.items():
            for trainer, push in pushes.items():
                raise UnpairedCall(trainer, push.node, "a push", f"server {server} to merge it")
        return results

    def _ready(self, waiting: Mapping[int, Node]) -> list[tuple[int, ...]]:
        """The members whose message can be made, or else the groups with all members in a call."""
        reasons = {rank: self._lacking(rank, node) for rank, node in waiting.items()}
        ready: list[tuple[int, ...]] = [(rank,) for rank, reason in reasons.items() if not reason]
        calls = {rank: node for rank, node in waiting.items() if node.op_type not in MESSAGES}
        if ready or (calls and min(calls) >= self.first):
            return ready or super()._ready(calls)
        rank, node = min(waiting.items())
        raise UnpairedCall(rank, node, f"{node.op_type}, where {reasons[rank]}", "a message that comes")

    def _lacking(self, rank: int, node: Node) -> str:
        """Why a message or a call has to wait; '' if ready."""
        if node.op_type not in MESSAGES:
            return "others are missing" if rank >= self.first else "trainers make no calls"
        if node.op_type == "Aggregate":
            pushes = self._pushed.get((rank - self.first, node.attributes["bucket"]), {})
            missing = [str(trainer) for trainer in self.trainers if trainer not in pushes]
            return f"trainers {', '.join(missing)} do not push it" if missing else ""
        if node.op_type == "Pull":
            return self._unserved(node)
        return ""

    def _unserved(self, node: Node) -> str:
        """Why a pull gets no answer yet."""
        server = node.attributes["server"]
        at = self.first + server
        if at >= len(self.sweeps):
            return f"server {server} is not there"
        done = self.sweeps[at].at >= len(self.sweeps[at].graph.nodes)
        return "" if done or node.attributes["version"] == "before" else f"server {server} does not end its update"

    def _call(self, members: Sequence[RankSweep], nodes: Sequence[Node]) -> None:
        (sweep, *_), (node, *_) = members, nodes
        rule = {"Push": self._push, "Pull": self._pull, "Aggregate": self._aggregate}.get(node.op_type)
        if rule is None:
            super()._call(members, nodes)
            return
        if sweep.operands(node, node.inputs[:1]) != (self._round,):
            raise UnpairedCall(sweep.rank, node, "a message of another round", "one of this round")
        rule(sweep, node)

    def _push(self, sweep: RankSweep, node: Node) -> None:
        key = node.attributes["server"], node.attributes["bucket"]
        pushes = self._pushed.setdefault(key, {})
        types = {sweep.graph.type_of(name).dtype for name in node.inputs[2:]}
        numbers = sweep.operands(node, node.inputs[2:])
        if sweep.rank in pushes:
            raise UnpairedCall(sweep.rank, node, "a second push", "one push of a bucket in a round")
        if len(types) != 1 or any(self.expressions.elements(number) is None for number in numbers):
            raise UnsupportedError(
                f"Push {node.label!r}: the type or the size of an operand is unknown",
                "give the values of the graph their types (onnx.shape_inference)",
            )
        weight = sweep.operands(node, [node.inputs[1]])[0] if node.inputs[1] else ONE
        pieces = (piece for number in numbers for piece in self.expressions.pieces(number))
        pushes[sweep.rank] = _Push(self.expressions.flat(pieces), types.pop(), weight, node)
        sweep.values[node.outputs[0]] = self._round

    def _aggregate(self, sweep: RankSweep, node: Node) -> None:
        pushes = self._pushed.pop((sweep.rank - self.first, node.attributes["bucket"]))
        merged = self._merge([pushes[trainer] for trainer in self.trainers], node)
        self._unpack(sweep, node, merged)

    def _merge(self, pushes: Sequence[_Push], node: Node) -> int:
        """The merged pushes of all trainers: halves are summed in float32 and rounded once."""
        how, dtype = node.attributes["reduce"], node.attributes["dtype"]
        wide = "float32" if dtype in HALVES else dtype
        numbers = [as_type(self.expressions, push.number, push.dtype, wide) for push in pushes]
        if how == "weighted":
            terms = [weighed(self.expressions, number, push.weight) for number, push in zip(numbers, pushes)]
            weights = self._merged.reduced([push.weight for push in pushes], "sum")
            total = weighted_mean(self.expressions, self._merged.reduced(terms, "sum"), weights)
        else:
            total = self._merged.reduced(numbers, how)
        return total if {push.dtype for push in pushes} == {dtype} else as_type(self.expressions, total, wide, dtype)

    def _pull(self, sweep: RankSweep, node: Node) -> None:
        server, after = self.sweeps[self.first + node.attributes["server"]], node.attributes["version"] == "after"
        pieces = []
        for key in self._buckets[node.attributes["bucket"]]:
            names = (key.outputs if after else key.inputs)[:1]
            if not names:
                raise UnpairedCall(sweep.rank, node, f"{key.name!r} before the update", "its value behind the update")
            (number,) = server.operands(node, names)
            pieces += self.expressions.pieces(as_type(self.expressions, number, key.dtype, node.attributes["dtype"]))
        self._unpack(sweep, node, self.expressions.flat(pieces))

    def _unpack(self, sweep: RankSweep, node: Node, number: int) -> None:
        """Store the values of a bucket, by their shapes."""
        shapes = parse_shapes(node.attributes["shapes"])
        bounds = [0, *accumulate(prod(shape) for shape in shapes)]
        count = elements(self.expressions.shape(number))
        if count != bounds[-1]:
            raise UnpairedCall(sweep.rank, node, f"{bounds[-1]} elements", f"{count}, as they are sent")
        for name, part, shape in zip(node.outputs, self.expressions.split(number, bounds), shapes):
            sweep.values[name] = self.expressions.view(self.expressions.flat(part), shape)
