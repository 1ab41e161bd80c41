"""Where time and memory of ``gopt shard`` go: ``python benchmarks/parts.py MODEL RANKS FOLDER`` prints JSON.

A list of parts in order: loading, analysis, each pass, the graphs of the ranks, writing; with CPU seconds, MiB resident
behind the part, and the largest MiB resident during it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROC = Path("/proc/self")


def resident(text: str | None = None) -> tuple[float, float]:
    """MiB resident now, and at most since ``forget_peak``; ``text``: of a status file."""
    fields = dict(line.split(":", 1) for line in (text or (PROC / "status").read_text()).splitlines() if ":" in line)
    now, peak = (int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def forget_peak() -> None:
    (PROC / "clear_refs").write_text("5")


class Parts:
    """``done``: one record for each part."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        forget_peak()
        self._begin = time.process_time()

    def end(self, name: str) -> None:
        """What ran since the last call was the part ``name``."""
        now, peak = resident()
        seconds = time.process_time() - self._begin
        self.done.append({"part": name, "cpu_s": round(seconds, 3), "mib": round(now, 1), "peak_mib": round(peak, 1)})
        forget_peak()
        self._begin = time.process_time()


def measure(model: Path, ranks: int, folder: Path) -> list[dict[str, Any]]:
    from gopt import api
    from gopt.analysis.role_map import RoleMap
    from gopt.ir.load import load
    from gopt.ir.opaque.expand import expand
    from gopt.passes.pipeline import build_pipeline
    from gopt.system.garbage import gc_paused

    parts = Parts()
    parts.end("start")
    with gc_paused():
        graph = expand(load(model))
        parts.end("load")
        training = api.read_roles(graph, RoleMap())
        parts.end("analysis")
        source = api.Source(training, model.name, "", model.stat().st_size)
        pipeline = build_pipeline(after_each=lambda name, program: parts.end(f"pass {name}"))
        sharded = api.shard(source, ranks, pipeline=pipeline)
        parts.end("rank graphs and checks")
        sharded.write(folder / "ranks", force=True)
        parts.end("write")
    return parts.done


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
