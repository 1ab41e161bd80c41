"""How long ``gopt`` takes to say something: ``python benchmarks/start.py [--repeat 10] [--limit 0.5]``.

Every command is a process of its own; the best of all runs counts. With ``--limit`` the exit status is 1 where one
takes longer. What makes a start slow, an import too many, is a test (``tests/cli/test_shard.py``).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

COMMANDS = (["--help"], ["--version"], ["passes", "--help"], ["shard", "--help"])


def seconds(arguments: list[str]) -> float:
    """Of one run."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gopt.cli", *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--limit", type=float, help="seconds")
    given = parser.parse_args()
    slow = False
    for arguments in COMMANDS:
        best = min(seconds(arguments) for _ in range(given.repeat))
        slow |= given.limit is not None and best > given.limit
        print(f"gopt {' '.join(arguments):15} {best:.3f} s")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
