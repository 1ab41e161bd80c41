"""Rows of tables between trainers and servers, after the manifest alone. Nothing of gopt is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rank_files import Array, Values

from split_gen.merging import Fault, merged


def places(piece: Mapping[str, Any], shape: Sequence[int]) -> Array:
    """The elements of a flattened tensor that a piece is of, in its order."""
    every = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    for axis, (start, stop) in enumerate(piece.get("box") or ()):
        every = np.take(every, range(start, stop), axis)
    if piece.get("every"):
        first, step = piece["every"]
        every = every[first::step]
    return every.reshape(-1)[piece["start"] : piece["stop"]]


def dealt(piece: Mapping[str, Any]) -> bool:
    """Whether a piece is of a part of a table that is not a run of elements."""
    return bool(piece.get("box") or piece.get("every"))


def joined(name: str, shape: Sequence[int], found: Sequence[tuple[Mapping[str, Any], Array]]) -> Array:
    """A tensor from parts of a table. Faults where they leave or repeat an element."""
    whole = np.zeros(int(np.prod(shape, dtype=int)), found[0][1].dtype)
    seen = np.zeros(whole.size, int)
    for piece, part in found:
        whole[places(piece, shape)] = part
        seen[places(piece, shape)] += 1
    if (seen != 1).any():
        raise Fault(f"parts of {name} leave or repeat element {int(np.argmax(seen != 1))}")
    return whole.reshape(shape)


class TableRows:
    """What trainers pushed of each table in a round; ``touched``: table -> the rows that some trainer pushed."""

    def __init__(self, entries: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]]) -> None:
        self.entries, self.servers = entries, servers
        self.pushed: dict[int, dict[int, tuple[float, Array, Array]]] = {}
        self.touched: dict[str, set[int]] = {}

    def pull(self, about: Mapping[str, Any], whole: Values, ids: Array, dtype: np.dtype[Any]) -> list[Array]:
        """Rows of a table as they are before the round."""
        entry = self.entries[about["table"]]
        with np.errstate(all="ignore"):
            rows = whole[entry["parameter"]].reshape(entry["rows"], entry["width"])[ids].astype(dtype)
        return [rows if about["width"] else rows.reshape(-1)]

    def push(self, about: Mapping[str, Any], trainer: int, weight: float, ids: Array, rows: Array) -> None:
        slot = self.pushed.setdefault(about["table"], {})
        if trainer in slot:
            raise Fault(f"trainer {trainer} pushes table {about['table']} twice")
        entry = self.entries[about["table"]]
        total = np.zeros((entry["rows"], entry["width"]), np.float64 if rows.dtype == np.float64 else np.float32)
        np.add.at(total, ids, rows.reshape(ids.size, entry["width"]).astype(total.dtype))
        slot[trainer] = weight, ids % entry["rows"], total.astype(rows.dtype)

    def merge(self, about: Mapping[str, Any], server: int, trainers: int, dtype: np.dtype[Any]) -> list[Array]:
        """The local numbers of the rows that were pushed, in their order, and their gradients."""
        entry, slot = self.entries[about["table"]], self.pushed.get(about["table"], {})
        if sorted(slot) != list(range(trainers)):
            raise Fault(f"table {about['table']} is merged of trainers {sorted(slot)}")
        weighed = about["reduce"] == "weighted"
        counted = [slot[each] for each in sorted(slot) if slot[each][0] or not weighed]
        rows = sorted({int(id) for _, ids, _ in counted for id in ids})
        self.touched[entry["parameter"]] = set(rows)
        shape = (entry["rows"], entry["width"])
        terms = [(weight, total) for weight, _, total in (slot[each] for each in sorted(slot))]
        whole = merged(terms, about["reduce"], dtype)
        part = next(each for each in self.servers[server]["state"] if each["input"] == self._input(entry, server))
        (piece,) = part["pieces"]
        grid = places(piece, shape).reshape(-1, about["width"] or 1)
        owned = {int(first) // entry["width"]: local for local, first in enumerate(grid[:, 0])}
        local = [owned[row] for row in rows if row in owned]
        found = whole.reshape(-1)[grid[local]].reshape((len(local), about["width"]) if about["width"] else -1)
        return [np.array(local, np.int64), found]

    @staticmethod
    def _input(entry: Mapping[str, Any], server: int) -> str:
        return str(entry["inputs"][entry["servers"].index(server)])


def kept_rows(entries: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Table whose updates run on pushed rows alone -> the tensors with its rows."""
    found = {}
    for entry in entries:
        if entry.get("update") == "lazy":
            sizes = {each["tensor"]: each["shape"] for each in states}
            name = entry["parameter"]
            own = [each["tensor"] for each in states if each.get("of") == name and each["shape"] == sizes[name]]
            found[name] = [name, *own]
    return found
