"""Size of the HTML page: ``python benchmarks/html_report.py mlp:20000 gpt:20000``.

The limit is 3 MB for 20,000 nodes on 8 ranks. Exits 1 where a page is over its limit.
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
from gopt.offline.html_report import page_text, report_page

RANKS = 8
NODES, LIMIT = 20_000, 3_000_000
"""Nodes of a step, and bytes of its page at most; more nodes have more in proportion."""


def measure(shape: str, nodes: int) -> tuple[int, int, float]:
    """Nodes, bytes of the page, and CPU seconds to make it from the output folder."""
    with tempfile.TemporaryDirectory() as home:
        path, folder = Path(home, "step.onnx"), Path(home, "step.ranks")
        onnx.save(build(shape, nodes), path)
        made = gopt.shard(gopt.load(path), RANKS, prove=False)
        made.write(folder)
        start = time.process_time()
        size = len(page_text(report_page(folder)).encode())
        return len(made.source.training.graph.nodes), size, time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["mlp:20000", "gpt:20000"], metavar="SHAPE:NODES")
    over = False
    for case in parser.parse_args().cases:
        shape, _, count = case.partition(":")
        nodes, size, seconds = measure(shape, int(count))
        most = LIMIT * max(nodes / NODES, 1)
        over |= size > most
        print(f"{shape} {nodes} nodes, {RANKS} ranks: {size:,} bytes (limit {most:,.0f}), {seconds:.2f} CPU s")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
