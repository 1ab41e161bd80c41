"""Train an example with 1, 2 and 4 ranks and lay the loss curves side by side: `python examples/train.py gpt`.

`--mesh tp=2 dp=2,tp=2` trains on one rank, or those of `--ranks`, and on these meshes.

A step takes 32 samples in four batches of 8: four in turn on one rank, two in turn on each of two, one on each of four.
Everything is done by the commands that are printed; this script adds the first values and the comparison.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layout:
    """Ranks that share the work: how gopt is told of them, and how many of them see samples of their own."""

    name: str
    ranks: int
    data_ranks: int
    arguments: tuple[str, ...]

    @classmethod
    def of_ranks(cls, ranks: int) -> Layout:
        """Ranks that all see samples of their own."""
        return cls(str(ranks), ranks, ranks, ("--ranks", str(ranks), "--stage", str(STAGES[ranks])))

    @classmethod
    def of_mesh(cls, mesh: str) -> Layout:
        """A mesh: its ranks along dp and shard see samples of their own."""
        sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in mesh.split(","))}
        data = math.prod(size for axis, size in sizes.items() if axis in ("dp", "shard"))
        return cls(mesh, math.prod(sizes.values()), data, ("--mesh", mesh))

    def __str__(self) -> str:
        return self.name if "=" in self.name else f"{self.ranks} rank{'s' * (self.ranks != 1)}"


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


def train(name: str, layout: Layout, steps: int, engine: str, out: Path) -> list[float]:
    """Shard, run and merge; returns the loss of every step."""
    example = importlib.import_module(name)
    folder, log, kept, trained, initial = (
        os.path.relpath(out / name, HERE)
        for name in (
            *(f"{layout.name}.{kind}" for kind in ("ranks", "jsonl", "checkpoint", "trained.onnx")),
            "initial.npz",
        )
    )
    shares = [*layout.arguments, "--accumulate", str(BATCHES // layout.data_ranks)]
    command("shard", f"steps/{name}.onnx", *shares, "--state", initial, "-o", folder, quiet=True)
    start = ["--launch", str(layout.ranks)] if engine == "mpi" else ["--engine", engine]
    what = ["--data", f"{name}:batches", "--set", f"lr={example.LR.format(steps=steps)}", "--steps", str(steps)]
    command("run", folder, *start, *what, "--log", log, "--checkpoint", kept)
    command("merge", f"{kept}/step_{steps:08d}", "-o", trained, quiet=True)
    return [json.loads(line)["loss"] for line in (HERE / log).read_text(encoding="utf-8").splitlines()]


def answering(trained: Path) -> Callable[[np.ndarray], np.ndarray]:
    """From a batch to its logits: the forward, cut out of a training step that holds values."""
    forward = Extractor(onnx.load(trained)).extract_model(["x"], ["logits"])
    session = onnxruntime.InferenceSession(forward.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x: np.asarray(session.run(["logits"], {"x": x})[0])


def plot(curves: Mapping[Layout, list[float]]) -> None:
    """The curves side by side, on one scale."""
    import plotext

    plotext.terminal.limit(False)
    figure = plotext.figure
    figure.plot_size(min(38 * len(curves), shutil.get_terminal_size((114, 24)).columns), 16)
    figure.subplots(1, len(curves))
    top = max(max(curve) for curve in curves.values())
    for place, (layout, curve) in enumerate(curves.items(), 1):
        panel = figure.subplot(1, place) if len(curves) > 1 else figure
        panel.theme("colorless")
        panel.title(f"{layout}, loss by step")
        panel.draw(panel.signal(range(1, len(curve) + 1), curve, marker="braille"))
        panel.ruler("x").ticks(sorted({1, len(curve) // 2, len(curve)}))
        panel.ruler("y").lim(0, top)
    figure.show(colorless=True)


def compare(curves: Mapping[Layout, list[float]]) -> bool:
    """Tell how far each curve is from the first; whether all agree."""
    (first, reference), *others = curves.items()
    agree = True
    for layout, curve in others:
        gaps = np.abs(np.array(curve) - reference) / np.abs(reference)
        worst = int(gaps.argmax())
        alike = bool((gaps <= TOLERANCE).all())  # not so for a loss that is not a number either
        agree = agree and alike
        how = f"differs by at most {gaps[worst]:.1e} of it, at step {worst + 1} (bound {TOLERANCE:.0e})"
        print(f"{layout} against {first.name}: {'the same curve' if alike else 'ANOTHER CURVE'}; the loss "
              f"{how if gaps[worst] != 0 else 'is the very same at all steps'}")  # fmt: skip
    return agree


def main() -> int:
    """Returns 0 when all curves agree, 1 when they do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=["gpt", "digits"])
    parser.add_argument("--steps", type=int, help="how many (default: 300)")
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(STAGES))
    parser.add_argument("--mesh", nargs="+", default=[], help="meshes to train on beside one rank: tp=2 dp=2,tp=2")
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
    ranks = sorted(set(given.ranks or ([1] if given.mesh else STAGES)))
    layouts = [*map(Layout.of_ranks, ranks), *map(Layout.of_mesh, given.mesh)]
    curves = {layout: train(given.example, layout, steps, given.engine, out) for layout in layouts}
    plot(curves)
    agree = compare(curves)
    for layout in curves:
        answer = answering(out / f"{layout.name}.trained.onnx")
        print(f"{layout}, merged: {example.judge(answer)}")
    print(f"\n{example.show(answer)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
