"""Streams of tokens on meshes, one after the other: ``cd tests && python -m mesh_gen --seed 1 --minutes 5``."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

from mesh_gen.judge import Setting, Verdict, judge
from mesh_gen.make import Recipe, make


def one(seed: int, folder: Path) -> tuple[str, Verdict]:
    recipe = Recipe.draw(seed)
    step = make(recipe)
    setting = Setting.draw(step)
    return f"{recipe.told()} @ {setting.told()}", judge(step, setting, folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mesh_gen", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=10**9)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end and seed < options.seed + options.count:
        with tempfile.TemporaryDirectory() as folder:
            told, verdict = one(seed, Path(folder))
        counts[verdict.outcome] += 1
        reasons[verdict.kind] += verdict.outcome == "refused"
        if verdict.outcome not in ("right", "refused"):
            print(f"{verdict.outcome} {told}\n    {verdict.why}", flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {dict(counts)}")
    for kind, count in reasons.most_common():
        print(f"{count:5} {kind}") if count else None
    return 1 if counts["WRONG"] or counts["CRASH"] else 0


if __name__ == "__main__":
    sys.exit(main())
