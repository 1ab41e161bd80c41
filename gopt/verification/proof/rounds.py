"""A sweep over the graphs of trainers and servers in a round: messages of both, and calls among servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from gopt.artifact.server_entries import ServerPlanEntry, TableEntry
from gopt.artifact.table_parts import part_piece, table_layout
from gopt.collectives.layout import HALVES, parse_shapes
from gopt.collectives.messages import AGGREGATE, AGGREGATE_ROWS, MESSAGES, PULL, PULL_ROWS, PUSH, PUSH_ROWS, ROUND_INPUT
from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.records.mesh import Mesh
from gopt.records.tables import Rows
from gopt.text.sanitize import show
from gopt.verification.proof.calls import Members, Results
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.expected import held_pieces, weighed, weighted_mean
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import ONE, elements
from gopt.verification.proof.move_laws import as_type
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.rank_sweep import RankSweep, SweptValues, UnpairedCall, Values
from gopt.verification.proof.rows import MERGED, NUMBERS, RowLaws
from gopt.verification.proof.sweep import Sweep, unsized


def check_tables(plan: ServerPlanEntry, trainer: Mapping[str, Graph]) -> None:
    """Raise UnsupportedError for tables without a law; ``trainer``: the graphs of a trainer."""
    for graph in trainer.values():
        for node in graph.nodes:
            if node.op_type != PUSH_ROWS.name:
                continue
            table, sent = plan.tables[node.attributes["table"]], graph.type_of(node.inputs[-1]).dtype
            reason = ""
            if table.update != Rows.DENSE.value:
                reason = "the update runs on the rows that were pushed"
            elif sent in HALVES and sent != table.dtype:
                reason = f"each row is rounded to {sent} before rows of one number are added"
            if reason:
                raise UnsupportedError(
                    f"table {show(table.parameter)}: {reason}, for which gopt prove has no law",
                    "gopt verify compares trainers and servers by numbers",
                )


def round_number(expressions: Expressions) -> int:
    """The number of the round: the token for the order of a trainer's messages."""
    return expressions.leaf("input", ROUND_INPUT, ())


_MERGES = {AGGREGATE.name: "bucket", AGGREGATE_ROWS.name: "table"}
"""Operator of a server that merges -> the attribute that names what."""


@dataclass(frozen=True, slots=True)
class _Push:
    """The values of a trainer for a bucket, flat, the type, and the trainer's weight."""

    number: int
    dtype: str
    weight: int
    node: Node


