"""Settings, one after the other: ``cd tests && python -m option_gen --seed 1 --minutes 5``.

With ``--lives``, ranks of one setting train, and go on as trainers and servers, or as ranks of another setting.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import draws

from option_gen import judge, life
from option_gen.make import Setting


def one(seed: int, *, lives: bool) -> draws.Case:
    kind, judged = (life.Life, life.judge) if lives else (Setting, judge.judge)
    drawn = kind.draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        return draws.Case.of(seed, f"seed {seed}: {drawn.told()}", judged(drawn, Path(folder)))


def main() -> int:
    parser = draws.parser("option_gen", __doc__)
    parser.add_argument("--lives", action="store_true", help="train, reshard, train on")
    options = parser.parse_args()
    cases = draws.of_seeds(options, partial(one, lives=options.lives))
    return draws.run(cases, options.minutes, quiet=("right", "refused", "unconfirmed"))


if __name__ == "__main__":
    sys.exit(main())
