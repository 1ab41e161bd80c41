"""Processor time and peak memory of ``gopt prove``, beside loading the same rank files and writing them.

``python benchmarks/prove.py --nodes 5000,20000,100000 --ranks 8``: steps of ``graphs.py``, sharded at stage 2; each
measure in a process of its own, other processes of it included. The share is what the proof adds to ``gopt shard``, of
all it takes with it. Growth is the exponent between the first and the last size.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = "from gopt.ir.load import load; [load(p, own=True) for p in sorted(Path(sys.argv[1]).glob('rank_*.onnx'))]"
PROVE = "import gopt; proof = gopt.prove(sys.argv[1]); assert proof.proven, proof.open()[:1]"
SHARD = "import gopt; gopt.shard(sys.argv[1], {ranks}, stage={stage}, prove={prove}).write(sys.argv[2])"


def measured(code: str, *arguments: Path) -> tuple[float, float]:
    """Processor seconds and MiB of a piece of code in a process of its own, without the start of Python."""
    text = (
        "import sys, os, resource; from pathlib import Path; import gopt.verification.proof.prove; "
        "begun = sum(os.times()[:4]); "
        f"{code}; print(sum(os.times()[:4]) - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def main() -> None:
    """Print a row for each size, and the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="5000,20000,100000")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--shape", default="gpt")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for nodes in map(int, arguments.nodes.split(",")):
            step, folder = Path(home, f"{nodes}.onnx"), Path(home, f"{nodes}.ranks")
            command = [
                sys.executable,
                str(Path(__file__).with_name("graphs.py")),
                arguments.shape,
                str(nodes),
                str(step),
            ]
            subprocess.run(command, check=True)
            shard = {"ranks": arguments.ranks, "stage": arguments.stage}
            alone, _ = measured(SHARD.format(**shard, prove=False), step, folder)
            proven, _ = measured(SHARD.format(**shard, prove=True), step, Path(home, f"{nodes}.proven"))
            load, _ = measured(LOAD, folder)
            prove, peak = measured(PROVE, folder)
            rows.append({
                "nodes": nodes, "shard_s": alone, "proven_s": proven, "share": (proven - alone) / proven,
                "load_s": load, "prove_s": prove, "peak_mib": peak,
            })  # fmt: skip
            if not arguments.json:
                shards = f"shard {alone:6.2f} s, with proof {proven:6.2f} s ({rows[-1]['share']:.0%})"
                print(f"{nodes:>9} nodes  {shards}  load {load:6.2f} s  prove {prove:6.2f} s  {peak:7.0f} MiB")
    first, last = rows[0], rows[-1]
    times, sizes = last["prove_s"] / first["prove_s"], last["nodes"] / first["nodes"]
    growth = math.log(times) / math.log(sizes) if len(rows) > 1 else 0.0
    if arguments.json:
        print(json.dumps({"ranks": arguments.ranks, "rows": rows, "growth": growth}, indent=1))
    else:
        print(f"growth: nodes to the power of {growth:.2f}")


if __name__ == "__main__":
    main()
