"""What benchmarks of cutting a step share: commands that are measured on graphs of several sizes, and targets."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shard import Verdict, build, idle_note, run_once

EXPONENT = 1.05
"""The target of growth with the nodes: the exponent, at most."""


@dataclass(frozen=True)
class Measured:
    """One graph in one case: CPU seconds of the whole process, and MB resident at most."""

    nodes: int
    case: str
    cpu_s: float
    peak_mb: float


def measure(sizes: Sequence[int], cases: Mapping[str, Sequence[str]]) -> list[Measured]:
    """Every case on every graph, once. ``cases``: name -> verb and options of a command."""
    found = []
    width = max(map(len, cases))
    with tempfile.TemporaryDirectory(prefix="gopt-cut-") as name:
        for size in sizes:
            model, out = Path(name, f"{size}.onnx"), Path(name, "out")
            nodes = build("gpt", size, model)
            for case, (verb, *options) in cases.items():
                command = [sys.executable, "-m", "gopt.cli", verb, str(model), *options, "-o", str(out)]
                used = run_once(command)
                shutil.rmtree(out)
                found.append(Measured(nodes, case, used.cpu, used.peak))
                print(f"  {nodes:>7} nodes, {case:<{width}} {used.cpu:7.1f} s CPU {used.peak:7.0f} MB", file=sys.stderr)
    return found


def verdicts(found: Sequence[Measured], base: str, shared: Mapping[str, float]) -> list[Verdict]:
    """Each target and what was measured. ``shared``: case -> how often the time of ``base`` it may take at the largest
    graph, infinite where only its growth is a target."""
    seconds = {(each.nodes, each.case): each.cpu_s for each in found}
    sizes = sorted({each.nodes for each in found})
    first, last = sizes[0], sizes[-1]
    decided = []
    for case, limit in shared.items():
        if limit < math.inf:
            times = seconds[last, case] / seconds[last, base]
            decided.append(Verdict(f"{case} at {last} nodes, of {base}", times, limit))
        if len(sizes) > 1:
            growth = math.log(seconds[last, case] / seconds[first, case]) / math.log(last / first)
            decided.append(Verdict(f"growth exponent, {case}", growth, EXPONENT))
    return decided


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options that all have; ``text``: the module's description."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--nodes", default="5000,20000", metavar="N,…")
    made.add_argument("--json", action="store_true")
    return made


def report(
    given: argparse.Namespace, cases: Mapping[str, Sequence[str]], decide: Callable[[list[Measured]], list[Verdict]]
) -> int:  # fmt: skip
    """Measure, and print targets and values. Returns 0 where every target holds, 1 where one does not."""
    found = measure(sorted(map(int, given.nodes.split(","))), cases)
    decided, note = decide(found), idle_note()
    if given.json:
        targets = [each.record() for each in decided]
        print(json.dumps({"cases": [asdict(each) for each in found], "targets": targets, "note": note}, indent=1))
    else:
        for each in decided:
            print(f"{'holds ' if each.holds else 'MISSED'} {each.what}: {each.value:.2f} (at most {each.limit})")
        print(note or "the machine is quiet")
    return 0 if all(each.holds for each in decided) else 1
