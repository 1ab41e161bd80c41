"""The choices of ``gopt plan`` as a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gopt.artifact.report import format_bytes

from .render import Clean, console, describe, few, table

WIDTH = 160
"""Columns where the output is no terminal: a line a choice."""
NARROW = 130
"""Below so many columns, reasons stand under the table, and some figures in --json alone."""
_HEAD = ("stage", "partition", "bucket")
_BYTES = ("parameters", "states", "live", "total")
_FIGURES = ("× bound", "calls", "balance", "hidden")
_WIDE_ONLY = frozenset({"parameters", "states", "live", "balance"})
_LEGEND = {
    "live": "most that a rank holds at once beside parameters and states: gradients, activations, gathered parameters",
    "× bound": "bytes sent over the fewest possible",
    "calls": "of a rank in a step",
    "balance": "largest over mean rank",
    "hidden": "share of the bytes sent that computation can hide",
    "time": "what calls add to a step; bytes that computation hides do not count, latency always does",
}


def render_plan(mesh: str, memory: int | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """What ``gopt plan`` shows: choices, best first, each with the reason for its place."""
    out = console()
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out = Clean(file=out.file, highlight=False, markup=False, width=WIDTH)
    wide = out.width >= NARROW
    shown = few(rows)
    columns = [*_HEAD, *_BYTES, *_FIGURES]
    columns = columns if wide else [name for name in columns if name not in _WIDE_ONLY]
    columns += ["time"] if any("seconds" in row for row in rows) else []
    lines = [_line(row, columns) for row in shown]
    title = f"Choices for {mesh}, best first; sizes are those of the rank that holds most"
    if wide:
        lines = [[*line, row["why"]] for line, row in zip(lines, shown)]
        out.print(table(title, [*columns, "why"], lines, range(2, len(columns))))
    else:
        lines = [[str(number), *line] for number, line in enumerate(lines, 1)]
        out.print(table(title, ["", *columns], lines, (0, *range(3, len(columns) + 1))))
        for number, row in enumerate(shown, 1):
            out.print(f"{number:2} {row['why']}")
    if len(rows) > len(lines):
        out.print(f"… and {len(rows) - len(lines)} more in --json")
    out.print("; ".join(f"{name}: {text}" for name, text in _LEGEND.items() if name in columns))
    if rows and rows[0]["fits"]:
        out.print(f"best: {describe(rows[0])} ({rows[0]['why']}); gopt shard --auto takes it")
    elif memory is not None:
        out.print(f"nothing fits in {format_bytes(memory)}: more ranks, or a smaller batch")


def _line(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    held, cap = row["bytes"], row["bucket_mb"]
    cells = {
        "stage": str(row["stage"]),
        "partition": row["partition"],
        "bucket": "default" if cap is None else f"{cap:g} MiB",
        "parameters": format_bytes(held["parameters"]),
        "states": format_bytes(held["optimizer_states"]),
        "live": format_bytes(held["live"]),
        "total": format_bytes(held["total"]),
        "× bound": f"{row['traffic']['ratio']:.3f}",
        "calls": str(row["calls"]["count"]),
        "balance": f"{row['balance']:.3f}",
        "hidden": f"{row['hidden_share']:.0%}",
    }
    if "seconds" in row:
        cells["time"] = f"{row['seconds']['exposed'] * 1e3:.3f} ms"
    return [cells.get(name, "") for name in columns]
