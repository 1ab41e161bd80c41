"""Time and peak memory of ``gopt shard``, whole process, beside two floors taken in the same run.

``python benchmarks/shard.py --nodes 1000,5000,20000,100000 --shape mlp,gpt --repeat 3``. The commands take turns, so
that a disturbance of the machine meets all of them: stage 2 and stage 3, then the floors. ``--bucket-mb 0`` makes the
most calls. The second floor needs onnx-ir: ``pip install -e '.[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from compileall import compile_dir
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
WAYS = {"gopt": "gopt shard", "stage3": "--stage 3", "raw": "floor: protobuf", "ir": "floor: onnx-ir"}
OURS = {"gopt": "stage 2", "stage3": "stage 3"}
TIME_RATIO, SECONDS, MEMORY_RATIO, EXPONENT = 1.5, 5.0, 3.0, 1.1
"""The targets: at most this many times the onnx-ir floor, this long, and this exponent from 5k to 100k nodes."""
IDLE = 0.25
"""Load per core above which a run is said to be disturbed."""


@dataclass
class Runs:
    """One command on one graph, some times over."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def peak(self) -> float:
        """MiB, the median."""
        return statistics.median(self.peaks)

    def record(self) -> dict[str, float]:
        return {
            "best_s": round(self.best, 3),
            "median_s": round(statistics.median(self.seconds), 3),
            "worst_s": round(max(self.seconds), 3),
            "peak_mib": round(self.peak, 1),
        }


@dataclass
class Case:
    """One graph and what was measured on it."""

    shape: str
    nodes: int
    runs: dict[str, Runs]

    def record(self) -> dict[str, Any]:
        return {"shape": self.shape, "nodes": self.nodes} | {way: runs.record() for way, runs in self.runs.items()}


@dataclass(frozen=True)
class Verdict:
    """One target and whether it holds."""

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    def record(self) -> dict[str, Any]:
        return {"what": self.what, "value": round(self.value, 3), "limit": self.limit, "holds": self.holds}


class Usage(NamedTuple):
    """What a process took: wall seconds, CPU seconds, and MiB resident at most."""

    seconds: float
    cpu: float
    peak: float


@cache
def compile_modules() -> None:
    """Write the bytecode of gopt, as pip does for every package but an editable one, and Python where it may write."""
    for package in ("gopt", "gopt.cli"):
        found = find_spec(package)
        assert found is not None and found.origin is not None, f"{package} is not installed"
        compile_dir(Path(found.origin).parent, quiet=1)


