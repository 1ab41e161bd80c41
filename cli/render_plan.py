"""The choices of ``gopt plan`` as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gopt.artifact.report import format_bytes

from .render import Clean, console, describe, few, table

if TYPE_CHECKING:
    from gopt.offline.plan import Choice, RankedChoice, ShardSettings

WIDTH = 160
"""Columns where the output is no terminal: a line a choice."""
NARROW = 130
"""Below so many columns, reasons stand under the table, and some figures in --json alone."""
_HEAD = ("stage", "partition", "bucket")
_BYTES = ("parameters", "states", "live", "total")
_FIGURES = ("× minimum", "calls", "balance", "overlapped")
_WIDE_ONLY = frozenset({"parameters", "states", "live", "balance"})
_LEGEND = {
    "live": "most that a rank holds at once beside parameters and states: gradients, activations, gathered parameters",
    "× minimum": "bytes sent over the fewest possible",
    "calls": "of a rank in a step",
    "balance": "largest over mean rank",
    "overlapped": "share of the bytes sent that overlaps with computation",
    "time": "what calls add to a step; overlapped bytes do not count, latency always does",
}


def render_plan(mesh: str, memory: int | None, rows: Sequence[RankedChoice]) -> None:
    """What ``gopt plan`` shows: choices, best first, each with the reason for its place."""
    out = console()
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out = Clean(file=out.file, highlight=False, markup=False, width=WIDTH)
    wide = out.width >= NARROW
    shown = few(rows)
    columns = [*_HEAD, *_BYTES, *_FIGURES]
    columns = columns if wide else [name for name in columns if name not in _WIDE_ONLY]
    columns += ["time"] if any(row.choice.times is not None for row in rows) else []
    lines = [_line(row.choice, columns) for row in shown]
    title = f"Choices for {mesh}, best first; sizes are those of the rank that holds most"
    if wide:
        lines = [[*line, row.why] for line, row in zip(lines, shown)]
        out.print(table(title, [*columns, "why"], lines, range(2, len(columns))))
    else:
        lines = [[str(number), *line] for number, line in enumerate(lines, 1)]
        out.print(table(title, ["", *columns], lines, (0, *range(3, len(columns) + 1))))
        for number, row in enumerate(shown, 1):
            out.print(f"{number:2} {row.why}")
    if len(rows) > len(lines):
        out.print(f"… and {len(rows) - len(lines)} more in --json")
    out.print("; ".join(f"{name}: {text}" for name, text in _LEGEND.items() if name in columns))
    if rows and rows[0].fits:
        out.print(f"best: {_described(rows[0].choice.settings)} ({rows[0].why}); gopt shard --auto takes it")
    elif memory is not None:
        out.print(f"nothing fits in {format_bytes(memory)}: more ranks, or a smaller batch")


def _described(settings: ShardSettings) -> str:
    return describe(settings.stage, settings.partition, settings.bucket_mb)


def _line(choice: Choice, columns: Sequence[str]) -> list[str]:
    settings, costs = choice.settings, choice.costs
    cells = {
        "stage": str(settings.stage),
        "partition": settings.partition,
        "bucket": "default" if settings.bucket_mb is None else f"{settings.bucket_mb:g} MiB",
        "parameters": format_bytes(choice.parameters),
        "states": format_bytes(choice.optimizer_states),
        "live": format_bytes(choice.live.peak),
        "total": format_bytes(choice.held),
        "× minimum": f"{costs.traffic.ratio:.3f}",
        "calls": str(costs.calls.count),
        "balance": f"{choice.balance:.3f}",
        "overlapped": f"{costs.overlap.hidden_share:.0%}",
    }
    if choice.times is not None:
        cells["time"] = f"{choice.times.exposed * 1e3:.3f} ms"
    return [cells.get(name, "") for name in columns]
