"""Processor time and peak memory of ``gopt prove``, beside loading the same rank files and writing them.

``python benchmarks/prove.py --nodes 5000,20000,100000 --ranks 8``: steps of ``graphs.py``, sharded at stage 2; each
measure in a process of its own, other processes of it included. The share is what the proof adds to ``gopt shard``, of
all it takes with it. Growth is the exponent between the first and the last size.

``python benchmarks/prove.py --targets``: the figures of issue 36, each beside its bound; half an hour on
two cores. ``--targets 20k,gpt2`` measures some of them.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOAD = "from gopt.ir.load import load; [load(p, own=True) for p in sorted(Path(sys.argv[1]).glob('rank_*.onnx'))]"
PROVE = "import gopt; proof = gopt.prove(sys.argv[1]); assert proof.proven, proof.open()[:1]"
SHARD = "import gopt; gopt.shard(sys.argv[1], {ranks}, stage={stage}, prove={prove}).write(sys.argv[2])"


@dataclass(frozen=True)
class Target:
    """A step, its ranks, and bounds: of the seconds of ``gopt prove``, of its memory in MiB, and of the share of the
    proof in ``gopt shard``."""

    make: tuple[tuple[str, ...], ...]
    """The arguments of Python for each script before ``{step}`` is there."""
    options: str
    """Of ``gopt.shard``, in Python."""
    seconds: float
    beyond_loading: bool = False
    """Whether the seconds for loading the files of the ranks are taken off."""
    mib: float = math.inf
    share: float | None = None


def _gpt(nodes: int) -> tuple[tuple[str, ...], ...]:
    return ((str(HERE / "graphs.py"), "gpt", str(nodes), "{step}"),)


HERE = Path(__file__).parent
TARGETS = {
    "20k": Target(_gpt(20_000), "mesh='shard=8', stage=2", 2, beyond_loading=True, share=0.25),
    "100k": Target(_gpt(100_000), "mesh='shard=8', stage=2", 6, beyond_loading=True, share=0.25),
    "1M": Target(_gpt(1_000_000), "mesh='shard=8', stage=2", 60, beyond_loading=True),
    "gpt2": Target(
        (("-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); from graphs import *; "
          "Path(sys.argv[1]).write_bytes(gpt(12, size=GPT2, clip=1.0).SerializeToString())", "{step}"),),
        "mesh='shard=1024'", 10,
    ),
    "llama": Target(
        ((str(HERE.parent / "examples/llama/forward.py"), "-o", "{step}.forward.onnx"),
         ("-m", "gopt", "derive", "{step}.forward.onnx", "--loss", "cross-entropy", "--class-axis", "-1", "--optimizer",
          "adamw", "--clip-norm", "1", "--trainable", "*.weight", "--no-values", "-q", "-o", "{step}")),
        "mesh='dp=8,shard=8,tp=8'", 60, mib=4096,
    ),
}  # fmt: skip
"""Llama: 405B weights, 126 layers."""


def measured(code: str, *arguments: Path) -> tuple[float, float]:
    """Processor seconds and MiB of a piece of code in a process of its own, without the start of Python."""
    text = (
        "import sys, os, resource; from pathlib import Path; import gopt, gopt.verbs.prove; gopt.shard, gopt.prove; "
        "begun = sum(os.times()[:4]); "
        f"{code}; print(sum(os.times()[:4]) - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def measure_targets(names: Sequence[str]) -> list[dict[str, object]]:
    """A row for each target, told when it is there."""
    rows: list[dict[str, object]] = []
    for name in names:
        target = TARGETS[name]
        with tempfile.TemporaryDirectory() as home:
            step, folder = Path(home, "step.onnx"), Path(home, "step.ranks")
            for arguments in target.make:
                command = [sys.executable, *(argument.replace("{step}", str(step)) for argument in arguments)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            shard = f"import gopt; gopt.shard(sys.argv[1], {target.options}, prove=%s).write(sys.argv[2])"
            alone, _ = measured(shard % False, step, folder)
            load = measured(LOAD, folder)[0] if target.beyond_loading else 0.0
            prove, peak = measured(PROVE, folder)
            row = {"target": name, "shard_s": alone, "load_s": load, "prove_s": prove, "peak_mib": peak}
            seconds = prove - load
            told = f"{name:>6}  {seconds:7.2f} s{' beyond loading' if load else ''}, asked {target.seconds:g}"
            told += f"; {peak:.0f} MiB" + ("" if math.isinf(target.mib) else f", asked {target.mib:g}")
            met = seconds <= target.seconds and peak <= target.mib
            if target.share is not None:
                proven, _ = measured(shard % True, step, Path(home, "proven"))
                row["share"] = share = (proven - alone) / proven
                told += f"; {share:.0%} of gopt shard, asked {target.share:.0%}"
                met &= share <= target.share
            rows.append({**row, "met": met})
            print(f"{told}: {'met' if met else 'missed'}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print a row for each size, and the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="5000,20000,100000")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--shape", default="gpt")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--targets", nargs="?", const=",".join(TARGETS), metavar="NAMES", help="of " + ", ".join(TARGETS)
    )
    arguments = parser.parse_args()
    if arguments.targets:
        print(json.dumps(measure_targets(arguments.targets.split(",")), indent=1))
        return
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
