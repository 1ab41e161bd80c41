"""What it costs to split the computation: ``python benchmarks/split.py`` measures, and decides each target.

A GPT step is sharded on each of ``--meshes``, and at stage 2 on as many ranks: CPU seconds of a process each, which a
busy machine changes least. Targets: 20,000 nodes on dp=2,tp=4 take at most 2.5 times stage 2, and every mesh grows
linearly with the nodes. All of it takes about five minutes.
"""

from __future__ import annotations

import math
import sys

from cut import parser, report, verdicts

PLAIN = "shard=8"
MESHES = "dp=2,tp=4;dp=2,cp=4;dp=2,cp=2,tp=2"
SHARE = 2.5
"""The target: times stage 2 at the largest graph, for the first mesh."""


def main() -> int:
    """Returns 0 where every target holds, 1 where one does not."""
    options = parser(__doc__)
    options.add_argument("--meshes", default=MESHES, metavar="MESH;…")
    given = options.parse_args()
    meshes = given.meshes.split(";")
    cases = {mesh: ["shard", "--mesh", mesh, "--no-prove"] for mesh in [PLAIN, *meshes]}
    limits = {mesh: SHARE if mesh == meshes[0] else math.inf for mesh in meshes}
    return report(given, cases, lambda found: verdicts(found, PLAIN, limits))


if __name__ == "__main__":
    sys.exit(main())