class RoundSweep(Sweep):
    """The graphs of a phase of all trainers, and of all servers; ``mesh``: of the trainers; ``start``: the values of
    the source at the start of the step."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, mesh: Mesh, reader: Callable[[Graph], NodeReader],
        plan: ServerPlanEntry, start: Values, rows: RowLaws,
    ) -> None:  # fmt: skip
        super().__init__(expressions, constants, plan.mesh, reader, mesh.ranks)
        self.trainers, self._tables, self._start = range(mesh.ranks), plan.tables, start
        self._laws = rows
        self._buckets, self._round = plan.buckets, round_number(expressions)
        self._merged = Members(expressions, mesh.data_axes, [mesh.coordinates(rank) for rank in self.trainers])
        self._pushed: dict[tuple[str, int, int], dict[int, _Push]] = {}
        """Operator, server and bucket or table of a merge -> the pushes so far, by trainer; the merge takes all."""

        self._rules = {
            PUSH.name: self._push, PULL.name: self._pull, PUSH_ROWS.name: self._push_rows,
            PULL_ROWS.name: self._pull_rows, **dict.fromkeys(_MERGES, self._aggregate),
        }  # fmt: skip

    def run(
        self, graphs: Sequence[Graph], inputs: Sequence[Values], distances: Sequence[int] = ()
    ) -> list[SweptValues]:
        """The expressions of all values of all trainers and servers. Raises UnpairedCall."""
        self._pushed.clear()
        results = super().run(graphs, [dict(values) for values in inputs], distances)  # messages make each one's values
        for (_, server, _), pushes in self._pushed.items():
            for trainer, push in pushes.items():
                raise UnpairedCall(trainer, push.node, "a push", f"server {server} to merge it")
        return results

    def _ready(self, waiting: Mapping[int, Node]) -> list[tuple[int, ...]]:
        """The members with a message to make, or else the groups with all members in a call."""
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
        if node.op_type in _MERGES:
            pushes = self._pushed.get(self._merge_of(rank, node), {})
            missing = [str(trainer) for trainer in self.trainers if trainer not in pushes]
            return f"trainers {', '.join(missing)} do not push it" if missing else ""
        if node.op_type == PULL.name:
            return self._unserved(node)
        if node.op_type == PULL_ROWS.name and len(self.sweeps) == self.first:
            return "no server is there"
        return ""

    def _merge_of(self, rank: int, node: Node) -> tuple[str, int, int]:
        return node.op_type, rank - self.first, node.attributes[_MERGES[node.op_type]]

    def _unserved(self, node: Node) -> str:
        """Why a pull gets no answer yet."""
        server = node.attributes["server"]
        at = self.first + server
        if at >= len(self.sweeps):
            return f"server {server} is not there"
        done = self.sweeps[at].at >= len(self.sweeps[at].graph.nodes)
        return "" if done or node.attributes["version"] == "before" else f"server {server} does not end its update"

    def _call(self, ranks: Sequence[int], nodes: Sequence[Node]) -> Results:
        sweep, node = self.sweeps[ranks[0]], nodes[0]
        rule = self._rules.get(node.op_type)
        if rule is None:
            return super()._call(ranks, nodes)
        if sweep.operands(node, node.inputs[:1]) != (self._round,):
            raise UnpairedCall(sweep.rank, node, "a message of another round", "one of this round")
        rule(sweep, node)
        return [[sweep.values[name] for name in node.outputs]]

    def _push(self, sweep: RankSweep, node: Node) -> None:
        numbers = sweep.operands(node, node.inputs[2:])
        if any(self.expressions.elements(number) is None for number in numbers):
            raise unsized(node)
        pieces = (piece for number in numbers for piece in self.expressions.pieces(number))
        merge = AGGREGATE.name, node.attributes["server"], node.attributes["bucket"]
        self._send(sweep, node, [merge], self.expressions.flat(pieces), node.inputs[2:])

    def _row_shape(self, sweep: RankSweep, node: Node, count: int | None, columns: int) -> tuple[int | None, ...]:
        """The shape of rows of ``columns`` elements. Raises UnpairedCall for a node with rows of another width."""
        width = node.attributes["width"]
        if (width or 1) != columns:
            raise UnpairedCall(sweep.rank, node, f"rows of {width} elements", f"rows of {columns}")
        return (count, width) if width else (count,)

    def _push_rows(self, sweep: RankSweep, node: Node) -> None:
        table = self._tables[node.attributes["table"]]
        numbers, rows = sweep.operands(node, node.inputs[2:])
        total = self._laws.added((table.rows, table.width), numbers, rows)
        if total is None:
            raise unsized(node)
        merges = [(AGGREGATE_ROWS.name, server, node.attributes["table"]) for server in table.servers]
        self._send(sweep, node, merges, total, node.inputs[3:])

    def _send(
        self, sweep: RankSweep, node: Node, merges: Sequence[tuple[str, int, int]], number: int, names: Sequence[str]
    ) -> None:
        """Push a value to servers; ``names``: of the parts."""
        types = {sweep.graph.type_of(name).dtype for name in names}
        if len(types) != 1:
            raise unsized(node)
        weight = sweep.operands(node, [node.inputs[1]])[0] if node.inputs[1] else ONE
        push = _Push(number, types.pop(), weight, node)
        for merge in merges:
            if self._pushed.setdefault(merge, {}).setdefault(sweep.rank, push) is not push:
                raise UnpairedCall(sweep.rank, node, "a second push", "one push of a bucket in a round")
        sweep.values[node.outputs[0]] = self._round

    def _aggregate(self, sweep: RankSweep, node: Node) -> None:
        pushes = self._pushed.pop(self._merge_of(sweep.rank, node))
        merged = self._merge([pushes[trainer] for trainer in self.trainers], node)
        if node.op_type == AGGREGATE.name:
            self._unpack(sweep, node, merged)
            return
        table, server = self._tables[node.attributes["table"]], sweep.rank - self.first
        part = self._part(table, server, merged)
        columns = len(table_layout(table).columns(server))
        sweep.values[node.outputs[0]] = self.expressions.apply(NUMBERS, None, [part], (None,))
        shape = self._row_shape(sweep, node, None, columns)
        sweep.values[node.outputs[1]] = self.expressions.apply(MERGED, None, [part], shape)

    def _part(self, table: TableEntry, server: int, number: int) -> int:
        """A server's part of a value with the table's rows, flat."""
        piece = part_piece(table_layout(table), table.parameter, server)
        return held_pieces(self.expressions, [piece], {table.parameter: number})

    def _pull_rows(self, sweep: RankSweep, node: Node) -> None:
        table = self._tables[node.attributes["table"]]
        whole = self.expressions.view(self._start[table.parameter], (table.rows, table.width))
        for server, name in zip(table.servers, table.inputs):
            (number,) = self.sweeps[self.first + server].operands(node, [name])
            if self.expressions.root(number) != self.expressions.root(self._part(table, server, whole)):
                raise UnpairedCall(sweep.rank, node, f"{name!r} of server {server}", "its part of the table")
        whole = as_type(self.expressions, whole, table.dtype, node.attributes["dtype"])
        (numbers,) = sweep.operands(node, node.inputs[1:])
        rows = self._laws.looked_up(whole, numbers)
        if rows is None:
            raise unsized(node)
        shape = self._row_shape(sweep, node, self.expressions.elements(numbers), table.width)
        sweep.values[node.outputs[0]] = self.expressions.view(rows, shape)

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
        """Store the values of a bucket, by shape."""
        shapes = parse_shapes(node.attributes["shapes"])
        bounds = [0, *accumulate(prod(shape) for shape in shapes)]
        count = elements(self.expressions.shape(number))
        if count != bounds[-1]:
            raise UnpairedCall(sweep.rank, node, f"{bounds[-1]} elements", f"{count}, as they are sent")
        for name, part, shape in zip(node.outputs, self.expressions.split(number, bounds), shapes):
            sweep.values[name] = self.expressions.view(self.expressions.flat(part), shape)
