"""Tables in a round in memory, for ``verify``: rows are read from the whole table, and merged for all servers at once.

The code is separate from the trainers and servers of ``gopt run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.artifact.server_entries import TableEntry
from gopt.collectives.layout import HALVES
from gopt.errors import RunError
from gopt.ir.types import numpy_dtype
from gopt.verification.compare import Values


@dataclass(frozen=True, slots=True)
class PushedRows:
    """Rows of a table pushed by a trainer, by row id, in any order and with repetitions."""

    ids: np.ndarray
    rows: np.ndarray
    weight: float


def _own(entry: TableEntry, index: int) -> tuple[slice, slice]:
    """The rows and columns of a part."""
    if entry.layout == "modulo":
        return slice(index, None, len(entry.servers)), slice(None)
    if entry.layout == "range":
        return slice(entry.cuts[index], entry.cuts[index + 1]), slice(None)
    return slice(None), slice(*entry.cuts[index : index + 2]) if entry.cuts else slice(None)


def read_rows(entry: TableEntry, states: Sequence[Values], ids: np.ndarray, dtype: str) -> np.ndarray:
    """Return rows of a table.

    ``states``: the feeds of each server. Raises RunError for a row id out of range.
    """
    whole = np.empty((entry.rows, entry.width), numpy_dtype(entry.dtype))
    for index, server in enumerate(entry.servers):
        part = whole[_own(entry, index)]
        part[...] = np.asarray(states[server][entry.inputs[index]]).reshape(part.shape)
    if ((ids < -entry.rows) | (ids >= entry.rows)).any():
        raise RunError(f"a row of table {entry.parameter} is pulled that it does not have")
    with np.errstate(over="ignore"):
        rows: np.ndarray = whole[ids].astype(numpy_dtype(dtype))
    return rows


def merge_pushes(
    entry: TableEntry, server: int, pushed: Mapping[int, PushedRows], reduce: str, dtype: str
) -> list[np.ndarray]:
    """Merge pushed rows on one server; returns the local row ids and gradients."""
    wide = np.dtype(np.float32) if dtype in HALVES else numpy_dtype(dtype)
    counted = {
        n: contribution for n, contribution in sorted(pushed.items()) if reduce != "weighted" or contribution.weight
    }
    touched = sorted({int(id) % entry.rows for contribution in counted.values() for id in contribution.ids})
    positions = {id: position for position, id in enumerate(touched)}
    total = np.zeros((len(touched), entry.width), wide)
    for contribution in counted.values():
        summed = np.zeros_like(total)
        rows = contribution.rows.reshape(-1, entry.width).astype(wide)
        np.add.at(summed, [positions[int(id) % entry.rows] for id in contribution.ids], rows)
        summed = summed.astype(contribution.rows.dtype).astype(wide)  # each trainer sends its sum
        total += summed * wide.type(contribution.weight) if reduce == "weighted" else summed
    if reduce == "mean":
        total /= wide.type(len(counted))
    elif reduce == "weighted":
        total /= wide.type(sum(contribution.weight for contribution in counted.values()) or 1.0)
    own_rows, columns = _own(entry, entry.servers.index(server))
    numbers = {int(id): local for local, id in enumerate(np.arange(entry.rows)[own_rows])}
    mine = [id for id in touched if id in numbers]
    values = total[[positions[id] for id in mine]][:, columns]
    return [np.array([numbers[id] for id in mine], np.int64), values.astype(numpy_dtype(dtype))]
