"""Size of the report and the CPU time to make it: ``python benchmarks/report_size.py mlp:20000 gpt:20000 mlp:100000``.

Limits on 8 ranks: 1 MB for 20,000 nodes, 5 MB for 100,000. Exits 1 where a report is over its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import onnx

sys.path.insert(0, str(Path(__file__).parent))
from graphs import build

import gopt

RANKS = 8
LIMITS = {20_000: 1_000_000, 100_000: 5_000_000}
"""Nodes -> bytes of the report at most."""


def limit(nodes: int) -> float:
    """Bytes at most: of a graph with as many nodes in the table, in proportion elsewhere."""
    nearest = min(LIMITS, key=lambda each: abs(each - nodes))
    return LIMITS[nearest] * max(nodes / nearest, 1)


def measure(shape: str, nodes: int) -> tuple[int, int, float]:
    """Nodes, bytes of the report, and CPU seconds to make its text."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "step.onnx")
        onnx.save(build(shape, nodes), path)
        made = gopt.shard(gopt.load(path), RANKS)
        start = time.process_time()
        size = sum(len(piece.encode()) for piece in made.report().pieces())
        return len(made.source.training.graph.nodes), size, time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["mlp:20000", "gpt:20000", "mlp:100000"], metavar="SHAPE:NODES")
    over = False
    for case in parser.parse_args().cases:
        shape, _, count = case.partition(":")
        nodes, size, seconds = measure(shape, int(count))
        most = limit(nodes)
        over |= size > most
        print(f"{shape} {nodes} nodes, {RANKS} ranks: {size:,} bytes (limit {most:,.0f}), {seconds:.2f} CPU s")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
