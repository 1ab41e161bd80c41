"""``python -m fuzz --minutes 30``: try faulty files until the time is up, keep what went wrong, and count."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.campaign import Campaign
from fuzz.cases import KINDS


def main() -> int:
    """Returns 1 where something went wrong."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; a case is its kind and its seed")
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many cases")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these kinds")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_findings"), help="where faulty files go")
    given = parser.parse_args()
    campaign = Campaign(given.kind or list(KINDS), given.keep)
    end = time.monotonic() + 60 * given.minutes
    for seed in range(given.seed, given.seed + given.cases):
        if time.monotonic() > end:
            break
        campaign.one(seed)
    print(campaign.summary())
    return 1 if campaign.findings else 0


sys.exit(main())
