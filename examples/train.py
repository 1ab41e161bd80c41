"""Train an example with 1, 2 and 4 ranks and lay the loss curves side by side: `python examples/train.py gpt`.

A step takes 32 samples in four batches of 8: four in turn on one rank, two in turn on each of two, one on each of four.
Everything is done by the commands that are printed; this script adds the first values and the comparison.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
from onnx.utils import Extractor

HERE = Path(__file__).resolve().parent
BATCHES = 4
STAGES = {1: 0, 2: 2, 4: 3}
"""Ranks -> the stage they run, for variety: all give the same curve."""
TOLERANCE = 1e-3
"""How far a loss may be from that on the fewest ranks, as a share of it: sums of four gradients differ by their order
alone, but training carries every rounding on, and a share of a small loss is smaller still."""


def command(*arguments: str, quiet: bool = False) -> None:
    """Print a gopt command and run it in this folder; ends this process with its exit code where it fails."""
    print(f"$ gopt {shlex.join(arguments)}", flush=True)
    line = [sys.executable, "-P", "-m", "gopt.cli", *arguments]
    done = subprocess.run(line, cwd=HERE, stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode:
        sys.exit(done.returncode)


def write_initial(example: ModuleType, step: Path, path: Path) -> None:
    """First values of all states, drawn from a seed; the step's file has none."""
    given = {"x", "y", "lr"}
    shapes = {
        each.name: tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
        for each in onnx.load(step).graph.input if each.name not in given
    }  # fmt: skip
    random = np.random.default_rng(0)
    np.savez(path, **{name: example.initial(name, shape, random) for name, shape in shapes.items()})


def train(name: str, ranks: int, steps: int, engine: str, out: Path) -> list[float]:
    """Shard, run and merge; returns the loss of every step."""
    example = importlib.import_module(name)
    folder, log, kept, trained, initial = (
        os.path.relpath(out / name, HERE)
        for name in (f"{ranks}.ranks", f"{ranks}.jsonl", f"{ranks}.checkpoint", f"{ranks}.trained.onnx", "initial.npz")
    )
    shares = ["--ranks", str(ranks), "--stage", str(STAGES[ranks]), "--accumulate", str(BATCHES // ranks)]
    command("shard", f"steps/{name}.onnx", *shares, "--state", initial, "-o", folder, quiet=True)
    start = ["--launch", str(ranks)] if engine == "mpi" else ["--engine", engine]
    what = ["--data", f"{name}:batches", "--set", f"lr={example.LR.format(steps=steps)}", "--steps", str(steps)]
    command("run", folder, *start, *what, "--log", log, "--checkpoint", kept)
    command("merge", f"{kept}/step_{steps:08d}", "-o", trained, quiet=True)
    return [json.loads(line)["loss"] for line in (HERE / log).read_text(encoding="utf-8").splitlines()]


def answering(trained: Path) -> Callable[[np.ndarray], np.ndarray]:
    """From a batch to its logits: the forward, cut out of a training step that holds values."""
    forward = Extractor(onnx.load(trained)).extract_model(["x"], ["logits"])
    session = onnxruntime.InferenceSession(forward.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x: np.asarray(session.run(["logits"], {"x": x})[0])


def plot(curves: Mapping[int, list[float]]) -> None:
    """The curves side by side, on one scale."""
    import plotext

    plotext.terminal.limit(False)
    figure = plotext.figure
    figure.plot_size(min(38 * len(curves), shutil.get_terminal_size((114, 24)).columns), 16)
    figure.subplots(1, len(curves))
    top = max(max(curve) for curve in curves.values())
    for place, (ranks, curve) in enumerate(curves.items(), 1):
        panel = figure.subplot(1, place) if len(curves) > 1 else figure
        panel.theme("colorless")
        panel.title(f"{counted(ranks)}, loss by step")
        panel.draw(panel.signal(range(1, len(curve) + 1), curve, marker="braille"))
        panel.ruler("x").ticks(sorted({1, len(curve) // 2, len(curve)}))
        panel.ruler("y").lim(0, top)
    figure.show(colorless=True)


def counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"


def compare(curves: Mapping[int, list[float]]) -> bool:
    """Tell how far each curve is from the first; whether all agree."""
    (fewest, reference), *others = curves.items()
    agree = True
    for ranks, curve in others:
        gaps = np.abs(np.array(curve) - reference) / np.abs(reference)
        worst = int(gaps.argmax())
        alike = bool((gaps <= TOLERANCE).all())  # not so for a loss that is no number either
        agree = agree and alike
        how = f"differs by at most {gaps[worst]:.1e} of it, at step {worst + 1} (bound {TOLERANCE:.0e})"
        print(f"{counted(ranks)} against {fewest}: {'the same curve' if alike else 'ANOTHER CURVE'}; the loss "
              f"{how if gaps[worst] != 0 else 'is the very same at all steps'}")  # fmt: skip
    return agree


def main() -> int:
    """Returns 0 when all curves agree, 1 when they do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=["gpt", "digits"])
    parser.add_argument("--steps", type=int, help="how many (default: 300)")
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(STAGES), default=sorted(STAGES))
    parser.add_argument("--engine", choices=["threads", "mpi"], default="threads")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: runs/EXAMPLE beside this file)")
    parser.add_argument("--force", action="store_true", help="replace what an earlier run wrote there")
    given = parser.parse_args()
    for module in ("plotext", "sklearn"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"there is no {module}: pip install '.[examples]' in gopt's folder")
    out = (given.out or HERE / "runs" / given.example).resolve()
    if out.exists():
        if not (given.force and (out / "initial.npz").is_file()):
            parser.error(f"{out} exists already: --force replaces what an earlier run wrote, or choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    example = importlib.import_module(given.example)
    steps = example.STEPS if given.steps is None else given.steps
    print(f"$ cd {os.path.relpath(HERE)}")
    write_initial(example, HERE / "steps" / f"{given.example}.onnx", out / "initial.npz")
    curves = {ranks: train(given.example, ranks, steps, given.engine, out) for ranks in sorted(set(given.ranks))}
    plot(curves)
    agree = compare(curves)
    for ranks in curves:
        answer = answering(out / f"{ranks}.trained.onnx")
        print(f"{counted(ranks)}, merged: {example.judge(answer)}")
    print(f"\n{example.show(answer)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
