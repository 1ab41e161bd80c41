"""Every write fault and every signal of every command once, and counts: ``nice python tests/system/nightly.py``.

It runs the sweeps one after another: all faults at all writes, children that hang or die, a file system without room,
streams that take nothing, two commands on one target, hostile surroundings, and stop signals at drawn times.
``--shots N``: signals to each command; ``--seed S``;
``--parts writes,plants,hanging,streams,launched,together,attacks,killed,signals``: these sweeps alone; ``--cases A,B``:
these commands that write alone, and no other sweep. Where PyTorch is installed, ``export`` is swept too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
HANGING = ("shard-jobs", "shard-jobs-new", "shard-jobs-plain", "split-jobs")


def parts(shots: int, seed: int, cases: str) -> dict[str, list[str]]:
    """The sweeps as commands."""
    return {
        "writes": ["sweep.py", *filter(None, cases.split(","))],
        "plants": ["sweep.py", "--plants"],
        "hanging": ["hanging.py", *HANGING],
        "streams": ["streams.py", "all"],
        "launched": ["streams.py", "launched"],
        "together": ["together.py", str(2 * shots), str(seed)],
        "attacks": ["attacks.py"],
        "killed": ["attacks.py", "killed", str(seed), str(shots)],
        "signals": ["signal_sweep.py", str(shots), str(seed)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shots", type=int, default=12)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--cases", default="")
    parser.add_argument("--parts", default="")
    given = parser.parse_args()
    found = parts(given.shots, given.seed, given.cases)
    chosen = list(filter(None, given.parts.split(","))) or (["writes"] if given.cases else list(found))
    bad = made = 0
    for words in (found[name] for name in chosen):
        print(f"{' '.join(words)}:", flush=True)
        begun = subprocess.Popen([sys.executable, HERE / words[0], *words[1:]], stdout=subprocess.PIPE, text=True)
        assert begun.stdout is not None
        for line in begun.stdout:
            made += count(line)
            print(f"  {line}", end="", flush=True)
        bad += begun.wait() != 0
    print(f"{made} faults and signals, {bad} sweeps with findings, seed {given.seed}")
    return 1 if bad else 0


def count(line: str) -> int:
    """The faults that a line of a sweep reports."""
    if not line.startswith("{"):
        head, _, rest = line.partition(": ")
        return int(rest.split()[0]) if " shots, " in rest and not head.startswith(" ") else 0
    record = json.loads(line)
    return sum(record.get("faults", {}).values()) + int(record.get("shots", 0))


if __name__ == "__main__":
    sys.exit(main())
