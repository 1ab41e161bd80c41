"""Training steps side by side: ``python benchmarks/train.py --torch PYTHON --json FILE``.

An MLP of 8 layers of 2048 and a GPT of 4 blocks of 256, AdamW in float32, one thread a process: gopt with one rank and
with two under MPI, the whole step as one onnxruntime session, and, where ``--torch`` names an interpreter with PyTorch,
one process and two (gloo) of it. Two steps of about ten milliseconds show what the executor costs. All take turns in
every round, so that a disturbance of the machine meets all of them. How to read it: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import runs
import spans
from cases import LARGE, WAYS, Case, models, prepare
from counters import WARMUP, quiet_rate
from rich.console import Console
from rich.table import Table
from targets import NAMES, STAGES, Verdict, decide

WIRE_STEPS = 5
MIB = 1 << 20
Ways: TypeAlias = dict[str, Callable[[], runs.Run]]
"""Name of a contestant -> one run of it."""


def contestants(case: Case, steps: int, torch: str | None) -> Ways:
    """The contestants for a step."""
    small = case.name not in LARGE
    ways: Ways = {
        "session": partial(runs.session, case, steps),
        "gopt1": partial(runs.gopt, case, 1, 2, steps, threads=small),
        "gopt2.2": partial(runs.gopt, case, 2, 2, steps),
        "gopt2.3": partial(runs.gopt, case, 2, 3, steps),
    }
    if not small:
        ways["gopt1x2"] = partial(runs.gopt, case, 1, 2, steps, copies=2)
        for mode in ("single", "ddp", "zero1", "fsdp2", "single+compile", "ddp+compile", "fsdp2+compile"):
            if torch:
                ways[mode] = partial(runs.torch, torch, case, mode, steps)
        for ranks, stage in WAYS if torch and runs.has_gopt(torch) else ():
            for compiled in (False, True):
                name = f"torch{ranks}.{stage}" + "c" * compiled
                ways[name] = partial(runs.gopt_torch, torch, case, ranks, stage, steps, compiled=compiled)
        ways["pass1"] = partial(runs.memory, case.parameters, 1)
        ways["pass2"] = partial(runs.memory, case.parameters // 2, 2)
    return {name: ways[name] for name in NAMES if name in ways}


def measure(
    case: Case, rounds: int, ways: Ways, imports: int, end: float, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """A row of every contestant that ran. Bytes of gopt are counted apart, over TCP. ``say`` gets a line for each run;
    no run starts after ``end`` (``time.monotonic``)."""
    found: dict[str, list[runs.Run]] = {}
    for turn, (name, way) in product(range(rounds), ways.items()):
        if (begin := time.monotonic()) > end:
            say(f"{case.name}: out of time in round {turn + 1}, before {NAMES[name]}")
            break
        made = way() | {"took": time.monotonic() - begin}
        found.setdefault(name, []).append(made)
        middle = 1000 * statistics.median(made["seconds"])
        say(f"{case.name} {turn + 1}/{rounds}: {NAMES[name]}: {middle:.1f} ms a step, in {made['took']:.0f} s")
    rows = {name: row(made, imports if name.startswith("gopt") else None) for name, made in found.items()}
    bound = case.figures(2, 2)["traffic"]["bound"]
    for name in rows.keys() & {"pass1", "pass2"}:
        size = 28 * (case.parameters if name == "pass1" else case.parameters // 2)
        rows[name] |= {"ns": 1e6 * rows[name]["ms"] / size, "min_ns": 1e6 * rows[name]["min_ms"] / size}
    for name, stage in ((name, stage) for name, stage in zip(STAGES, (2, 3)) if name in rows):
        over_tcp = runs.gopt(case, 2, stage, WIRE_STEPS, wire=True)["sent"]
        handed, planned = rows[name]["handed"], case.figures(2, stage)["traffic"]["ratio"]
        # Where MPI knows no such way around shared memory, loopback saw nothing but the launcher.
        seen = over_tcp > handed / 2
        rows[name] |= {"sent": over_tcp if seen else handed, "measured": seen, "planned_ratio": planned}
    for each in rows.values():
        if each.get("sent"):
            each["of_bound"] = each["sent"] / bound
    return rows


def row(made: list[runs.Run], imports: int | None) -> dict[str, Any]:
    """Some runs of one contestant as one row: the median of their medians, the best step, the largest peak."""
    medians = [1000 * statistics.median(run["seconds"]) for run in made]
    found: dict[str, Any] = {
        "ms": statistics.median(medians), "min_ms": 1000 * min(min(run["seconds"]) for run in made), "rounds": medians,
        "took_s": sum(run["took"] for run in made),
    }  # fmt: skip
    if "peak" in made[0]:
        taken = imports if imports is not None else made[0]["imports"]
        found |= {"peak": max(max(run["peak"]) for run in made), "imports": taken}
    for key in ("sent", "calls", "handed"):
        if key in made[0]:
            found[key] = statistics.median(run[key] for run in made)
    if "shares" in made[0]:
        parts = [spans.middle(run["shares"]) for run in made]
        found["shares"] = {key: statistics.median(part[key] for part in parts) for key in parts[0]}
    return found


def show(console: Console, name: str, rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"{name}: a step, each process one thread")
    for title in ("", "median ms", "best ms", "MB sent", "× bound", "calls", "peak MiB", "above imports"):
        table.add_column(title, justify="right" if title else "left")
    for way, each in rows.items():
        cells = [f"{each['ms']:.1f}", f"{each['min_ms']:.1f}", "", "", "", "", ""]
        if each.get("sent"):
            cells[2:5] = f"{each['sent'] / 1e6:.1f}", f"{each['of_bound']:.3f}", f"{each['calls']:.0f}"
        if "peak" in each:
            cells[5:] = f"{each['peak'] / MIB:.0f}", f"{(each['peak'] - each['imports']) / MIB:.0f}"
        table.add_row(NAMES[way], *cells)
    console.print(table)
    if not all(rows[way]["measured"] for way in STAGES if way in rows):
        console.print("MB sent: of gopt counted on a ring, for its MPI would not leave shared memory", highlight=False)
    table = Table(title=f"{name}: where the time of a rank goes, ms")
    columns = ("wall", "compute", "update", "exposed", "overhead", "loop", "calls")
    titles = ("step", "compute", "of it update", "calls exposed", "overhead", "of it between segments", "calls in all")
    for title in ("", *titles, "update, ns a byte"):
        table.add_column(title, justify="right" if title else "left")
    for way, each in rows.items():
        if shares := each.get("shares"):
            update = f"{shares['update_ns']:.3f}" if shares["update_bytes"] else ""
            table.add_row(NAMES[way], *(f"{shares[key]:.2f}" for key in columns), update)
        elif "ns" in each:
            table.add_row(NAMES[way], *[""] * len(columns), f"{each['ns']:.3f}")
    console.print(table)


def show_targets(console: Console, verdicts: list[Verdict]) -> None:
    table = Table(title="targets")
    for title in ("", "target", "median", "best", "at most", "where it goes"):
        table.add_column(title, justify="right" if title in ("median", "best", "at most") else "left")
    for each in verdicts:
        best = "" if each.best is None else f"{each.best:.2f}"
        mark = "[green]met[/]" if each.met else "[red]missed[/]"
        table.add_row(mark, each.what, f"{each.value:.3f}", best, f"{each.limit:g}", each.note)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help=f"that count, behind {WARMUP} that do not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has PyTorch")
    parser.add_argument("--model", action="append", choices=models(), help="only this one; may be repeated")
    parser.add_argument("--way", action="append", choices=NAMES, help="only this contestant; may be repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run starts after that many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    given = parser.parse_args()
    console, start = Console(width=None if os.isatty(1) else 150), time.monotonic()
    record: dict[str, Any] = {
        "rounds": given.rounds, "steps": given.steps, "warmup": WARMUP, "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "loopback_quiet_bytes_per_s": quiet_rate(), "models": {},
    }  # fmt: skip
    verdicts: list[Verdict] = []
    chosen = {name: model for name, model in models().items() if name in (given.model or models())}
    imports = runs.imports()
    with tempfile.TemporaryDirectory(prefix="gopt-bench-") as text:
        for number, (name, model) in enumerate(chosen.items(), 1):
            case = prepare(name, model, Path(text, name))
            ways = contestants(case, given.steps if name in LARGE else 4 * given.steps, given.torch)
            ways = {way: run for way, run in ways.items() if way in (given.way or NAMES)}
            end = start + 60 * given.minutes * number / len(chosen)
            rows = measure(case, given.rounds, ways, imports, end, lambda line: console.print(line, highlight=False))
            record["models"][name] = rows
            show(console, name, rows)
            verdicts += decide(name, rows)
    show_targets(console, verdicts)
    record |= {"targets": [each.to_json() for each in verdicts], "minutes": (time.monotonic() - start) / 60}
    console.print(
        f"{given.rounds} rounds of {given.steps} steps in {record['minutes']:.1f} min; load at the start "
        f"{record['load']:.2f} on {record['cores']} cores; loopback carried "
        f"{record['loopback_quiet_bytes_per_s'] / 1e6:.2f} MB/s while nothing ran",
        highlight=False,
    )  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
