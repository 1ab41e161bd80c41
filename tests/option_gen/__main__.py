"""Settings, one after the other: ``cd tests && python -m option_gen --seed 1 --minutes 5``.

With ``--structures``, steps are drawn ones of ``whole_gen``; with ``--wild``, drawn ones and fixtures in other forms,
beside the plain ones; with ``--dropped``, with fewer tokens behind a block. With ``--lives``, ranks of one setting
train, and go on as trainers and servers, or as ranks of another setting. With ``--numbers``, all that ranks compute
is compared with the numbers of what the proof reads. With ``--rows``, ranks are of a row of a plan; with
``--servers``, the step is split between trainers and servers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import draws

from option_gen import judge, life, numbers, rows, servers
from option_gen.make import Setting, dropped, structure, wild

KINDS: Mapping[str, tuple[Any, Callable[[Any, Path], draws.Verdict]]] = {
    "settings": (Setting, judge.judge), "lives": (life.Life, life.judge), "numbers": (numbers.Ranks, numbers.judge),
    "rows": (rows.Row, rows.judge), "servers": (servers.Split, servers.judge),
}  # fmt: skip
"""What is drawn, and what judges it."""


def one(seed: int, kind: str, step: Callable[[int], str] | None) -> draws.Case:
    drawn, judged = KINDS[kind][0].draw(seed, step and step(seed)), KINDS[kind][1]
    with tempfile.TemporaryDirectory() as folder:
        return draws.Case.of(seed, f"seed {seed}: {drawn.told()}", judged(drawn, Path(folder)))


def main() -> int:
    parser = draws.parser("option_gen", __doc__)
    parser.add_argument("--lives", action="store_const", dest="kind", const="lives", default="settings")
    parser.add_argument("--numbers", action="store_const", dest="kind", const="numbers")
    parser.add_argument("--rows", action="store_const", dest="kind", const="rows")
    parser.add_argument("--servers", action="store_const", dest="kind", const="servers")
    parser.add_argument("--structures", action="store_const", dest="step", const=structure)
    parser.add_argument("--wild", action="store_const", dest="step", const=wild)
    parser.add_argument("--dropped", action="store_const", dest="step", const=dropped)
    options = parser.parse_args()
    cases = draws.of_seeds(options, partial(one, kind=options.kind, step=options.step))
    return draws.run(cases, options.minutes, quiet=("right", "refused", "unconfirmed", "unfit", "unverified"))


if __name__ == "__main__":
    sys.exit(main())
