"""Fresh steps, one after the other; prints what was not right."""

from __future__ import annotations

import collections
import sys
import time
import traceback

from whole_gen.judge import MESHES, SPLIT, Verdict, drawn, judged
from whole_gen.steps import written


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    meshes = SPLIT if "split" in sys.argv else MESHES
    table: collections.Counter[str] = collections.Counter()
    begun = time.time()
    for seed in range(first, first + count):
        verify = seed % 5 == 0

        def make(samples: int, scale: int, seed: int = seed):
            return written(seed, samples, scale)

        try:
            how = drawn(seed, meshes, make(4, 1))
            found = judged(make, how, seed, verify=verify)
        except Exception:
            found = Verdict("test", traceback.format_exc()[-1500:])
        table[found.kind] += 1
        if found.kind != "right":
            said = make(4, 1).said if found.kind != "test" else []
            print(f"--- {seed} {found.kind} {how}\n    {' '.join(said)}\n    {found.text}", flush=True)
    print(dict(table), f"{time.time() - begun:.0f} s")


main()
