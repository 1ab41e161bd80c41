"""Fresh steps, split between trainers and servers: ``cd tests && python -m split_gen --seed 1 --minutes 5``.

``--fixtures``: all models of ``fixtures`` and ``fixtures/families`` under all settings instead.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import draws
from draws import Verdict
from steps_gen.make import make
from steps_gen.plan import draw

from split_gen.drawn import fair, tried, with_identities
from split_gen.judge import EXACT, GOOD, REDUCED, Setting, judge

FIXTURES = Path(__file__).parents[2] / "fixtures"
REDUCING = ("clip", "lamb", "muon", "gpt_adamw_clip", "t5_")


def fixture(path: Path, setting: Setting) -> Verdict:
    allow = REDUCED if any(part in path.stem for part in REDUCING) else EXACT
    with tempfile.TemporaryDirectory() as place:
        return judge(path, setting, Path(place), allow=lambda name: allow)


def one(seed: int) -> tuple[str, Verdict]:
    plan, setting = draw(seed), Setting.draw(seed)
    made = make(plan)
    told = f"seed {seed}: {plan.told()} @ {setting.told()}"
    found = tried(made, setting)
    if found.outcome == "equal" and seed % 4 == 0:
        found = tried(made, setting, with_identities(made.model, seed))
        told += " (with identities)"
    if found.outcome == "refused" and not fair(made, setting, found):
        return told, Verdict("unjust", found.why)
    return told, found


def fresh(seed: int) -> draws.Case:
    try:
        return draws.Case.of(seed, *one(seed))
    except Exception as error:
        return draws.Case.of(seed, f"seed {seed}", Verdict("crash", f"the test itself: {error!r}"))


def matrix() -> Iterator[draws.Case]:
    models = [*sorted(FIXTURES.glob("*.onnx")), *sorted((FIXTURES / "families").glob("*.onnx"))]
    ways = itertools.product(
        (1, 2, 3), (1, 2, 3, 5), ("off", "classic", "balanced"), ("round-robin", "hash", "bytes"), ("start", "end")
    )
    for (trainers, servers, slicing, placement, pull), path in itertools.product(ways, models):
        setting = Setting(trainers, servers, slicing, 16, placement, pull)
        told, verdict = f"{path.stem} @ {setting.told()}", fixture(path, setting)
        yield draws.Case(told, told, verdict.outcome, verdict.why, verdict.kind)


def main() -> int:
    parser = draws.parser("split_gen", __doc__)
    parser.add_argument("--fixtures", action="store_true")
    options = parser.parse_args()
    cases = matrix() if options.fixtures else draws.of_seeds(options, fresh)
    return draws.run(cases, options.minutes, quiet=GOOD, wrong=lambda outcome: outcome not in (*GOOD, "unjust"))


if __name__ == "__main__":
    sys.exit(main())
