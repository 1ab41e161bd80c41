"""Tables whose updates run on rows that were pushed, for ``verify``: what the source's own step says of them.

The source updates all rows. Where that does nothing to a row without a gradient, both are the same. Elsewhere the
reference takes the source's update for rows whose numbers some batch has, and leaves all others, and what the optimizer
keeps for them, as they were.
"""

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
    """A table whose rows without a gradient would change in the source. ``ids``: values of the source with the numbers
    of rows that get a gradient; ``states``: tensors with the table's rows, the table first."""

    parameter: str
    rows: int
    ids: tuple[str, ...]
    states: tuple[str, ...]

    def touched(self, batches: Sequence[Values]) -> np.ndarray:
        """The rows whose numbers some of the batches have."""
        found = np.zeros(self.rows, bool)
        for values in batches:
            for name in self.ids:
                found[np.asarray(values[name], np.int64).reshape(-1)] = True  # a negative one counts from the end
        return found


def lazy_tables(training: TrainingGraph, plan: ServerPlanEntry | None) -> tuple[LazyTable, ...]:
    """The tables of a split that the source updates otherwise; raises InputError for one that the source does not
    have."""
    names = [] if plan is None else [each.parameter for each in plan.tables if each.update == Rows.LAZY.value]
    if not names:
        return ()
    known = {each.parameter: each for each in find_embeddings(training)}
    found = []
    for name in names:
        table = known.get(name)
        if table is None or table.update is None:
            raise InputError(
                f"{show(name)} is a table of the split, but not a parameter of the source",
                "verify the folder with the step that it was split from",
            )
        if not table.update.lazy_is_dense:
            ids = tuple(dict.fromkeys(term.ids for term in table.terms))
            found.append(LazyTable(name, table.rows, ids, table.update.states))
    return tuple(found)


def with_kept_rows(
    tables: Sequence[LazyTable], before: Values, new: Values, touched: Mapping[str, np.ndarray]
) -> Values:  # fmt: skip
    """Return the new states of the source with untouched rows of tables unchanged; ``touched``: by table."""
    found = dict(new)
    for table in tables:
        rows = touched[table.parameter]
        for name in table.states:
            kept = np.array(before[name])
            kept[rows] = new[name][rows]
            found[name] = kept
    return found
