"""Which elements of a table a server has, as a piece of the tensor."""

from __future__ import annotations

from gopt.artifact.pieces import Piece
from gopt.artifact.server_entries import TableEntry
from gopt.errors import InputError, InvariantError
from gopt.parameter_server.tables import Layout, TableLayout


def table_layout(entry: TableEntry) -> TableLayout:
    """The layout of a table of a manifest; raises InputError where its parts do not tile it."""
    try:
        return TableLayout(
            entry.parameter, entry.rows, entry.width, Layout(entry.layout), entry.servers, entry.cuts
        )  # fmt: skip
    except InvariantError as error:
        raise InputError(error.message) from None


def part_piece(layout: TableLayout, tensor: str, server: int) -> Piece:
    """What a server has of a tensor with the table's shape."""
    rows, columns = layout.row_ids(server), layout.columns(server)
    elements = len(rows) * len(columns)
    if layout.layout is Layout.MODULO:
        return Piece(tensor, 0, elements, every=(rows.start, rows.step))
    if len(columns) < layout.width:
        return Piece(tensor, 0, elements, ((0, layout.rows), (columns.start, columns.stop)))
    return Piece(tensor, rows.start * layout.width, rows.stop * layout.width)
