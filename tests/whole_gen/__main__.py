"""Fresh steps, one after the other; prints what was not right.

``split``: on meshes that split the computation; ``stages``: on stages of a pipeline; ``memory``: with values that are
computed again or kept on the host; ``kinds``: steps of the table ``KINDS``, ``only=NAME,…``: of these
structures; ``servers``: split between trainers and servers.
"""

from __future__ import annotations

import collections
import re
import sys
import time
import traceback

from whole_gen.judge import MESHES, SIZES, SPLIT, STAGED, Verdict, drawn, drawn_memory, is_due, judged
from whole_gen.kinds import of_seed
from whole_gen.splits import drawn_split, judged_split
from whole_gen.steps import written


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    meshes = SPLIT if "split" in sys.argv else STAGED if "stages" in sys.argv else MESHES
    draw = drawn_memory if "memory" in sys.argv or "stages" in sys.argv else drawn
    only = next((word.removeprefix("only=") for word in sys.argv if word.startswith("only=")), "")
    table: collections.Counter[str] = collections.Counter()
    begun = time.time()
    for seed in range(first, first + count):
        verify = seed % 5 == 0

        def make(samples: int, scale: int, seed: int = seed):
            if "kinds" in sys.argv:
                return of_seed(seed, samples, scale, servers="servers" in sys.argv, only=only)
            return written(seed, samples, scale)

        how: object = ""
        samples = SIZES[seed % len(SIZES)]
        try:
            if "servers" in sys.argv:
                how = drawn_split(seed)
                found = judged_split(make, drawn_split(seed), seed, told=seed % 2 == 0, verify=verify)
            else:
                how = setting = draw(seed, meshes, make(4, 1))
                found = judged(make, setting, seed, samples, verify=verify)
        except Exception:
            found = Verdict("test", traceback.format_exc()[-1500:])
        if found.kind == "refused" and is_due(make(samples, 1), found.text):
            found = Verdict("refused as due")
        if found.kind == "unconfirmed" and re.search("as noted|no loss that is shown reads", found.text):
            found = Verdict("noted")
        table[found.kind] += 1
        if found.kind not in ("right", "noted", "refused as due"):
            said = make(4, 1).said if found.kind != "test" else []
            print(f"--- {seed} {found.kind} {how}\n    {' '.join(said)}\n    {found.text}", flush=True)
    print(dict(table), f"{time.time() - begun:.0f} s")


main()
