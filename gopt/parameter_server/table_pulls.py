"""Tables on trainers: lookups pull rows by number, and gradients of rows are pushed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gopt.analysis.row_reads import Lookup
from gopt.analysis.row_sums import SparseGradient
from gopt.ir.graph import COMM, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code
from gopt.operators.kinds import CASTS
from gopt.parameter_server.table_choice import ServedTable
from gopt.parameter_server.views import ROUND, ROUND_TYPE


class TableWriter:
    """Writes the messages of tables into a trainer's graph. ``wired``: type -> the type in which it travels."""

    def __init__(self, rewriter: GraphRewriter, wired: Mapping[str, str]) -> None:
        self.rewriter, self.types = rewriter, rewriter.graph.types
        self._wired = wired

    def pull(self, served: ServedTable) -> None:
        """Pull all rows a step looks up in one message, and distribute them to the lookups."""
        table, root = served.table, f"gopt.ps.t{served.number}"
        ids = [self._numbers(lookup.ids, f"{root}.ids{index}") for index, lookup in enumerate(table.lookups)]
        every = self._joined(ids, f"{root}.ids")
        count = self.types[every].elements
        wire = self._wired.get(table.dtype, table.dtype)
        attributes = {"table": served.number, "parameter": table.parameter, "dtype": wire, "width": table.width}
        rows = f"{root}.rows"
        self.rewriter.add(
            "PullRows", [ROUND, every], {rows: TensorType(wire, (count, table.width))}, domain=COMM,
            attributes=attributes, after=self.rewriter.latest([every]),
        )  # fmt: skip
        start = 0
        for position, lookup in enumerate(table.lookups):
            stop = start + self.types[lookup.ids].elements
            part = rows if (start, stop) == (0, count) else self._sliced(rows, start, stop, f"{rows}{position}")
            self._shown(served, lookup, part, position)
            start = stop

    def push(self, served: ServedTable, token: str, weight: str) -> str:
        """Push the gradients of rows; returns the token."""
        table, root = served.table, f"gopt.ps.t{served.number}"
        ids, rows = [], []
        for index, term in enumerate(table.terms):
            ids.append(self._numbers(term.ids, f"{root}.pushed_ids{index}"))
            rows.append(self._rows(served, term, f"{root}.pushed{index}"))
        every, values = self._joined(ids, f"{root}.pushed_ids"), self._joined(rows, f"{root}.pushed")
        type = self.types[values]
        wire = self._wired.get(type.dtype, type.dtype)
        if wire != type.dtype:
            values = self._cast(values, wire, f"{root}.pushed_wire")
        token_sent = f"{root}.sent"
        self.rewriter.add(
            "PushRows", [token, weight, every, values], {token_sent: ROUND_TYPE}, domain=COMM,
            attributes={"table": served.number, "parameter": table.parameter},
            after=self.rewriter.latest([every, values]),
        )  # fmt: skip
        return token_sent

    def _shown(self, served: ServedTable, lookup: Lookup, part: str, index: int) -> None:
        """Write the result of a lookup, with the casts and the shape it has in the source."""
        root = f"gopt.ps.t{served.number}.lookup{index}"
        value = part
        if self.types[value].dtype != served.table.dtype:
            value = self._cast(value, served.table.dtype, f"{root}.wide")
        for number, node in enumerate(lookup.through):
            if node.is_in(CASTS):
                value = self._cast(value, self.types[node.outputs[0]].dtype, f"{root}.cast{number}")
        target = self.types[lookup.rows]
        shape = self._shape(target.dims, f"{root}.shape")
        self.rewriter.add("Reshape", [value, shape], {lookup.rows: target}, after=self.rewriter.latest([value]))

    def _rows(self, served: ServedTable, term: SparseGradient, root: str) -> str:
        """Return the rows of a term as (number of ids) x width, scaled as the sum would be."""
        value = term.rows
        for number, node in enumerate(term.scaling):
            value = self._scaled(node, value, f"{root}.scaled{number}")
        count = self.types[term.ids].elements
        output = f"{root}.flat"
        type = TensorType(self.types[value].dtype, (count, served.table.width))
        shape = self._shape((count, served.table.width), f"{root}.shape")
        self.rewriter.add("Reshape", [value, shape], {output: type}, after=self.rewriter.latest([value]))
        wanted = self.types[served.table.gradient].dtype
        return output if type.dtype == wanted else self._cast(output, wanted, f"{root}.cast")

    def _scaled(self, node: Node, value: str, output: str) -> str:
        """Apply a node scaling the sum of rows to the rows that are summed."""
        inputs = [name if self.types[name].elements == 1 else value for name in node.inputs]
        dtype = self.types[node.outputs[0]].dtype
        after = self.rewriter.latest([name for name in inputs if name])
        added = self.rewriter.add(
            node.op_type, inputs, {output: TensorType(dtype, self.types[value].shape)}, domain=node.domain,
            attributes=dict(node.attributes), after=after,
        )  # fmt: skip
        return added.outputs[0]

    def _numbers(self, ids: str, numbers: str) -> str:
        """Return row numbers as a list of int64."""
        type = self.types[ids]
        value = ids if type.dtype == "int64" else self._cast(ids, "int64", f"{numbers}.wide")
        flat = {numbers: TensorType("int64", (type.elements,))}
        inputs = [value, self._shape((-1,), f"{numbers}.shape")]
        self.rewriter.add("Reshape", inputs, flat, after=self.rewriter.latest([value]))
        return numbers

    def _joined(self, values: Sequence[str], output: str) -> str:
        if len(values) == 1:
            return values[0]
        type_of = self.types[values[0]]
        count = sum(self.types[value].dims[0] for value in values)
        type = {output: TensorType(type_of.dtype, (count, *type_of.dims[1:]))}
        self.rewriter.add("Concat", values, type, attributes={"axis": 0}, after=self.rewriter.latest(values))
        return output

    def _sliced(self, value: str, start: int, stop: int, output: str) -> str:
        bounds = [self._shape((start,), f"{output}.start"), self._shape((stop,), f"{output}.stop")]
        type = TensorType(self.types[value].dtype, (stop - start, *self.types[value].dims[1:]))
        self.rewriter.add("Slice", [value, *bounds], {output: type}, after=self.rewriter.latest([value]))
        return output

    def _cast(self, value: str, dtype: str, output: str) -> str:
        type = {output: TensorType(dtype, self.types[value].shape)}
        self.rewriter.add(
            "Cast", [value], type, attributes={"to": dtype_code(dtype)}, after=self.rewriter.latest([value])
        )
        return output

    def _shape(self, shape: tuple[int, ...], output: str) -> str:
        head = self.rewriter.graph.nodes[0] if self.rewriter.graph.nodes else None
        return self.rewriter.constant(output, shape, before=head)
