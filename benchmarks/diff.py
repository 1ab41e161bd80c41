"""What a reviewer gets to see: ``python benchmarks/diff.py``.

``gopt diff`` of two folders of 8 ranks: CPU seconds (limit 5), lines (200) and bytes of its comment (60,000). Goldens:
lines that change with a hyper-parameter (limit 12), with buckets and ranks (60 on the MLP, 200 on a GPT of 20,000
nodes), with trainers and servers (60). Exits 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import onnx

sys.path.insert(0, str(Path(__file__).parent))
from gopt.cli.main import main as gopt
from graphs import build

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mlp_adamw.onnx"
SECONDS, LINES, BYTES = 5.0, 200, 60_000
SHARD = ("--ranks", "8", "--stage", "1")
OPTIONS = {
    "buckets": (*SHARD, "--bucket-mb", "0.01"), "ranks": ("--ranks", "4", "--stage", "1"),
    "stage": ("--ranks", "8", "--stage", "3"),
}  # fmt: skip
"""A change -> the options after it."""
SPLIT = {"trainers": ("--trainers", "3", "--servers", "2"), "servers": ("--trainers", "2", "--servers", "3")}


def run(*arguments: str) -> tuple[int, str]:
    """A command of gopt: its exit code and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = gopt(list(arguments))
    if code not in (0, 1):
        raise SystemExit(f"gopt {' '.join(arguments)}: {code}: {errors.getvalue()}")
    return code, out.getvalue()


def doubled(path: Path, decay: float) -> None:
    """The weight decay of a step, doubled in place."""
    model = onnx.load(path)
    for each in model.graph.initializer:
        value = onnx.numpy_helper.to_array(each)
        if value.shape == () and abs(float(value) - decay) < 1e-6:
            each.CopyFrom(onnx.numpy_helper.from_array(value * 2, each.name))
            break
    else:
        raise SystemExit(f"{path} has no constant {decay}")
    onnx.save(model, path)


def diffs(home: Path, step: Path) -> list[tuple[str, float, float]]:
    """What, figure and limit of ``gopt diff``."""
    run("shard", str(step), *SHARD, "-o", str(home / "a"))
    other = home / "other.onnx"
    other.write_bytes(step.read_bytes())
    doubled(other, 0.01)
    made = []
    for name, options in {**OPTIONS, "weight decay": SHARD}.items():
        folder = home / name.replace(" ", "-")
        run("shard", str(other if name == "weight decay" else step), *options, "-o", str(folder))
        start = time.process_time()
        code, shown = run("diff", str(home / "a"), str(folder))
        seconds = time.process_time() - start
        assert code == 1
        comment = run("diff", str(home / "a"), str(folder), "--markdown")[1]
        made += [
            (f"diff, {name}: CPU s", seconds, SECONDS), (f"diff, {name}: lines", len(shown.splitlines()), LINES),
            (f"diff, {name}: bytes of the comment", len(comment.encode()), BYTES),
        ]  # fmt: skip
    return made


def changed(folder: Path) -> int:
    """Lines of goldens that differ from what gopt makes now."""
    shown = run("golden", "check", str(folder))[1].splitlines()
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in shown)


def goldens(home: Path, step: Path, most: int, command: str = "shard") -> list[tuple[str, float, float]]:
    """What, changed lines and limit of goldens; ``most`` for options."""
    home.mkdir()
    model = home / "step.onnx"
    model.write_bytes(step.read_bytes())
    first = SHARD if command == "shard" else ("--trainers", "2", "--servers", "2")

    def ask(options: tuple[str, ...]) -> None:
        text = f'[case.step]\nmodel = "step.onnx"\ncommand = "{command}"\noptions = {json.dumps(options)}\n'
        (home / "gopt-golden.toml").write_text(text)

    ask(first)
    run("golden", "update", str(home))
    made = []
    for name, options in (OPTIONS if command == "shard" else SPLIT).items():
        ask(options)
        made.append((f"golden of {step.stem}, {name}: lines", changed(home), most))
    ask(first)
    doubled(model, 0.01)
    return [*made, (f"golden of {step.stem}, weight decay: lines", changed(home), 12)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=20_000, help="nodes of the GPT")
    nodes = parser.parse_args().nodes
    over = False
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        step = home / "gpt.onnx"
        onnx.save(build("gpt", nodes), step)
        rows = goldens(home / "mlp", FIXTURE, 60) + goldens(home / "split", FIXTURE, 60, "split")
        rows += diffs(home, step) + goldens(home / "gpt", step, 200)
    for what, figure, limit in rows:
        over |= figure > limit
        print(f"{what}: {figure:.4g} (limit {limit:g}){' OVER' if figure > limit else ''}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
