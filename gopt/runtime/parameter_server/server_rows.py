"""A server's parts of tables: the rows for pulls, and the merge of pushed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.artifact.server_entries import TableEntry
from gopt.artifact.table_parts import table_layout
from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.ir.types import numpy_dtype
from gopt.runtime.merge import Contribution, merge_rows
from gopt.runtime.messages.message import Message
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A server's part of a table: ``rows`` x ``columns`` elements, flattened, of the state ``input``."""

    name: str
    input: str
    rows: int
    columns: int


def table_parts(tables: Sequence[TableEntry], server: int) -> dict[int, StoredRows]:
    """Number of a table -> this server's part."""
    parts = {}
    for number, entry in enumerate(tables):
        layout = table_layout(entry)
        part = layout.part(server)
        if part is not None:
            rows, columns = layout.local_rows(server), len(layout.columns(server))
            parts[number] = StoredRows(entry.parameter, entry.inputs[part], rows, columns)
    return parts


def part_of(parts: Mapping[int, StoredRows], table: int, trainer: int) -> StoredRows:
    """A server's part of the table named by a trainer; raises RunError for a server without a part."""
    if table not in parts:
        raise RunError(f"trainer {trainer} names rows of table {table}, and this server has no part of the table")
    return parts[table]


def rows_answer(part: StoredRows, take: Callable[[Array], Array], message: Message) -> Array:
    """The rows requested by a pull, in the requested type. ``take``: copies rows of the part. Raises RunError for rows
    outside the part."""
    (ids,) = message.arrays
    check_rows(part, ids, message.source)
    rows = take(ids)
    with np.errstate(over="ignore"):
        return rows.astype(numpy_dtype(message.note["dtype"]), copy=False)


def merged_rows(part: StoredRows, node: Node, pushes: Mapping[int, Contribution]) -> list[Array]:
    """The merged rows of a round. Raises RunError for rows outside the part."""
    for trainer, push in pushes.items():
        assert push.ids is not None
        check_rows(part, push.ids, trainer)
        if push.ids.size and (np.diff(push.ids) <= 0).any():
            raise RunError(f"trainer {trainer} pushed unsorted rows of table {part.name}")
    attributes = node.attributes
    return merge_rows(pushes, attributes["reduce"], attributes["dtype"], attributes["width"])


def check_rows(part: StoredRows, ids: Array, trainer: int) -> None:
    """Raise RunError for rows outside a part."""
    outside = ids[(ids < 0) | (ids >= part.rows)]
    if outside.size:
        raise RunError(
            f"trainer {trainer} names row {outside[0]} of this part of table {part.name}, which has {part.rows} rows"
        )
