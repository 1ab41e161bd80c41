"""Seconds of a round by the rows of a table, lazy and dense: ``python benchmarks/tables.py [--rows 10000,1000000]``.

One trainer and one server in threads train a step of ``fixtures/sparse`` with Adam, whose table is made from a seed. A
line of JSON for each number of rows and each kind: the median and the best of the rounds, and what the split and the
start took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from gopt import api
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import run_in_threads
from gopt.runtime.training.job import Job, Progress

BATCH, BAG, WIDTH = 64, 5, 16
ROOT = Path(__file__).resolve().parents[1]


def measure(rows: int, kind: str, steps: int, place: Path) -> dict[str, object]:
    """One run: a table of so many rows, and rounds whose updates are of a ``kind``."""
    sys.path.insert(0, str(ROOT / "fixtures" / "sparse"))
    from steps import dlrm

    onnx.save(dlrm((rows, 64), batch=BATCH, bag=BAG, width=WIDTH, rule="adam", stored=False), place / "step.onnx")
    random = np.random.default_rng(0)
    count = BATCH * steps
    np.savez(
        place / "data.npz", numbers=random.normal(size=(count, 4)).astype("f4"),
        ids=random.integers(0, rows, (count, 1)), bag=random.integers(0, 64, (count, BAG)),
        clicked=random.integers(0, 2, count).astype("f4"),
    )  # fmt: skip
    begun = time.perf_counter()
    options = SplitOptions(
        trainers=1, servers=1, tables={"table0": "whole", "*": "dense"}, rows={"table0": kind},
        init={"table0": "normal(0,0.02)@seed=7", "table0.*": "constant(0.01)"},
    )  # fmt: skip
    source = api.load(place / "step.onnx")
    values = {
        state.tensor: np.full(source.training.graph.types[state.tensor].dims, 0.01, np.float32)
        for state in source.training.states if not state.tensor.startswith("table0")
    }  # fmt: skip
    np.savez(place / "state.npz", **values)  # type: ignore[arg-type]
    api.split(source, options).write(place / "out", force=True)
    ready = time.perf_counter()
    told: list[Progress] = []
    started: list[float] = []
    job = Job(
        folder=place / "out", data=str(place / "data.npz"), steps=steps, settings={"lr": "0.01"},
        state=str(place / "state.npz"),
    )  # fmt: skip
    run_in_threads(ServerJob.read(job), told.append, lambda: started.append(time.perf_counter()), deadline=600)
    seconds = [each.seconds for each in told[2:]]
    return {
        "rows": rows, "kind": kind, "round_ms": round(1e3 * statistics.median(seconds), 3),
        "best_ms": round(1e3 * min(seconds), 3),
        "split_s": round(ready - begun, 3), "start_s": round(started[0] - ready, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="10000,1000000")
    parser.add_argument("--kinds", default="lazy,dense")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    for kind in given.kinds.split(","):
        for rows in given.rows.split(","):
            with tempfile.TemporaryDirectory() as place:
                print(json.dumps(measure(int(rows), kind, given.steps, Path(place))), flush=True)


if __name__ == "__main__":
    main()
