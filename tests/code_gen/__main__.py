"""Training code drawn at random: ``cd tests && python -m code_gen --seed 1 --minutes 5``. Needs torch.

Each is exported and compared with PyTorch on fresh batches; one in five is sharded for two ranks as well, and trained
beside PyTorch with averaged gradients. Prints what differs and counts what is refused, by reason.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

from code_gen.judge import judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="code_gen", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--verbose", action="store_true", help="print refusals with their code too")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end and seed < options.seed + options.count:
        verdict = judge(seed, ranks=seed % 5 == 0)
        counts[verdict.outcome] += 1
        reasons[verdict.why[:110]] += verdict.outcome == "refused"
        if verdict.outcome not in ("equal", "equal on ranks") and (options.verbose or verdict.outcome != "refused"):
            print(f"{verdict.outcome} {verdict.told}\n    {verdict.why}", flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {dict(counts)}")
    for why, count in reasons.most_common():
        print(f"{count:5} {why}") if count else None
    return 1 if counts["WRONG"] or counts["CRASH"] else 0


if __name__ == "__main__":
    sys.exit(main())
