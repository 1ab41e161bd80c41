"""The choices of ``gopt plan`` as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gopt.text.amounts import format_bytes, format_seconds

from .render import SafeConsole, console, few, print_left, table

if TYPE_CHECKING:
    from gopt.offline.plan import PlanChoice
    from gopt.offline.plan_ranking import RankedChoice

WIDTH = 160
"""Columns where the output is not a terminal: a line a choice."""
NARROW = 130
"""Below so many columns, reasons stand under the table, and some figures in --json alone."""
_HEAD = ("stage", "partition", "bucket")
_BYTES = ("parameters", "states", "live", "total")
_FIGURES = ("× minimum", "calls", "balance", "overlapped")
_TIMED = ("compute", "recompute", "exposed", "bubble", "step")
"""The figures of steps that are timed on a device."""
_MESHES = ("sent/batch", "calls", "balance", "overlapped")
"""The figures of rows of several meshes: their steps see other numbers of batches, and have no minimum in common."""
_WIDE_ONLY = frozenset({"parameters", "states", "live", "balance"})
_WIDEST_ONLY = frozenset({"partition", "bucket", "overlapped"})
"""Beside meshes, these have no place in a narrow table."""
_LEGEND = {
    "live": "most that a rank holds at once besides parameters and states: gradients, activations, gathered parameters",
    "× minimum": "bytes sent, divided by the fewest possible",
    "calls": "calls that a rank makes in a step",
    "balance": "the largest rank divided by the mean",
    "overlapped": "share of the bytes sent that overlaps with computation",
    "time": "what calls add to a step; overlapped bytes do not count, latency always does",
    "compute": "time of a step's operators on the device, by their operations, bytes and starts",
    "recompute": "time of operators that run a second time in the backward",
    "again": "the policy of --recompute",
    "host": "what is in the memory of the host (--offload)",
    "sequence": "ranks along tp divide the tokens between products (-O tensor-parallel.sequence=true)",
    "bubble": "time in which stages wait for one another",
    "micro-batches": "batches that a rank computes one by one in a step, and their order on stages (--schedule)",
    "exposed": "time of calls during which a rank does not compute",
    "step": "the time of a step: its parts, and what else the device takes",
    "step/batch": "the time of a step for each batch: the ranks of a step compute several",
    "mesh": "ranks along shard have batches of their own and share states; along other axes they compute one together",
    "sent/batch": "bytes that a rank sends for each batch: the ranks of a step compute several batches",
    "time/batch": "what calls add for each batch; overlapped bytes do not count, latency always does",
}


def render_plan(
    mesh: str,
    memory: int | None,
    rows: Sequence[RankedChoice],
    remarks: Mapping[str, str] | None = None,
    device: str = "",
    *,
    every_column: bool = False,
) -> None:
    """Print the choices of ``gopt plan``, best first, each with the reason for its rank."""
    out = console()
    if not out.fits or (every_column and out.width < WIDTH):
        out = SafeConsole(file=out.file, width=WIDTH, fits=out.fits)
    wide = out.width >= NARROW
    shown = few(rows) if mesh else _best_of_each(rows)
    columns = _columns(mesh, wide, rows)
    joined = _join([(_line(row.choice, columns), row.why) for row in shown], columns)
    lines, reasons = [line for line, _ in joined], [why for _, why in joined]
    title = f"Choices for {mesh}, best first; sizes of the rank that holds most"
    if not mesh:
        title = f"Meshes of {rows[0].choice.mesh.ranks} ranks and stages, best first; sizes of the rank that holds most"
    texts = ("mesh", "partition", "micro-batches", "again", "sequence", *(("stage",) if columns[0] == "stage" else ()))
    right = [index for index, name in enumerate(columns) if name not in texts]
    if wide and mesh:
        lines = [[*line, why] for line, why in joined]
        out.print(table(title, [*columns, "why"], lines, right))
    else:
        lines = [[str(number), *line] for number, line in enumerate(lines, 1)]
        out.print(table(title, ["", *columns], lines, (0, *(index + 1 for index in right))))
        for numbers, why in _reasons(reasons):
            out.print(f"{numbers:>3} {why}")
    print_left(out, len(rows) - len(shown))
    for name, text in _LEGEND.items():
        if name in columns:
            out.print(f"{name}: {text}")
    if not wide:
        out.print("more columns: --wide")
    for remark, text in (remarks or {}).items():
        out.print(f"{remark}: {text}")
    if rows and rows[0].fits:
        choice = rows[0].choice
        grid = "" if mesh else f"{choice.mesh}, "
        taken = f"gopt shard --mesh {choice.mesh} --auto{device}"
        out.print(f"best: {grid}{choice.settings} ({rows[0].why}); {taken} takes it")
    elif memory is not None:
        out.print(f"nothing fits in {format_bytes(memory)}: more ranks, or a smaller batch")


def _join(rows: Sequence[tuple[list[str], str]], columns: Sequence[str]) -> list[tuple[list[str], str]]:
    """Merge neighbouring rows differing in a single setting into a row with all values."""
    joined: list[tuple[list[str], str]] = []
    at = -1  # the column in which the rows of the last one differ
    for line, why in rows:
        last = joined[-1] if joined else None
        if last is not None and last[1] == why:
            apart = [index for index, (old, new) in enumerate(zip(last[0], line)) if old != new]
            if len(apart) == 1 and columns[apart[0]] in _HEAD and at in (-1, apart[0]):
                at = apart[0]
                last[0][at] += f",{line[at]}"
                continue
        joined.append((list(line), why))
        at = -1
    return joined


def _reasons(reasons: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Numbers of neighbouring rows with the same reason, and the reason."""
    last = 0
    for why, group in groupby(reasons):
        start, last = last + 1, last + len(list(group))
        yield (f"{start}" if start == last else f"{start}-{last}"), why


