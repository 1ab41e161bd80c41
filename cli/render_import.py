"""Prints the result of ``gopt import``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .render import console, render_shards_it, render_step

if TYPE_CHECKING:
    from gopt.verbs.import_step import Imported


def render_imported(imported: Imported) -> None:
    """The file, and what a run feeds."""
    out = console()
    render_step(out, imported)
    if imported.missing:
        out.print(f"note: {len(imported.missing)} states have no value, {imported.missing[0]} first")
    states = imported.uninitialized
    if states:
        out.print(
            f"note: the source computes first values of {len(states)} states, {states[0]} first; the step has the "
            "stored ones. gopt shard of the source keeps the graph",
        )
    render_shards_it(out, imported)
