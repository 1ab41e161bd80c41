"""Fresh steps, split between trainers and servers: ``cd tests && python -m split_gen --seed 1 --minutes 5``.

``--fixtures``: all models of ``fixtures`` and ``fixtures/families`` under all settings instead.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from steps_gen.make import make
from steps_gen.plan import draw

from split_gen.drawn import fair, tried, with_identities
from split_gen.judge import EXACT, GOOD, REDUCED, Setting, Verdict, judge

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


def fresh(seed: int) -> Iterator[tuple[str, Verdict]]:
    for each in itertools.count(seed):
        try:
            yield one(each)
        except Exception as error:
            yield f"seed {each}", Verdict("crash", f"the test itself: {error!r}")


def matrix() -> Iterator[tuple[str, Verdict]]:
    models = [*sorted(FIXTURES.glob("*.onnx")), *sorted((FIXTURES / "families").glob("*.onnx"))]
    ways = itertools.product(
        (1, 2, 3), (1, 2, 3, 5), ("off", "classic", "balanced"), ("round-robin", "hash", "bytes"), ("start", "end")
    )
    for (trainers, servers, slicing, placement, pull), path in itertools.product(ways, models):
        setting = Setting(trainers, servers, slicing, 16, placement, pull)
        yield f"{path.stem} @ {setting.told()}", fixture(path, setting)


def main() -> int:
    parser = argparse.ArgumentParser(prog="split_gen", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--fixtures", action="store_true")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + 60 * options.minutes
    for told, verdict in matrix() if options.fixtures else fresh(options.seed):
        counts[verdict.outcome] += 1
        reasons[verdict.kind] += verdict.outcome in ("refused", "unjust")
        if verdict.outcome not in GOOD:
            print(f"{verdict.outcome} {told}\n    {verdict.why}", flush=True)
        if time.monotonic() > end:
            break
    print(f"{sum(counts.values())} splits: {dict(counts)}")
    for kind, count in reasons.most_common():
        print(f"{count:5} {kind}") if count else None
    return 1 if set(counts) - {*GOOD, "unjust"} else 0


if __name__ == "__main__":
    sys.exit(main())