def _columns(mesh: str, wide: bool, rows: Sequence[RankedChoice]) -> list[str]:
    per, timed = "" if mesh else "/batch", [row.choice for row in rows if row.choice.time is not None]
    divided = ("sequence",) if any(row.choice.settings.sequence for row in rows) else ()
    head = [*(() if mesh else ("mesh",)), *_HEAD, *divided]
    if timed:
        absent = {"partition"}
        if all(choice.settings.accumulate == 1 for choice in timed):
            absent |= {"bubble", "micro-batches"}
        if not any(choice.settings.recompute for choice in timed):
            absent |= {"recompute", "again"}
        if not any(choice.settings.offload for choice in timed):
            absent |= {"host"}
        if not wide:
            absent |= _WIDE_ONLY | {"bucket", "recompute"} | (set() if mesh else {"compute", "exposed", "bubble"})
        head = [*head, "micro-batches", "again", "host"]
        return [name for name in (*head, *_BYTES, *_TIMED[:-1], f"step{per}") if name not in absent]
    figures = [*(_FIGURES if mesh else _MESHES), *([f"time{per}"] if any(row.choice.times for row in rows) else [])]
    columns = [*head, *_BYTES, *figures]
    dropped = _WIDE_ONLY if mesh else _WIDE_ONLY | _WIDEST_ONLY
    return columns if wide else [name for name in columns if name not in dropped]


def _best_of_each(rows: Sequence[RankedChoice]) -> list[RankedChoice]:
    """The first row of every stage of every mesh."""
    best: dict[tuple[str, int], RankedChoice] = {}
    for row in rows:
        best.setdefault((str(row.choice.mesh), row.choice.settings.stage), row)
    return list(best.values())


def _line(choice: PlanChoice, columns: Sequence[str]) -> list[str]:
    settings, costs = choice.settings, choice.costs
    cells = {
        "mesh": str(choice.mesh),
        "sent/batch": format_bytes(round(choice.sent)),
        "stage": str(settings.stage),
        "partition": settings.partition,
        "sequence": "yes" if settings.sequence else "",
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
        cells["time/batch"] = f"{choice.times.exposed / choice.batches * 1e3:.3f} ms"
    if choice.time is not None:
        cells |= {name: format_seconds(getattr(choice.time, name)) for name in _TIMED[:-1]}
        cells["micro-batches"] = " × ".join(filter(None, (str(settings.accumulate), settings.schedule)))
        cells |= {"again": settings.recompute or "", "host": settings.offload or ""}
        cells |= {
            "step": format_seconds(choice.time.seconds),
            "step/batch": format_seconds(choice.time.seconds / choice.batches),
        }
    return [cells.get(name, "") for name in columns]
