"""Streams of tokens on meshes, one after the other: ``cd tests && python -m mesh_gen --seed 1 --minutes 5``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import draws

from mesh_gen.judge import Setting, judge
from mesh_gen.make import Recipe, make


def one(seed: int) -> draws.Case:
    recipe = Recipe.draw(seed)
    step = make(recipe)
    setting = Setting.draw(step)
    with tempfile.TemporaryDirectory() as folder:
        return draws.Case.of(seed, f"{recipe.told()} @ {setting.told()}", judge(step, setting, Path(folder)))


def main() -> int:
    options = draws.parser("mesh_gen", __doc__).parse_args()
    return draws.run(draws.of_seeds(options, one), options.minutes, quiet=("right", "refused"))


if __name__ == "__main__":
    sys.exit(main())
