"""Settings, one after the other: ``cd tests && python -m option_gen --seed 1 --minutes 5``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import draws

from option_gen.judge import judge
from option_gen.make import Setting


def one(seed: int) -> draws.Case:
    setting = Setting.draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        return draws.Case.of(seed, f"seed {seed}: {setting.told()}", judge(setting, Path(folder)))


def main() -> int:
    options = draws.parser("option_gen", __doc__).parse_args()
    return draws.run(draws.of_seeds(options, one), options.minutes, quiet=("right", "refused", "unconfirmed"))


if __name__ == "__main__":
    sys.exit(main())
