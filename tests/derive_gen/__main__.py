"""Random forward models, one after the other: ``cd tests && python -m derive_gen --seed 1 --minutes 5``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import draws
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
    parser = draws.parser("derive_gen", __doc__)
    parser.add_argument("--operators", type=int)
    options = parser.parse_args()

    def case(seed: int) -> draws.Case:
        with tempfile.TemporaryDirectory() as folder:
            told, verdict = one(seed, Path(folder), options.operators)
        return draws.Case(f"seed {seed}", told, verdict.outcome, verdict.why, verdict.kind)

    quiet = ("right", "refused", "unsteady", "not run", "apart")
    return draws.run(draws.of_seeds(options, case), options.minutes, quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
