"""Time and peak memory of ``gopt prove``, beside loading the same rank files.

``python benchmarks/prove.py --nodes 5000,20000,100000 --ranks 8``: steps of ``graphs.py``, sharded at stage 2; each
measure in a process of its own. Growth is the exponent between the first and the last size.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOAD = "from gopt.ir.load import load; [load(p, own=True) for p in sorted(Path(sys.argv[1]).glob('rank_*.onnx'))]"
PROVE = "import gopt; proof = gopt.prove(sys.argv[1]); assert proof.proven, proof.open()[:1]"


def measured(code: str, folder: Path) -> tuple[float, float]:
    """Processor seconds and MiB of a piece of code in a process of its own, without the start of Python."""
    text = (
        "import sys, time, resource; from pathlib import Path; import gopt.verification.proof.prove; "
        "begun = time.process_time(); "
        f"{code}; print(time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", text, str(folder)], check=True, capture_output=True, text=True)
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
    import gopt

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
            begun = time.perf_counter()
            gopt.shard(step, arguments.ranks, stage=arguments.stage, prove=False).write(folder)
            shard = time.perf_counter() - begun
            load, _ = measured(LOAD, folder)
            prove, peak = measured(PROVE, folder)
            rows.append({"nodes": nodes, "shard_s": shard, "load_s": load, "prove_s": prove, "peak_mib": peak})
            if not arguments.json:
                seconds = f"shard {shard:6.2f} s  load {load:6.2f} s  prove {prove:6.2f} s"
                print(f"{nodes:>9} nodes  {seconds}  {peak:7.0f} MiB")
    first, last = rows[0], rows[-1]
    times, sizes = last["prove_s"] / first["prove_s"], last["nodes"] / first["nodes"]
    growth = math.log(times) / math.log(sizes) if len(rows) > 1 else 0.0
    if arguments.json:
        print(json.dumps({"ranks": arguments.ranks, "rows": rows, "growth": growth}, indent=1))
    else:
        print(f"growth: nodes to the power of {growth:.2f}")


if __name__ == "__main__":
    main()
