"""Fresh steps, one after the other; prints what was not right.

``split``: on meshes that split the computation; ``kinds``: steps of the table ``KINDS``, ``only=NAME,…``: of these
structures; ``servers``: split between trainers and servers.
"""

from __future__ import annotations

import collections
import re
import sys
import time
import traceback

from whole_gen.judge import MESHES, SPLIT, Verdict, drawn, judged
from whole_gen.kinds import of_seed
from whole_gen.splits import drawn_split, judged_split
from whole_gen.steps import written

SIZES = (4, 4, 5, 2, 4, 6, 10)
"""Numbers of samples."""
UNDECIDED = "may (be|divide by) (a|their|the) number|one over their number|a rate, or|a batch of this size"
"""A tenth over five or ten samples is a rate or a mean."""


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    meshes = SPLIT if "split" in sys.argv else MESHES
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
                how = setting = drawn(seed, meshes, make(4, 1))
                found = judged(make, setting, seed, samples, verify=verify)
        except Exception:
            found = Verdict("test", traceback.format_exc()[-1500:])
        due = [make(samples, 1).refusal or "^$", *[UNDECIDED] * (samples != 4)] if found.kind == "refused" else []
        if any(re.search(each, found.text) for each in due):
            found = Verdict("refused as due")
        if found.kind == "unconfirmed" and re.search("as noted|no loss that is shown reads", found.text):
            found = Verdict("noted")
        table[found.kind] += 1
        if found.kind not in ("right", "noted", "refused as due"):
            said = make(4, 1).said if found.kind != "test" else []
            print(f"--- {seed} {found.kind} {how}\n    {' '.join(said)}\n    {found.text}", flush=True)
    print(dict(table), f"{time.time() - begun:.0f} s")


main()