def run_once(command: list[str]) -> Usage:
    """What a command takes as a process of its own.

    A child's peak begins at its parent's: this process stays small, and graphs are built elsewhere.
    """
    compile_modules()
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read().decode()}")
    return Usage(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def measure(model: Path, folder: Path, ranks: int, repeat: int, cap: str | None) -> dict[str, Runs]:
    """Every command on one graph, ``repeat`` times in turn; ``cap`` of the buckets in MiB."""
    shard = [
        sys.executable, "-P", "-m", "gopt.cli", "shard", str(model), "--ranks", str(ranks), "-o", str(folder / "gopt"),
        "--force", *([] if cap is None else ["--bucket-mb", cap]),
    ]  # fmt: skip
    commands = {
        "gopt": shard,
        "stage3": [*shard, "--stage", "3"],
        "raw": [sys.executable, str(HERE / "floors.py"), "raw", str(model), str(folder / "raw"), str(ranks)],
        "ir": [sys.executable, str(HERE / "floors.py"), "ir", str(model), str(folder / "ir"), str(ranks)],
    }  # fmt: skip
    runs = {way: Runs() for way in commands}
    for _ in range(repeat):
        for way, command in commands.items():
            usage = run_once(command)
            runs[way].seconds.append(usage.seconds)
            runs[way].peaks.append(usage.peak)
    return runs


def build(shape: str, nodes: int, path: Path) -> int:
    """Write the graph; how many nodes it has."""
    command = [sys.executable, str(HERE / "graphs.py"), shape, str(nodes), str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def exponents(cases: list[Case], low: int = 5_000, high: int = 100_000) -> dict[str, dict[str, float]]:
    """Growth exponents by shape and command, between the graphs nearest to ``low`` and ``high`` nodes."""
    found: dict[str, dict[str, float]] = {}
    for shape in dict.fromkeys(case.shape for case in cases):
        mine = [case for case in cases if case.shape == shape]
        small, large = (min(mine, key=lambda case: abs(case.nodes - wanted)) for wanted in (low, high))
        if small.nodes < 1.5 * low and large.nodes > 0.7 * high:
            size = math.log(large.nodes / small.nodes)
            found[shape] = {way: math.log(large.runs[way].best / small.runs[way].best) / size for way in WAYS}
    return found


def verdicts(cases: list[Case], growth: dict[str, dict[str, float]]) -> list[Verdict]:
    """The targets that these cases can decide."""
    found = []
    for case in cases:
        floor = case.runs["ir"]
        for way, stage in OURS.items():
            gopt, where = case.runs[way], f"{case.shape}, {case.nodes} nodes, {stage}"
            if abs(case.nodes - 20_000) < 2_000:
                found.append(Verdict(f"{where}: time over the onnx-ir floor's", gopt.best / floor.best, TIME_RATIO))
                found.append(Verdict(f"{where}: seconds", gopt.best, SECONDS))
            memory = gopt.peak / floor.peak
            found.append(Verdict(f"{where}: peak memory over the onnx-ir floor's", memory, MEMORY_RATIO))
    for shape, by_way in growth.items():
        for way, stage in OURS.items():
            found.append(Verdict(f"{shape}, {stage}: growth exponent, 5k to 100k nodes", by_way[way], EXPONENT))
    return found


def idle_note() -> str:
    """What to hold against these numbers, '' when nothing."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the machine is busy: load {load:.2f} on {cores} cores" if load > IDLE * cores else ""


def show(cases: list[Case], growth: dict[str, dict[str, float]], decided: list[Verdict], note: str, ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"1 → {ranks} ranks, whole process: best (median) seconds, peak MiB")
    table.add_column("graph")
    table.add_column("nodes", justify="right")
    for title in WAYS.values():
        table.add_column(title, justify="right")
    for case in cases:
        cells = [
            f"{runs.best:.2f} ({statistics.median(runs.seconds):.2f}) s  {runs.peak:4.0f}"
            for runs in case.runs.values()
        ]
        table.add_row(case.shape, str(case.nodes), *cells)
    for shape, by_way in growth.items():
        table.add_row(shape, "exponent", *(f"{by_way[way]:.2f}" for way in WAYS))
    console.print(table)
    for verdict in decided:
        mark = "[green]holds[/]" if verdict.holds else "[red]fails[/]"
        console.print(f"{mark}  {verdict.what}: {verdict.value:.2f} (at most {verdict.limit:g})", highlight=False)
    if note:
        console.print(f"note: {note}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1000,5000,20000,100000")
    parser.add_argument("--shape", default="mlp,gpt")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bucket-mb", metavar="M", help="cap of a bucket; 0 is one tensor a call")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if find_spec("onnx_ir") is None:
        parser.error("there is no onnx_ir: pip install -e '.[bench]' in gopt's folder")
    note = idle_note()
    cases = []
    with tempfile.TemporaryDirectory(prefix="gopt-bench-") as name:
        folder = Path(name)
        for shape in given.shape.split(","):
            for wanted in map(int, given.nodes.split(",")):
                path = folder / f"{shape}_{wanted}.onnx"
                nodes = build(shape, wanted, path)
                cases.append(Case(shape, nodes, measure(path, folder, given.ranks, given.repeat, given.bucket_mb)))
    growth = exponents(cases)
    decided = verdicts(cases, growth)
    if given.json:
        record = {
            "ranks": given.ranks,
            "repeat": given.repeat,
            "note": note,
            "cases": [case.record() for case in cases],
            "exponents": growth,
            "targets": [verdict.record() for verdict in decided],
        }
        print(json.dumps(record, indent=1))
    else:
        show(cases, growth, decided, note, given.ranks)


if __name__ == "__main__":
    main()
