"""What ``gopt inspect`` costs against ``gopt shard`` at 100,000 nodes, and ``gopt verify`` of 8 ranks at 20,000.

``python benchmarks/reading.py``; CPU seconds of a process, which a busy machine changes least, and wall seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from shard import HERE, Usage, Verdict, idle_note, run_once

FORMS = {"one counter": [], "own counters": ["--own-steps"], "global-norm clip": ["--clip", "1"]}
"""Steps of which the optimizer must be recognised: with all that updates share, with counters of their own, clipped."""
GOPT = [sys.executable, "-P", "-m", "gopt.cli"]
SHARD = [*GOPT, "shard", "--ranks", "8", "--no-prove"]


def build(nodes: int, path: Path, options: list[str]) -> None:
    run_once([sys.executable, str(HERE / "graphs.py"), "gpt", str(nodes), str(path), *options])


def inspection(nodes: int, folder: Path, repeat: int) -> list[Verdict]:
    """CPU seconds of inspect over those of shard, the best of ``repeat`` runs each."""
    found = []
    for form, options in FORMS.items():
        model = folder / "step.onnx"
        build(nodes, model, options)
        commands = {
            "inspect": [*GOPT, "inspect", str(model), "--json"],
            "shard": [*SHARD, str(model), "-o", str(folder / "ranks"), "--force", "--json"],
        }
        best = {name: _best([run_once(command) for _ in range(repeat)]) for name, command in commands.items()}
        print(f"{nodes} nodes, {form}: inspect {best['inspect'].cpu:.1f} s, shard {best['shard'].cpu:.1f} s (CPU)")
        found.append(Verdict(f"inspect / shard, {form}", best["inspect"].cpu / best["shard"].cpu, 1.5))
    return found


def verification(nodes: int, folder: Path, repeat: int) -> Verdict:
    """Wall seconds of verify, the best of ``repeat`` runs."""
    model, ranks = folder / "step.onnx", folder / "ranks"
    build(nodes, model, [])
    run_once([*SHARD, str(model), "-o", str(ranks), "--force", "--json"])
    best = _best([run_once([*GOPT, "verify", str(ranks), "--json"]) for _ in range(repeat)])
    print(f"{nodes} nodes x 8 ranks: verify {best.seconds:.1f} s, {best.cpu:.1f} s of CPU, {best.peak:.0f} MiB")
    return Verdict("verify, seconds", best.seconds, 60)


def _best(runs: list[Usage]) -> Usage:
    return min(runs, key=lambda usage: usage.cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inspect-nodes", type=int, default=100_000)
    parser.add_argument("--verify-nodes", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the verdicts")
    given = parser.parse_args()
    print(idle_note())
    with tempfile.TemporaryDirectory() as name:
        found = inspection(given.inspect_nodes, Path(name), given.repeat)
        found.append(verification(given.verify_nodes, Path(name), given.repeat))
    for verdict in found:
        print(
            f"{'holds' if verdict.holds else 'FAILS'}  {verdict.what}: {verdict.value:.2f} (at most {verdict.limit:g})"
        )
    if given.json:
        Path(given.json).write_text(json.dumps([verdict.record() for verdict in found], indent=1))
    return 0 if all(verdict.holds for verdict in found) else 1


if __name__ == "__main__":
    sys.exit(main())
