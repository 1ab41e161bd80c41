"""Training steps on one GPU: ``python benchmarks/gpu.py --json FILE``, with gopt[nccl].

``gopt run --engine nccl`` with one rank, and the whole step as one session of onnxruntime's CUDA provider, in turns.
The models are those of ``train.py``. Both read the loss after every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import runs
from cases import models, prepare
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    given = parser.parse_args()
    table = Table(title="a step on one GPU, ms")
    for title in ("", "session", "best", "gopt", "best", "gopt / session"):
        table.add_column(title, justify="right" if title else "left")
    record: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="gopt-bench-") as text:
        for name, model in models().items():
            case = prepare(name, model, Path(text, name))
            found: dict[str, list[float]] = {"session": [], "gopt": []}
            for _ in range(given.rounds):
                found["session"] += runs.session(case, given.steps, "cuda")["seconds"]
                found["gopt"] += runs.gopt_on_gpu(case, given.steps)["seconds"]
            record[name] = found
            middle = {way: 1000 * statistics.median(seconds) for way, seconds in found.items()}
            best = {way: 1000 * min(seconds) for way, seconds in found.items()}
            cells = [f"{each[way]:.2f}" for way in found for each in (middle, best)]
            table.add_row(name, *cells, f"{middle['gopt'] / middle['session']:.2f}")
    Console(width=80).print(table)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
