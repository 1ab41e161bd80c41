"""Train a recommender whose table of a million rows lies on two servers: `python examples/recommend.py`.

Two trainers pull the rows that their batches look up, and push gradients of those rows alone. The same step runs
beside it without servers, on two ranks that average whole gradients: the curves are the same.
Everything is done by the commands that are printed; this script makes the step, its first values and the clicks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

HERE = Path(__file__).resolve().parent
BATCH, BAG, DENSE, WIDTH = 64, 5, 4, 8
TOLERANCE = 1e-5
"""How far two losses may be apart, as a share of them: float32 sums in another order."""

Array = np.ndarray


def table_rows() -> tuple[int, ...]:
    """Rows of each table. ``--rows`` hands them to the runs, which read the clicks from this file."""
    return tuple(int(count) for count in os.environ.get("GOPT_RECOMMEND_ROWS", "1000000,1000,500").split(","))


def batches(part: int, parts: int) -> Iterator[dict[str, Array]]:
    """Every ``parts``-th batch from ``part`` on. Few items are looked at often, most of them seldom."""
    *single, bagged = table_rows()
    taste = np.random.default_rng(1).normal(size=64)
    for number in itertools.count(part, parts):
        random = np.random.default_rng([0, number])
        numbers = random.normal(size=(BATCH, DENSE)).astype(np.float32)
        ids = np.stack([(count * random.random(BATCH) ** 4).astype(np.int64) for count in single], 1)
        bag = (bagged * random.random((BATCH, BAG)) ** 2).astype(np.int64)
        scores = numbers.sum(1) + 2 * taste[ids[:, 0] % 64]
        clicked = (scores > 0).astype(np.float32)
        yield {"numbers": numbers, "ids": ids, "bag": bag, "clicked": clicked}


def step() -> onnx.ModelProto:
    """The step: networks for numbers and for products of pairs, and tables; updated by Adagrad."""
    sys.path.insert(0, str(HERE.parent / "fixtures" / "sparse"))
    from steps import dlrm

    made: onnx.ModelProto = dlrm(
        table_rows(), width=WIDTH, batch=BATCH, bag=BAG, dense=DENSE, rule="adagrad", stored=False, scatter="nd"
    )
    return made


def initial(model: onnx.ModelProto) -> dict[str, Array]:
    """First values of all states, drawn from a seed."""
    random, found = np.random.default_rng(0), {}
    for each in model.graph.input:
        shape = tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
        if each.name.endswith(".sum"):
            found[each.name] = np.full(shape, 0.1, np.float32)
        elif each.name not in ("numbers", "ids", "bag", "clicked", "lr"):
            size = 0.1 if each.name.startswith("table") else 0.4
            found[each.name] = random.normal(0, size, shape).astype(np.float32)
    return found


def command(*arguments: str) -> None:
    """Print a gopt command and run it in this folder; ends this process with its exit code where it fails."""
    print(f"$ gopt {shlex.join(arguments)}", flush=True)
    line = [sys.executable, "-P", "-m", "gopt.cli", *arguments]
    done = subprocess.run(line, cwd=HERE, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)


def train(folder: Path, steps: int) -> list[float]:
    """The loss of every step."""
    log = folder.with_suffix(".jsonl")
    what = ["--data", "recommend:batches", "--set", "lr=0.05", "--steps", str(steps), "--log", str(log)]
    command("run", str(folder), *what)
    told = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    seconds = sorted(each["seconds"] for each in told if "seconds" in each)
    if seconds:
        print(f"  {1000 * seconds[len(seconds) // 2]:.1f} ms a step")
    return [each["loss"] for each in told]


def rows_moved(steps: int, trainers: int) -> tuple[float, float]:
    """Distinct rows of all tables that a trainer looks up in a step, and all of their rows."""
    counts = []
    for batch in itertools.islice(batches(0, 1), steps * trainers):
        looked_up = [*batch["ids"].T, batch["bag"]]
        counts.append(sum(np.unique(each).size for each in looked_up))
    return float(np.mean(counts)), float(sum(table_rows()))


def main() -> int:
    """Returns 0 when the curves agree, 1 when they do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", default="1000000,1000,500", help="rows of the tables")
    parser.add_argument("--layout", choices=["modulo", "range", "columns", "whole"], default="modulo")
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "recommend", help="folder for what is written")
    parser.add_argument("--force", action="store_true", help="replace what an earlier run wrote there")
    given = parser.parse_args()
    os.environ["GOPT_RECOMMEND_ROWS"] = given.rows
    out = given.out.resolve()
    if out.exists():
        if not (given.force and (out / "initial.npz").is_file()):
            parser.error(f"{out} exists already: --force replaces what an earlier run wrote, or choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    model, values = step(), out / "initial.npz"
    onnx.save(model, out / "step.onnx")
    np.savez(values, **initial(model))
    stated = [str(out / "step.onnx"), "--state", str(values)]
    command("split", *stated, "--trainers", "2", "--servers", "2", "--table", f"*={given.layout}",
            "-o", str(out / "servers"))  # fmt: skip
    with_servers = train(out / "servers", given.steps)
    command("shard", *stated, "--mesh", "dp=2", "--stage", "0", "-o", str(out / "ranks"))
    with_ranks = train(out / "ranks", given.steps)
    moved, whole = rows_moved(given.steps, 2)
    pushed, every = moved * (8 + 4 * WIDTH) / 1e3, whole * 4 * WIDTH / 1e6
    print(f"a trainer pulls and pushes {moved:.0f} of {whole:.0f} rows in a step: {pushed:.1f} kB each way")
    print(f"whole tables would be {every:.1f} MB each way")
    gaps = np.abs(np.array(with_servers) - with_ranks) / np.abs(with_ranks)
    agree = bool((gaps <= TOLERANCE).all())
    print(f"loss {with_servers[0]:.4f} at the first step, {with_servers[-1]:.4f} at the last")
    print(f"{'the same curve' if agree else 'ANOTHER CURVE'}; the losses differ by at most {gaps.max():.1e} of them")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
