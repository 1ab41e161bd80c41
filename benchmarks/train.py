"""Step time of training side by side: ``python benchmarks/train.py``.

Two steps, AdamW in float32: an MLP of 8 layers of 2048, and a GPT of 4 blocks of 256. Beside one another: one rank and
two ranks of gopt under MPI, the whole step as one onnxruntime session, and, where ``--torch PYTHON`` has PyTorch, one
process and two processes (gloo) of it. One thread a process. Rounds are interleaved; the best median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphs
import numpy as np
from onnx import ModelProto

SIZE = graphs.Size(4, 128, 256, 1024, 8)
WAYS = {"1 rank": (1, 2), "2 ranks, stage 2": (2, 2), "2 ranks, stage 3": (2, 3)}


def models() -> dict[str, ModelProto]:
    return {"mlp": graphs.mlp(8, width=2048, batch=32), "gpt": graphs.gpt(4, size=SIZE)}


def prepare(name: str, model: ModelProto, folder: Path) -> None:
    """The step, values for its states, samples, and the ranks of every way."""
    import gopt

    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    source = gopt.load(path)
    types, generator = source.training.graph.types, np.random.default_rng(0)
    state = {}
    for each in source.training.states:
        type = types[each.tensor]
        dtype = np.dtype(type.dtype)
        drawn = generator.standard_normal(type.dims) * 0.02 + (each.tensor.endswith(("ln1.weight", "ln2.weight")))
        state[each.tensor] = (drawn if each.kind.value == "parameter" else np.zeros(type.dims)).astype(dtype)
    np.savez(folder / f"{name}_state.npz", **state)
    samples = {}
    for batch in source.training.batch:
        type = types[batch]
        shape = (type.dims[0] * 8, *type.dims[1:])
        whole = type.dtype == "int64"
        samples[batch] = generator.integers(0, 1000, shape) if whole else generator.standard_normal(shape).astype("f4")
    np.savez(folder / f"{name}_data.npz", **samples)
    for ranks, stage in WAYS.values():
        loaded = gopt.load(path, state=folder / f"{name}_state.npz")
        gopt.shard(loaded, ranks, stage=stage).write(folder / f"{name}.{ranks}.{stage}", force=True)


def run_gopt(name: str, ranks: int, stage: int, folder: Path, steps: int) -> dict[str, Any]:
    """Median milliseconds of a step of ``gopt run``, warm-up left out, and bytes and calls of the report."""
    target, log = folder / f"{name}.{ranks}.{stage}", folder / "log.jsonl"
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "gopt.cli", "run", str(target), "--data", str(folder / f"{name}_data.npz"),
        "--steps", str(steps), "--set", "lr=0.0001", "--launch", str(ranks), "--log", str(log),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = [json.loads(line)["seconds"] for line in log.read_text().splitlines()][5:]
    row = json.loads((target / "report.json").read_text())["ranks"][0]["communication"]
    return {
        "ms": 1000 * statistics.median(seconds), "sent": sum(each["bytes_sent"] for each in row),
        "calls": sum(each["calls"] for each in row),
    }  # fmt: skip


def run_session(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """The whole step as one session, as a user of onnxruntime would run it: states in and out, swapped each step."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
    feeds = {key: onnxruntime.OrtValue.ortvalue_from_numpy(value) for key, value in _feeds(name, folder).items()}
    import gopt

    pairs = {state.updated: state.tensor for state in gopt.load(folder / f"{name}.onnx").training.states}
    outputs = [each.name for each in session.get_outputs()]
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        made = session.run_with_ort_values(outputs, feeds)
        feeds |= {pairs[key]: value for key, value in zip(outputs, made) if key in pairs}
        times.append(time.perf_counter() - begin)
    return {"ms": 1000 * statistics.median(times[5:]), "sent": 0, "calls": 0}


def _feeds(name: str, folder: Path) -> dict[str, Any]:
    data, state = (dict(np.load(folder / f"{name}_{what}.npz")) for what in ("data", "state"))
    first = {key: np.ascontiguousarray(value[: len(value) // 8]) for key, value in data.items()}
    return {**first, **state, "lr": np.array(1e-4, np.float32)}


def run_torch(python: str, name: str, mode: str, steps: int) -> dict[str, Any]:
    """A peer, in its own interpreter: see ``benchmarks/peers.py``."""
    script = Path(__file__).with_name("peers.py")
    done = subprocess.run([python, str(script), name, mode, str(steps)], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has PyTorch")
    parser.add_argument("--model", action="append", choices=["mlp", "gpt"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name, model in models().items():
            if options.model and name not in options.model:
                continue
            prepare(name, model, folder)
            ways: dict[str, Callable[[], dict[str, Any]]] = {
                "onnxruntime, one session": lambda name=name: run_session(name, folder, options.steps)  # type: ignore
            }
            for title, (ranks, stage) in WAYS.items():
                ways[f"gopt, {title}"] = lambda n=name, r=ranks, s=stage: run_gopt(n, r, s, folder, options.steps)  # type: ignore
            for mode in ("single", "ddp", "zero1", "fsdp2") if options.torch else ():
                ways[f"torch, {mode}"] = lambda n=name, m=mode: run_torch(options.torch, n, m, options.steps)  # type: ignore
            best: dict[str, dict[str, Any]] = {}
            for _ in range(options.rounds):
                for title, way in ways.items():
                    found = way()
                    if title not in best or found["ms"] < best[title]["ms"]:
                        best[title] = found
            load = os.getloadavg()[0]
            print(f"{name}: best median of {options.rounds} rounds of {options.steps} steps; load {load:.2f}")
            for title, row in best.items():
                print(f"  {title:28} {row['ms']:8.1f} ms  {row['sent'] / 1e6:8.1f} MB sent  {row['calls']:4} calls")


if __name__ == "__main__":
    main()
