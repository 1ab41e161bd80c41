"""Updates only the touched rows of a table: gathers these rows from the states, updates and scatters the rows.

A row is touched in a round if a trainer pushed it, even with a gradient of zero. All other rows and their optimizer
states stay. Values that all rows share, such as the step number, advance by one a round.
"""

from __future__ import annotations

from collections.abc import Mapping

from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.passes.shard import emit
from gopt.passes.shard.plan import ParameterGroup
from gopt.passes.shard.scalar_reductions import ScalarReductions
from gopt.passes.shard.split import GroupEmitter
from gopt.records.placements import Sharding


class TouchedRows(GroupEmitter):
    """Writes the update of a table's part over the touched rows.

    ``shape``: rows and columns of the part; ``where``: its server; ``ids`` and ``gradients``: results of the server's
    ``AggregateRows``.
    """

    def __init__(
        self, rewriter: GraphRewriter, group: ParameterGroup, name: str, scalars: ScalarReductions,
        shape: tuple[int, int], where: Sharding,
    ) -> None:  # fmt: skip
        super().__init__(rewriter, group, name, scalars, {}, owned=True)
        self.shape, self.where = shape, where
        self.results = {}

    def run_type(self, dtype: str) -> TensorType:
        return TensorType(dtype, (None, self.shape[1]))

    def update(self, ids: str, positions: str, gradients: str) -> None:
        """Emit the update. ``positions``: ``ids`` as a column."""
        types, shape = self.rewriter.graph.types, self.scalars.constant("shape{}_{}".format(*self.shape), [*self.shape])
        self.local[self.subgraph.gradient] = gradients
        tables: dict[str, tuple[str, str]] = {}
        for slot, state in enumerate(self.subgraph.states):
            stem = self._named(f"state{slot}" if slot else "parameter")
            dtype = types[state.tensor].dtype
            types[stem] = emit.run(dtype, self.group.sharding)
            table, self.local[state.tensor] = f"{stem}.table", f"{stem}.rows"
            self._made("Reshape", [stem, shape], {table: TensorType(dtype, self.shape)})
            self._made("Gather", [table, ids], {f"{stem}.rows": self.run_type(dtype)}, axis=0)
            tables[state.tensor] = stem, table
        self.emit_nodes()
        flat = self.scalars.constant("one", [-1])
        updated: dict[str, str] = {}
        for state in self.subgraph.states:
            stem, table = tables[state.tensor]
            dtype, new = types[state.tensor].dtype, f"{stem}.updated"
            self._made("ScatterND", [table, positions, self.local[state.updated]], {new: TensorType(dtype, self.shape)})
            output = {f"{stem}_out": emit.run(dtype, self.group.sharding)}
            self.rewriter.add("Reshape", [new, flat], output, sharding=self.group.sharding)
            updated[state.updated] = f"{stem}_out"
            self.local[state.tensor] = stem
        self.local.update(updated)
        self.add_states()

    def _made(self, op_type: str, inputs: list[str], outputs: Mapping[str, TensorType], **attributes: object) -> None:
        self.rewriter.add(op_type, inputs, dict(outputs), attributes=attributes, sharding=self.where)
