"""What it costs to split the computation: ``python benchmarks/split.py`` measures, and decides each target.

A GPT step is sharded on each of ``--meshes``, and at stage 2 on as many ranks: CPU seconds of a process each, which a
busy machine changes least. Targets: 20,000 nodes on dp=2,tp=4 take at most 2.5 times stage 2, and every mesh grows
linearly with the nodes. All of it takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from shard import Verdict, build, idle_note, run_once

PLAIN = "shard=8"
MESHES = "dp=2,tp=4;dp=2,cp=4;dp=2,cp=2,tp=2"
SHARE, EXPONENT = 2.5, 1.05
"""The targets: times stage 2 at the largest graph, for the first mesh; growth exponent of each mesh."""


@dataclass(frozen=True)
class Measured:
    """One graph on one mesh: CPU seconds of the whole process, and MB resident at most."""

    nodes: int
    mesh: str
    cpu_s: float
    peak_mb: float


def measure(sizes: list[int], meshes: list[str]) -> list[Measured]:
    """Every mesh on every graph, once."""
    found = []
    with tempfile.TemporaryDirectory(prefix="gopt-split-") as name:
        for size in sizes:
            model, out = Path(name, f"{size}.onnx"), Path(name, "out")
            nodes = build("gpt", size, model)
            for mesh in [PLAIN, *meshes]:
                command = [sys.executable, "-m", "gopt.cli", "shard", str(model), "--mesh", mesh, "-o", str(out)]
                used = run_once(command)
                shutil.rmtree(out)
                found.append(Measured(nodes, mesh, used.cpu, used.peak))
                print(f"  {nodes:>7} nodes on {mesh:<20} {used.cpu:7.1f} s CPU {used.peak:7.0f} MB", file=sys.stderr)
    return found


def verdicts(found: list[Measured], meshes: list[str]) -> list[Verdict]:
    """Each target and what was measured."""
    seconds = {(each.nodes, each.mesh): each.cpu_s for each in found}
    sizes = sorted({each.nodes for each in found})
    last = sizes[-1]
    decided = [
        Verdict(f"{meshes[0]} at {last} nodes, of stage 2", seconds[last, meshes[0]] / seconds[last, PLAIN], SHARE)
    ]
    if len(sizes) > 1:
        steps = math.log(last / sizes[0])
        for mesh in meshes:
            growth = math.log(seconds[last, mesh] / seconds[sizes[0], mesh]) / steps
            decided.append(Verdict(f"growth exponent on {mesh}", growth, EXPONENT))
    return decided


def main() -> int:
    """Returns 0 where every target holds, 1 where one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="5000,20000", metavar="N,…")
    parser.add_argument("--meshes", default=MESHES, metavar="MESH;…")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    meshes = given.meshes.split(";")
    found = measure(sorted(map(int, given.nodes.split(","))), meshes)
    decided, note = verdicts(found, meshes), idle_note()
    if given.json:
        records = {
            "cases": [asdict(each) for each in found],
            "targets": [each.record() for each in decided],
            "note": note,
        }
        print(json.dumps(records, indent=1))
    else:
        for each in decided:
            print(f"{'holds ' if each.holds else 'MISSED'} {each.what}: {each.value:.2f} (at most {each.limit})")
        print(note or "the machine is quiet")
    return 0 if all(each.holds for each in decided) else 1


if __name__ == "__main__":
    sys.exit(main())
