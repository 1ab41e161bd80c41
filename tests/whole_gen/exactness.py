"""Whether what gopt says of the step of one large batch is so: no note, then equal; a note, then not; an option, then
equal with it."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rank_simulator import World

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.artifact.open_couplings import open_couplings
from gopt.errors import GoptError
from whole_gen.judge import Setting, Verdict, different, drawn, feeds_of, truth
from whole_gen.kinds import load_all
from whole_gen.writer import Writer

Make = Callable[[int, int], Writer]
TOLERANCE = 1e-8


def sharded(make: Make, how: Setting, folder: Path, seed: int, samples: int, **more: Any) -> tuple[list[Any], str]:
    """Shard a step; its couplings, and how its ranks differ from the source on all their samples ('' for not)."""
    w = make(samples, 1)
    parts = int(np.prod([int(each.split("=")[1]) for each in how.mesh.split(",")]))
    micro = w.options.get("accumulate", how.options.get("accumulate", 1)) if "statistics" not in more else 1
    options = {**how.options, **more, "accumulate": micro}
    whole = make(samples * parts * micro, parts * micro)
    path = folder / "step.onnx"
    onnx.save(w.model(), str(path))
    roles = RoleMap(states=dict(w.states), batch=list(w.batch))
    step = gopt.shard(gopt.load(str(path), roles=roles), how.mesh, **options)
    step.write(folder / "ranks", force=True)
    found = list(open_couplings(step.program))
    tries = range(seed, seed + (3 if found else 1))  # counts of a few samples are equal by chance now and then
    every = (_apart(w, whole, folder, feeds_of(w, parts, micro, data, samples)) for data in tries)
    return found, next(filter(None, every), "")


def _apart(w: Writer, whole: Writer, folder: Path, feeds: list[Any]) -> str:
    """How the ranks' states differ from the source's on all their samples."""
    start = {name: w.stored[name] for name in w.states}
    joined = [{name: np.concatenate([part[name] for turn in each for part in turn]) for name in w.batch} | w.hyper
              for each in feeds]  # fmt: skip
    expected = truth(whole.model(), w.states, start, joined)
    world = World(folder / "ranks")
    held = world.starts()
    for at, each in enumerate(feeds):
        world.step(held, world.dealt(each, w.hyper))
        wrong = different(world.whole(held), expected[at], expected[at - 1] if at else start, TOLERANCE)
        if wrong:
            return f"step {at}: {wrong}"
    return ""


def held(make: Make, how: Setting, seed: int, samples: int = 4) -> Verdict:
    """The law, for the default and for every option that a note calls exact."""
    folder = Path(tempfile.mkdtemp(prefix="exact-", dir="/tmp"))
    try:
        notes, wrong = sharded(make, how, folder, seed, samples)
        if bool(wrong) != bool(notes):
            doubts = all(each.kind.value == "unknown" for each in notes)
            if wrong or not doubts:
                return Verdict("SILENT" if wrong else "FALSE", f"{wrong} {[each.what for each in notes]}")
        options = {found for each in notes for found in re.findall(r"--loss-reduction (\S+) is exact$", each.exact)}
        for option in sorted(options):
            left, wrong = sharded(make, how, folder, seed, samples, loss_reduction=option)
            if wrong or left:
                others = [each for each in notes if "loss-reduction" not in each.exact]
                if not others:
                    return Verdict("ADVICE", f"--loss-reduction {option}: {wrong} {[each.what for each in left]}")
        if any("--statistics sync" in each.exact for each in notes):
            try:
                beside = [each for each in options if not each.startswith("weighted")]
                more = {"loss_reduction": beside[0]} if beside else {}
                left, wrong = sharded(make, how, folder, seed, samples, statistics="sync", **more)
            except GoptError as error:
                return Verdict("refused", str(error))
            if bool(wrong) != bool(left):
                return Verdict("SYNC", f"{wrong} {[each.what for each in left]}")
        kinds = "+".join(sorted({each.kind.value for each in notes})) or "exact"
        return Verdict("right", kinds)
    except GoptError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception:
        return Verdict("crash", traceback.format_exc()[-1500:])
    finally:
        shutil.rmtree(folder)


def of_kind(name: str, seed: int) -> Verdict:
    """The law for a fresh step of a kind."""

    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        load_all()[name](w)
        return w

    how = drawn(seed, ["shard=2", "dp=2", "shard=3", "dp=2,shard=2"])
    return held(make, how, seed, samples=(4, 4, 5, 6, 2)[seed % 5])


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    names = sys.argv[3:] or [n for n, f in load_all().items() if f.__module__.endswith("kinds_reduction")]
    table: Counter[str] = Counter()
    begun = time.time()
    for seed in range(first, first + count):
        name = names[seed % len(names)]
        found = of_kind(name, seed)
        table[f"{found.kind} {found.text}" if found.kind == "right" else found.kind] += 1
        if found.kind != "right":
            print(f"--- {seed} {name} {found.kind}\n    {found.text}", flush=True)
    print(*sorted(table.items()), f"{time.time() - begun:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
