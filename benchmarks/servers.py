"""What it costs to split a step between trainers and servers: ``python benchmarks/servers.py`` decides each target.

A GPT step is sharded on 8 ranks at stage 2, and split for 8 trainers and 8 servers, with tensors in pieces and whole:
CPU seconds of a process each, which a busy machine changes least. Targets: 20,000 nodes take at most twice as long as
sharding them, and a split grows linearly with the nodes. All of it takes about two minutes.
"""

from __future__ import annotations

import sys

from cut import parser, report, verdicts

CASES = {
    "shard, 8 ranks": ["shard", "--ranks", "8", "--no-prove"],
    "split, pieces": ["split", "--trainers", "8", "--servers", "8"],
    "split, whole": ["split", "--trainers", "8", "--servers", "8", "--slicing", "off"],
    "split, async": ["split", "--trainers", "8", "--servers", "8", "--mode", "async"],
}
BASE = "shard, 8 ranks"
SHARE = 2.0
"""The target: times sharding at the largest graph."""


def main() -> int:
    """Returns 0 where every target holds, 1 where one does not."""
    limits = {case: SHARE for case in CASES if case != BASE}
    return report(parser(__doc__).parse_args(), CASES, lambda found: verdicts(found, BASE, limits))


if __name__ == "__main__":
    sys.exit(main())
