"""Locates rows of tables: the server of a row, and the row's number there.

A table is a dense parameter on all trainers, or lies on servers, with rows requested by trainers: whole on one server,
rows distributed by remainders or by ranges, or each row cut into columns. One record serves pushes, pulls, initial
values and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from gopt.errors import InputError, InvariantError
from gopt.text.sanitize import show

Ids = npt.NDArray[np.int64]


class Layout(str, Enum):
    """Layout of a table among servers."""

    DENSE = "dense"
    """Every trainer has the table; its gradient is pushed whole."""
    WHOLE = "whole"
    """One server has the table."""
    MODULO = "modulo"
    """Part k of P has the rows whose numbers leave k when divided by P: that spreads popular rows."""
    RANGE = "range"
    """Each part has consecutive rows."""
    COLUMNS = "columns"
    """Each part has some columns of all rows; every id goes to every server."""


class Rows(str, Enum):
    """The rows of a table in an update."""

    DENSE = "dense"
    """All rows: those without a gradient decay and keep their momentum, as in the source."""
    LAZY = "lazy"
    """Pushed rows: all others, and their optimizer states, stay."""


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A request to one server: ``positions`` in the list of ids, and ``local``, the server's row numbers."""

    server: int
    positions: Ids
    local: Ids


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table of ``rows`` x ``width`` elements in parts; ``servers[k]`` has part k.

    ``cuts``: one more than there are parts: rows of a RANGE, columns of COLUMNS; empty for any other layout.
    """

    name: str
    rows: int
    width: int
    layout: Layout
    servers: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parts, end = len(self.servers), self.width if self.layout is Layout.COLUMNS else self.rows
        cut = self.layout in (Layout.RANGE, Layout.COLUMNS)
        tiled = len(self.cuts) == parts + 1 and self.cuts[0] == 0 and self.cuts[-1] == end if cut else not self.cuts
        counted = parts == {Layout.DENSE: 0, Layout.WHOLE: 1}.get(self.layout, max(parts, 1))
        if not tiled or not counted or len(set(self.servers)) != parts or list(self.cuts) != sorted(self.cuts):
            raise InvariantError(f"the parts of table {self.name} do not tile it")

    def part(self, server: int) -> int | None:
        """Return the part on a server, or None."""
        return self.servers.index(server) if server in self.servers else None

    def local_rows(self, server: int) -> int:
        """Return the number of rows, or of pieces of rows, of a server."""
        return len(self.row_ids(server))

    def row_ids(self, server: int) -> range:
        """Return the rows with elements on a server, in the order of the server's numbers."""
        part = self.part(server)
        if part is None:
            return range(0)
        if self.layout is Layout.MODULO:
            return range(part, self.rows, len(self.servers))
        return range(*self.cuts[part : part + 2]) if self.layout is Layout.RANGE else range(self.rows)

    def columns(self, server: int) -> range:
        """Return a server's columns of those rows."""
        part = self.part(server)
        if part is None:
            return range(0)
        return range(*self.cuts[part : part + 2]) if self.layout is Layout.COLUMNS else range(self.width)

    def known(self, ids: npt.ArrayLike) -> Ids:
        """Return ids as a list of numbers from 0; a negative id counts from the end. Raises InputError for any
        other."""
        flat = np.asarray(ids, np.int64).reshape(-1)
        outside = flat[(flat < -self.rows) | (flat >= self.rows)]
        if outside.size:
            raise InputError(
                f"id {outside[0]} is looked up in table {show(self.name)}, which has {self.rows} rows",
                f"ids go from {-self.rows} to {self.rows - 1}",
            )
        return np.where(flat < 0, flat + self.rows, flat)

    def partition(self, ids: npt.ArrayLike) -> tuple[TableRequest, ...]:
        """Return the request to each server, one for each part in order, even if empty.

        Ids keep their order in a request, with repeats. Takes linear time."""
        flat = self.known(ids)
        if not self._by_rows:
            return tuple(TableRequest(server, np.arange(flat.size), flat) for server in self.servers)
        parts = self._parts(flat)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=len(self.servers)))
        chosen = np.split(order, ends[:-1])
        return tuple(
            TableRequest(server, positions, self._numbers(flat[positions], part))
            for part, (server, positions) in enumerate(zip(self.servers, chosen, strict=True))
        )

    @property
    def _by_rows(self) -> bool:
        return self.layout in (Layout.MODULO, Layout.RANGE)

    def _parts(self, flat: Ids) -> npt.NDArray[np.integer]:
        """Return the part of each row, in a type with linear sorting for few parts."""
        if self.layout is Layout.MODULO:
            parts = flat % len(self.servers)
        else:
            parts = np.searchsorted(np.asarray(self.cuts), flat, side="right") - 1
        return parts.astype(np.int16) if len(self.servers) < 1 << 15 else parts

    def _numbers(self, flat: Ids, part: int) -> Ids:
        if self.layout is Layout.MODULO:
            return flat // len(self.servers)
        return flat - self.cuts[part] if self.layout is Layout.RANGE else flat


def even_cuts(length: int, parts: int) -> tuple[int, ...]:
    """Return cuts of a length into parts that differ by one at most."""
    return tuple(part * length // parts for part in range(parts + 1))
