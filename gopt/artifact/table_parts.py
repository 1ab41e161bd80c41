"""The elements of a table on each server, as a piece of the tensor; and tables without values in files."""

from __future__ import annotations

import numpy as np

from gopt.artifact.pieces import Piece
from gopt.artifact.server_entries import ServerPlanEntry, TableEntry
from gopt.errors import InputError, InvariantError
from gopt.ir.graph import Graph
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.records.row_init import CHUNK, RowInit
from gopt.records.tables import Layout, TableLayout


def table_layout(entry: TableEntry) -> TableLayout:
    """The layout of a table of a manifest; raises InputError unless parts tile the table."""
    try:
        return TableLayout(
            entry.parameter, entry.rows, entry.width, Layout(entry.layout), entry.servers, entry.cuts
        )  # fmt: skip
    except InvariantError as error:
        raise InputError(error.message) from None


def part_piece(layout: TableLayout, tensor: str, server: int) -> Piece:
    """Return a server's piece of a tensor of the table's shape."""
    rows, columns = layout.row_ids(server), layout.columns(server)
    elements = len(rows) * len(columns)
    if layout.layout is Layout.MODULO:
        return Piece(tensor, 0, elements, every=(rows.start, rows.step))
    if len(columns) < layout.width:
        return Piece(tensor, 0, elements, ((0, layout.rows), (columns.start, columns.stop)))
    return Piece(tensor, rows.start * layout.width, rows.stop * layout.width)


def drawn_tables(plan: ServerPlanEntry, graph: Graph) -> dict[str, Tensor]:
    """The whole tensors with rows made from a seed, made on reading; ``graph``: the source."""
    return {
        row.tensor: _drawn(graph.types[row.tensor], row.tensor, RowInit.parse(row.rows), entry)
        for entry in plan.tables for row in entry.init
    }  # fmt: skip


def _drawn(type: TensorType, tensor: str, init: RowInit, entry: TableEntry) -> Tensor:
    step = max(1, CHUNK // entry.width)
    dtype = numpy_dtype(type.dtype)

    def part(start: int, stop: int) -> Tensor:
        flat = TensorType(type.dtype, ((stop - start) * entry.width,))
        ids = np.arange(start, stop)
        return Tensor(flat, reader=lambda: init.rows(tensor, ids, entry.width).astype(dtype).reshape(-1))

    starts = range(0, entry.rows, step)
    return Tensor(type, parts=tuple(part(start, min(start + step, entry.rows)) for start in starts))
