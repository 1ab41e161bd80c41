"""Predicted and measured steps side by side: ``python benchmarks/plan.py`` prints the table of docs/plan.md.

Two processes (MPI) of one thread each. For every fixture a run of two micro-steps on ``shard=2``, a run on ``dp=2`` and
a run on two pipeline stages are traced and calibrate a device; then ``gopt plan`` predicts each other way to shard,
which runs too. A measured step is the lower quartile over the steps of a trace, from start to start on rank 0. The
whole takes two to three minutes. On a machine with other load the measured steps are longer than the program's: the
load is printed beside the table.

``--models mlp10,gpt10,mlp,gpt`` takes the steps of ``train.py``, of 10 to 150 milliseconds: half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import cases
import numpy as np

import gopt
from gopt.offline.device import DEVICES, DeviceFigures
from gopt.verbs.calibrate import calibrate
from gopt.verbs.plan import plan

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS = ("gpt_adamw", "mlp_adamw", "cnn_sgd")
Way: TypeAlias = tuple[str, int, int, str | None]
BASE: Sequence[Way] = (("shard=2", 2, 2, None), ("dp=2", 0, 1, None), ("pp=2", 0, 4, "gpipe"))
WAYS: Sequence[Way] = (
    *BASE, ("shard=2", 1, 1, None), ("shard=2", 2, 1, None), ("shard=2", 3, 1, None), ("tp=2", 0, 1, None),
    ("pp=2", 0, 4, "1f1b"), ("pp=2", 0, 8, "1f1b"),
)  # fmt: skip
"""Mesh, stage, micro-batches and schedule; those of ``BASE`` calibrate, one after the other: together they have all
kinds of calls, and none of them is a way to predict."""
STEPS, WARMUP = 60, 10


def run(model: Path, way: Way, data: Path, state: Path | None, folder: Path) -> tuple[Path, Path]:
    """The folder of a way, and the trace of a run of it; raises UnsupportedError where gopt refuses the way."""
    mesh, stage, count, schedule = way
    target, trace = folder / "ranks", folder / "trace.json"
    sharded = gopt.shard(model, mesh, stage=stage, accumulate=count, schedule=schedule, prove=False)
    sharded.write(target)
    command = [
        sys.executable, "-P", "-m", "gopt.cli", "run", str(target), "--data", str(data), "--steps", str(STEPS),
        "--launch", "2", "--trace", str(trace),
    ]  # fmt: skip
    if "lr" in gopt.load(model).training.graph.inputs:
        command += ["--set", "lr=1e-4"]
    if state is not None:
        command += ["--state", str(state)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return target, trace


def measured(trace: Path) -> float:
    """Seconds from the start of a step to the start of the next on rank 0, the lower quartile."""
    events = json.loads(trace.read_text())["traceEvents"]
    starts = sorted(event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 0 and event["tid"] == 0)
    begins = starts[:: len(starts) // STEPS][WARMUP:]
    return statistics.quantiles((b - a for a, b in pairwise(begins)), n=4)[0] / 1e6


def predicted(model: Path, way: Way, device: DeviceFigures) -> float:
    """Seconds of the row of ``gopt plan`` for a way."""
    mesh, stage, count, schedule = way
    rows = plan(str(model), mesh, device=device, micro_batches=count).choices
    for row in rows:
        settings, time = row.choice.settings, row.choice.time
        if (settings.stage, settings.partition, settings.bucket_mb, settings.accumulate, settings.schedule) == (
            stage, "flat", None, count, schedule,
        ) and time is not None:  # fmt: skip
            return time.seconds
    raise SystemExit(f"gopt plan has no row for {way}")


def batch(model: Path, target: Path) -> None:
    """Samples for several batches of a step."""
    training, generator = gopt.load(model).training, np.random.default_rng(0)
    values: dict[str, Any] = {}
    for name in training.batch:
        type = training.graph.types[name]
        shape = (64 * type.dims[0], *type.dims[1:])
        drawn = generator.integers(0, 2, shape) if type.dtype.startswith("int") else generator.standard_normal(shape)
        values[name] = np.asarray(drawn, type.dtype)
    np.savez(target, **values)


def table(models: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every model and way that gopt takes."""
    rows = []
    for name in models:
        model, state = FIXTURES / f"{name}.onnx", None
        with tempfile.TemporaryDirectory(prefix="gopt-plan-") as text:
            folder = Path(text)
            if name in (*cases.LARGE, *cases.SMALL):
                case = cases.prepare(name, cases.models()[name], folder / "step", ways=())
                model, state = case.model, case.state
            batch(model, folder / "batch.npz")
            device, traces = DEVICES["cpu"], []
            for number, way in enumerate(WAYS):
                (folder / str(number)).mkdir()
                try:
                    target, trace = run(model, way, folder / "batch.npz", state, folder / str(number))
                except gopt.UnsupportedError as error:
                    print(f"{name}, {way}: {error.message}", file=sys.stderr)
                    continue
                traces.append((way, measured(trace)))
                if way in BASE:
                    device = calibrate(target, trace, device=device)
            for way, seconds in traces:
                rows.append({"model": name, "way": way, "measured": seconds,
                             "predicted": predicted(model, way, device), "calibrates": way in BASE})  # fmt: skip
                print(rows[-1], file=sys.stderr)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| step | mesh, stage | measured ms | predicted ms | error |", "|---|---|---|---|---|"]
    errors = []
    for row in rows:
        mesh, stage, count, schedule = row["way"]
        error = row["predicted"] / row["measured"] - 1
        if not row["calibrates"]:
            errors.append(abs(error))
        more = f", {count} × {schedule}" if schedule else ""
        note = " (calibrates)" if row["calibrates"] else ""
        lines.append(
            f"| {row['model']} | {mesh}, {stage}{more}{note} | {1e3 * row['measured']:.2f} "
            f"| {1e3 * row['predicted']:.2f} | {error:+.0%} |"
        )
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    median, most = statistics.median(errors), max(errors)
    lines.append(f"\nmedian error {median:.1%}, largest {most:.0%}, {len(errors)} ways; load of the machine {load} on "
                 f"{os.cpu_count()} cores")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="fixtures or steps of train.py, with commas between")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    rows = table(args.models.split(","))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    print(show(rows))


if __name__ == "__main__":
    main()
