"""What ``gopt run --audit`` costs: ``python benchmarks/audit.py [--only mlp10,gpt10] [--steps 60]``.

Two ranks at stage 0, which hold all states in common, as threads: the case in which most is compared. For each step a
line with the bytes of its states, the CPU time of a step of one rank, of an audit, and of a step with a checkpoint; and
from which number on audits take at most 1 % of the time, with ``--audit`` and by default, before each checkpoint.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cases import models
from onnx import ModelProto, load

import gopt
from gopt.runtime.training.audit import Audit

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SMALL = ("gpt_adamw", "mlp_adamw", "cnn_mom_fp16")
WARMUP, RANKS = 5, 2


def counted(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The same function, which also notes its CPU seconds."""

    def call(self: Any, *given: Any, **named: Any) -> Any:
        begin = time.thread_time()
        try:
            return work(self, *given, **named)
        finally:
            spent.append(time.thread_time() - begin)

    return call


def measure(name: str, model: ModelProto, steps: int, home: Path) -> str:
    """A row of the table."""
    path = home / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    draw = np.random.default_rng(0)
    training = gopt.load(path).training
    types = training.graph.types

    def drawn(each: str, rows: int) -> np.ndarray:
        dims = (rows * types[each].dims[0], *types[each].dims[1:]) if types[each].dims else ()
        whole = types[each].dtype == "int64"
        made = draw.integers(0, 8, dims) if whole else 0.02 * draw.standard_normal(dims)
        return np.asarray(made, types[each].dtype)

    stored = training.graph.initializers
    np.savez(home / "state.npz", **{each.tensor: drawn(each.tensor, 1) for each in training.states
                                    if each.tensor not in stored})  # fmt: skip
    gopt.shard(gopt.load(path, state=home / "state.npz"), RANKS, stage=0, prove=False).write(home / name)
    batch = {each: drawn(each, RANKS) for each in training.batch}
    settings = dict.fromkeys(training.hyper, 1e-3)

    def train(count: int, **given: Any) -> float:
        """CPU seconds of a step of one rank."""
        told: list[float] = []
        gopt.run(
            home / name, batch, count, settings=settings, on_step=lambda _: told.append(time.process_time()), **given
        )
        return (told[-1] - told[WARMUP]) / (len(told) - 1 - WARMUP) / RANKS

    spent: dict[str, list[float]] = {"digests": [], "check": []}
    plain = train(steps, audit=0)
    with (
        patch.object(Audit, "digests", counted(Audit.digests, spent["digests"])),
        patch.object(Audit, "check", counted(Audit.check, spent["check"])),
    ):
        train(steps, audit=1)
    audit = sum(map(statistics.median, spent.values()))
    kept = train(20, audit=0, checkpoint=home / "kept", every=1)
    nbytes = sum(types[each.tensor].nbytes for each in training.states)
    every = max(1, math.ceil((100 * audit - (kept - plain)) / plain))
    return (
        f"| {name} | {nbytes / 1e6:.3g} MB | {1e3 * plain:.2f} ms | {1e3 * audit:.3f} ms | "
        f"`--audit {math.ceil(100 * audit / plain)}` | {1e3 * kept:.1f} ms | `--every {every}` |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join((*SMALL, *models())))
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    print("| step | states | a step | an audit | 1 % with | a step and a checkpoint | 1 % by default with |")
    print("|---|---|---|---|---|---|---|")
    for name in given.only.split(","):
        model = load(FIXTURES / f"{name}.onnx") if name in SMALL else models()[name]
        with tempfile.TemporaryDirectory() as home:
            print(measure(name, model, given.steps, Path(home)), flush=True)


if __name__ == "__main__":
    main()
