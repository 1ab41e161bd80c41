"""The choices of ``gopt plan`` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gopt.report import size

from .render import Clean, console, describe, few, table

WIDTH = 160
"""Columns where the output is no terminal: a line a choice."""


def render_plan(mesh: str, memory: int | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """What ``gopt plan`` shows: choices, best first, each with the reason for its place."""
    out = console()
    if not out.is_terminal:
        out = Clean(file=out.file, highlight=False, markup=False, width=WIDTH)
    timed = any("seconds" in row for row in rows)
    columns = [
        "stage",
        "partition",
        "bucket",
        "parameters",
        "states",
        "live",
        "total",
        "× bound",
        "calls",
        "balance",
        "hidden",
    ]
    columns += ["time", "why"] if timed else ["why"]
    lines = [_line(row, timed) for row in few(rows)]
    title = f"Choices for {mesh}, best first; sizes are those of the rank that holds most"
    out.print(table(title, columns, lines, range(2, len(columns) - 1)))
    if len(rows) > len(lines):
        out.print(f"… and {len(rows) - len(lines)} more in --json")
    out.print(
        "live: most that a rank holds at once beside them: gradients, activations, gathered parameters; × bound: bytes "
        "sent over the fewest possible; calls: of a rank in a step; balance: largest over mean rank; hidden: share of "
        "the bytes sent that computation can hide",
        soft_wrap=True,
    )
    if timed:
        out.print("time: what calls add to a step; bytes that computation hides do not count, latency always does")
    if rows and rows[0]["fits"]:
        out.print(f"best: {describe(rows[0])} ({rows[0]['why']}); gopt shard --auto takes it", soft_wrap=True)
    elif memory is not None:
        out.print(f"nothing fits in {size(memory)}: more ranks, or a smaller batch")


def _line(row: Mapping[str, Any], timed: bool) -> list[str]:
    held, cap = row["bytes"], row["bucket_mb"]
    line = [
        str(row["stage"]),
        row["partition"],
        "default" if cap is None else f"{cap:g} MiB",
        *(size(held[kind]) for kind in ("parameters", "optimizer_states", "live", "total")),
        f"{row['traffic']['ratio']:.3f}",
        str(row["calls"]["count"]),
        f"{row['balance']:.3f}",
        f"{row['hidden_share']:.0%}",
    ]
    return [*line, *([f"{row['seconds']['exposed'] * 1e3:.3f} ms"] if timed else []), row["why"]]
