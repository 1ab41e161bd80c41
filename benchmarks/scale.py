"""How ``gopt shard`` grows with nodes and ranks: ``python benchmarks/scale.py`` measures, and decides each target.

``--cases 5000x1024,100000x64,1000000x8``: nodes and ranks. Each case is a process of its own, measured from outside.
``--parts`` runs each case once more, in one process, and says where time and memory go. The floor, onnx-ir that loads
the graph and saves it once per rank, is measured for graphs of at most ``--floor-nodes``, where onnx-ir is installed.
The share of the floor is decided on wall seconds, for ``gopt shard`` uses several cores; where the machine is busy when
the benchmark begins, on CPU seconds, and the line says so. Other targets are decided on CPU seconds. All of it takes
about half an hour; the largest case needs 3 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shard import HERE, Usage, Verdict, build, idle_note, run_once

CASES = "5000x8,5000x1024,20000x8,100000x8,100000x64,1000000x8"
EXPONENT, PEAK, FLOOR, FURTHER = 1.05, 2500.0, 0.35, 0.010
"""The targets: growth exponent of CPU seconds from 20k to 1M nodes, MB at 1M nodes, share of the floor at 100k
nodes, and CPU seconds for each further rank at 5k nodes."""


@dataclass(frozen=True)
class Measured:
    """One case: nodes, ranks, wall and CPU seconds of the whole process, and its largest memory in MB.

    CPU seconds are those of its children too, memory is that of its largest process. ``floor_s``, ``floor_wall_s``: CPU
    and wall seconds in which onnx-ir loads the graph and saves it as often, None where that was not measured.
    ``parts``: records of ``parts.py``.
    """

    nodes: int
    ranks: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    floor_s: float | None = None
    floor_wall_s: float | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)


def parse_cases(text: str) -> list[tuple[int, int]]:
    """``5000x8,20000x8`` -> nodes and ranks, smallest graphs first."""
    try:
        cases = [(int(nodes), int(ranks)) for nodes, ranks in (each.split("x") for each in text.split(","))]
    except ValueError:
        raise SystemExit(f"--cases {text}: write NODESxRANKS,NODESxRANKS") from None
    return sorted(cases)


def measure(shape: str, cases: Iterable[tuple[int, int]], *, floor_nodes: int, parts: bool) -> list[Measured]:
    """Every case once; graphs are built once per size."""
    found, graphs = [], {}
    with tempfile.TemporaryDirectory(prefix="gopt-scale-") as name:
        folder = Path(name)
        for wanted, ranks in cases:
            model = folder / f"{wanted}.onnx"
            if wanted not in graphs:
                graphs[wanted] = build(shape, wanted, model)
            shard = [sys.executable, "-P", "-m", "gopt.cli", "shard", str(model), "--ranks", str(ranks)]
            output = folder / "written"
            used = run_once([*shard, "-o", str(output)])
            shutil.rmtree(output)  # the next case replaces nothing, which gopt would have to look at first
            floor = _floor(model, folder, ranks) if wanted <= floor_nodes else None
            detail = _parts(model, folder, ranks) if parts else []
            peak = used.peak * 1.048576
            floors = (None, None) if floor is None else (floor.cpu, floor.seconds)
            found.append(Measured(graphs[wanted], ranks, used.seconds, used.cpu, peak, *floors, detail))
    return found


def _floor(model: Path, folder: Path, ranks: int) -> Usage:
    return run_once([sys.executable, str(HERE / "floors.py"), "ir", str(model), str(folder / "ir"), str(ranks)])


def _parts(model: Path, folder: Path, ranks: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(HERE / "parts.py"), str(model), str(ranks), str(folder)]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def exponent(few: Measured, many: Measured) -> float:
    """``e`` in seconds ~ nodes ** e."""
    return math.log(many.cpu_s / few.cpu_s) / math.log(many.nodes / few.nodes)


def further_rank(few: Measured, many: Measured) -> float:
    """CPU seconds for each rank that one case has more than another of the same graph."""
    return (many.cpu_s - few.cpu_s) / (many.ranks - few.ranks)


def growth(cases: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """The smallest and the largest graph of each number of ranks that has several."""
    by_ranks: dict[int, list[Measured]] = {}
    for case in cases:
        by_ranks.setdefault(case.ranks, []).append(case)
    pairs = [sorted(group, key=lambda case: case.nodes) for group in by_ranks.values() if len(group) > 1]
    return [(group[0], group[-1]) for group in pairs]


def spread(cases: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """The fewest and the most ranks of each graph that has several."""
    by_nodes: dict[int, list[Measured]] = {}
    for case in cases:
        by_nodes.setdefault(case.nodes, []).append(case)
    pairs = [sorted(group, key=lambda case: case.ranks) for group in by_nodes.values() if len(group) > 1]
    return [(group[0], group[-1]) for group in pairs]


def over_floor(case: Measured, *, quiet: bool) -> Verdict | None:
    """The share of the floor, of wall seconds on a quiet machine; None where the floor was not measured."""
    if case.floor_s is None or case.floor_wall_s is None:
        return None
    value = case.wall_s / case.floor_wall_s if quiet else case.cpu_s / case.floor_s
    what = "wall time" if quiet else "CPU time, for the machine is busy,"
    return Verdict(f"{case.nodes} nodes, {case.ranks} ranks: {what} over the floor's", value, FLOOR)


def verdicts(cases: Sequence[Measured], *, quiet: bool) -> list[Verdict]:
    """The targets that these cases decide; a graph counts as one of n nodes if it has n within a tenth."""
    found = []
    for few, many in growth([case for case in cases if case.nodes > 18_000]):
        what = f"{few.nodes} to {many.nodes} nodes, {few.ranks} ranks: growth exponent"
        found.append(Verdict(what, exponent(few, many), EXPONENT))
    for few, many in spread(cases):
        if _about(few.nodes, 5_000):
            what = f"{few.nodes} nodes, {few.ranks} to {many.ranks} ranks: seconds for each further rank"
            found.append(Verdict(what, further_rank(few, many), FURTHER))
    for case in cases:
        if _about(case.nodes, 1_000_000) and case.ranks == 8:
            found.append(Verdict(f"{case.nodes} nodes, 8 ranks: peak MB", case.peak_mb, PEAK))
        share = over_floor(case, quiet=quiet)
        if share is not None and _about(case.nodes, 100_000) and case.ranks == 8:
            found.append(share)
    return found


def _about(nodes: int, wanted: int) -> bool:
    return abs(nodes - wanted) < wanted / 10


def show(cases: Sequence[Measured], decided: Sequence[Verdict], note: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "nodes", "ranks", "wall s", "CPU s", "peak MB", "floor wall s", "floor CPU s", title="gopt shard, whole process"
    )
    for case in cases:
        floors = ("" if each is None else f"{each:.1f}" for each in (case.floor_wall_s, case.floor_s))
        table.add_row(
            str(case.nodes), str(case.ranks), f"{case.wall_s:.1f}", f"{case.cpu_s:.1f}", f"{case.peak_mb:.0f}", *floors
        )
    console.print(table)
    for case in cases:
        if case.parts:
            detail = Table(
                "part", "CPU s", "MiB behind it", "peak MiB", title=f"{case.nodes} nodes, {case.ranks} ranks"
            )
            for each in case.parts:
                detail.add_row(*(str(value) for value in each.values()))
            console.print(detail)
    for few, many in spread(cases):
        line = f"{few.nodes} nodes: {1000 * further_rank(few, many):.1f} ms for each further rank"
        console.print(line, highlight=False)
    for verdict in decided:
        mark = "[green]holds[/]" if verdict.holds else "[red]fails[/]"
        console.print(f"{mark}  {verdict.what}: {verdict.value:.3g} (at most {verdict.limit:g})", highlight=False)
    if note:
        console.print(f"note: {note}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES, metavar="NODESxRANKS,…")
    parser.add_argument("--shape", default="mlp", choices=("mlp", "gpt"))
    parser.add_argument("--floor-nodes", type=int, default=100_000, help="largest graph for the floor; 0 for none")
    parser.add_argument("--parts", action="store_true", help="say where time and memory of each case go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    note = idle_note()
    wanted = parse_cases(options.cases)
    floor_nodes = options.floor_nodes
    if find_spec("onnx_ir") is None:
        print("no floor is measured: there is no onnx_ir (pip install -e '.[bench]')", file=sys.stderr)
        floor_nodes = 0
    cases = measure(options.shape, wanted, floor_nodes=floor_nodes, parts=options.parts)
    decided = verdicts(cases, quiet=not note)
    if options.json:
        record = {
            "shape": options.shape,
            "note": note,
            "cases": [asdict(case) for case in cases],
            "exponents": {str(few.ranks): exponent(few, many) for few, many in growth(cases)},
            "further_rank_s": {str(few.nodes): further_rank(few, many) for few, many in spread(cases)},
            "targets": [verdict.record() for verdict in decided],
        }
        print(json.dumps(record, indent=1))
    else:
        show(cases, decided, note)


if __name__ == "__main__":
    main()
