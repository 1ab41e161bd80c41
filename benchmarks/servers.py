"""What it costs to split a step between trainers and servers: ``python benchmarks/servers.py`` decides each target.

A GPT step is sharded on 8 ranks at stage 2, and split for 8 trainers and 8 servers, with tensors in pieces and whole:
CPU seconds of a process each, which a busy machine changes least. Targets: 20,000 nodes take at most twice as long as
sharding them, and a split grows linearly with the nodes. All of it takes about two minutes.
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

CASES = {
    "shard, 8 ranks": ["shard", "--ranks", "8"],
    "split, pieces": ["split", "--trainers", "8", "--servers", "8"],
    "split, whole": ["split", "--trainers", "8", "--servers", "8", "--slicing", "off"],
    "split, async": ["split", "--trainers", "8", "--servers", "8", "--mode", "async"],
}
BASE = "shard, 8 ranks"
SHARE, EXPONENT = 2.0, 1.05
"""The targets: times sharding at the largest graph; growth exponent."""


@dataclass(frozen=True)
class Measured:
    """One graph in one case: CPU seconds of the whole process, and MB resident at most."""

    nodes: int
    case: str
    cpu_s: float
    peak_mb: float


def measure(sizes: list[int]) -> list[Measured]:
    """Every case on every graph, once."""
    found = []
    with tempfile.TemporaryDirectory(prefix="gopt-servers-") as name:
        for size in sizes:
            model, out = Path(name, f"{size}.onnx"), Path(name, "out")
            nodes = build("gpt", size, model)
            for case, (verb, *options) in CASES.items():
                command = [sys.executable, "-m", "gopt.cli", verb, str(model), *options, "-o", str(out)]
                used = run_once(command)
                shutil.rmtree(out)
                found.append(Measured(nodes, case, used.cpu, used.peak))
                print(f"  {nodes:>7} nodes, {case:<16} {used.cpu:7.1f} s CPU {used.peak:7.0f} MB", file=sys.stderr)
    return found


def verdicts(found: list[Measured]) -> list[Verdict]:
    """Each target and what was measured."""
    seconds = {(each.nodes, each.case): each.cpu_s for each in found}
    sizes = sorted({each.nodes for each in found})
    last = sizes[-1]
    decided = []
    for case in CASES:
        if case == BASE:
            continue
        decided.append(
            Verdict(f"{case} at {last} nodes, of sharding", seconds[last, case] / seconds[last, BASE], SHARE)
        )
        if len(sizes) > 1:
            growth = math.log(seconds[last, case] / seconds[sizes[0], case]) / math.log(last / sizes[0])
            decided.append(Verdict(f"growth exponent, {case}", growth, EXPONENT))
    return decided


def main() -> int:
    """Returns 0 where every target holds, 1 where one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="5000,20000", metavar="N,…")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(sorted(map(int, given.nodes.split(","))))
    decided, note = verdicts(found), idle_note()
    if given.json:
        targets = [each.record() for each in decided]
        print(json.dumps({"cases": [asdict(each) for each in found], "targets": targets, "note": note}, indent=1))
    else:
        for each in decided:
            print(f"{'holds ' if each.holds else 'MISSED'} {each.what}: {each.value:.2f} (at most {each.limit})")
        print(note or "the machine is quiet")
    return 0 if all(each.holds for each in decided) else 1


if __name__ == "__main__":
    sys.exit(main())
