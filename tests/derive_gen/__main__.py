"""Random forward models, one after the other: ``cd tests && python -m derive_gen --seed 1 --minutes 5``."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from derive_gen.judge import Verdict, judge
from derive_gen.make import make
from derive_gen.reference import RULES


def one(seed: int, folder: Path, operators: int | None = None) -> tuple[str, Verdict]:
    folder.mkdir(exist_ok=True)
    forward = make(seed, operators)
    optimizer = str(np.random.default_rng(seed).choice(list(RULES)))
    opset = forward.model.opset_import[0].version
    told = f"{seed}: opset {opset}, {optimizer}, {forward.loss}: {' '.join(forward.draws)}"
    return told, judge(forward, optimizer, folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="derive_gen", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--operators", type=int)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    examples: dict[str, int] = {}
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end and seed < options.seed + options.count:
        with tempfile.TemporaryDirectory() as folder:
            told, verdict = one(seed, Path(folder), options.operators)
        counts[verdict.outcome] += 1
        reasons[verdict.kind] += verdict.outcome == "refused"
        examples.setdefault(verdict.kind, seed)
        if verdict.outcome in ("WRONG", "CRASH"):
            print(f"{verdict.outcome} {told}\n    {verdict.why}", flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {dict(counts)}")
    for kind, count in reasons.most_common():
        print(f"{count:5} {kind} (seed {examples[kind]})") if count else None
    return 1 if counts["WRONG"] or counts["CRASH"] else 0


if __name__ == "__main__":
    sys.exit(main())
