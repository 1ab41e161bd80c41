"""Tables with updates on pushed rows, for ``verify``: the effect of the source's own step on them.

The source updates all rows. Where the update leaves a row without a gradient unchanged, both are the same. Elsewhere
the reference takes the source's update for rows named in some batch, and leaves all others, and their optimizer states,
unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.analysis.embeddings import find_embeddings
from gopt.analysis.training import TrainingGraph
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.errors import InputError
from gopt.records.tables import Rows
from gopt.text.sanitize import show
from gopt.verification.compare import Values


@dataclass(frozen=True, slots=True)
class LazyTable:
    """A table with rows that would change without a gradient in the source. ``ids``: values of the source with the
    numbers of rows that get a gradient; ``states``: tensors with the table's rows, the table first."""

    parameter: str
    rows: int
    ids: tuple[str, ...]
    states: tuple[str, ...]

    def touched(self, batches: Sequence[Values]) -> np.ndarray:
        """The rows named by number in some of the batches."""
        rows = np.zeros(self.rows, bool)
        for values in batches:
            for name in self.ids:
                rows[np.asarray(values[name], np.int64).reshape(-1)] = True  # a negative one counts from the end
        return rows


def lazy_tables(training: TrainingGraph, plan: ServerPlanEntry | None) -> tuple[LazyTable, ...]:
    """The tables of a split with another update in the source; raises InputError for a table unknown to the source."""
    names = [] if plan is None else [table.parameter for table in plan.tables if table.update == Rows.LAZY.value]
    if not names:
        return ()
    embeddings = {embedding.parameter: embedding for embedding in find_embeddings(training)}
    tables = []
    for name in names:
        table = embeddings.get(name)
        if table is None or table.update is None:
            raise InputError(
                f"{show(name)} is a table of the split, but not a parameter of the source",
                "verify the folder with the step that it was split from",
            )
        if not table.update.lazy_is_dense:
            ids = tuple(dict.fromkeys(term.ids for term in table.terms))
            tables.append(LazyTable(name, table.rows, ids, table.update.states))
    return tuple(tables)


def with_kept_rows(
    tables: Sequence[LazyTable], before: Values, new: Values, touched: Mapping[str, np.ndarray]
) -> Values:  # fmt: skip
    """Return the new states of the source with untouched rows of tables unchanged; ``touched``: by table."""
    values = dict(new)
    for table in tables:
        rows = touched[table.parameter]
        for name in table.states:
            array = np.array(before[name])
            array[rows] = new[name][rows]
            values[name] = array
    return values
