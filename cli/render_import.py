"""Prints the result of ``gopt import``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gopt.spmd.pass_records import format_bytes

from .render import console

if TYPE_CHECKING:
    from gopt.verbs.import_step import Imported


def render_imported(imported: Imported) -> None:
    """The file, and what a run feeds."""
    out = console()
    beside = f", values in {imported.data}" if imported.data else ""
    out.print(
        f"{imported.nodes} nodes, {imported.parameters} parameters, {imported.states} states, "
        f"{format_bytes(imported.nbytes)}"
    )
    out.print(f"inputs: {', '.join(imported.inputs)}")
    if imported.missing:
        out.print(f"note: {len(imported.missing)} states have no value, {imported.missing[0]} first")
    states = imported.uninitialized
    if states:
        out.print(
            f"note: the source computes first values of {len(states)} states, {states[0]} first; the step has the "
            "stored ones. gopt shard of the source keeps the graph",
        )
    out.print(
        f"written to {imported.model}{beside}; gopt shard {imported.model} --ranks 2 shards it",
    )  # fmt: skip
