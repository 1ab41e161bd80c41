"""Every choice alone, and every two of them: what fails with no choice to spare. ``python -m steps_gen.pairs``"""

from __future__ import annotations

import collections
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from steps_gen import plan as choices
from steps_gen.__main__ import tried
from steps_gen.judge import Setting, Verdict
from steps_gen.make import make
from steps_gen.plan import Plan

FIELDS: dict[str, tuple[Any, ...]] = {
    "network": choices.NETWORKS, "precision": choices.PRECISIONS, "scale": choices.SCALES,
    "rules": tuple((rule,) for rule in choices.RULES), "form": choices.FORMS, "decay": choices.DECAYS,
    "layout": choices.LAYOUTS, "clip": choices.CLIPS, "gate": choices.GATES,
    "tail": ((), *((tail,) for tail in choices.TAILS)), "mask": choices.MASKS, "average": choices.AVERAGES,
    "schedule": choices.SCHEDULES, "rates": choices.RATES, "batch": (4, 1), "function": (False, True),
    "widths": ((3, 4, 2), (3, 1, 2), (1, 1)), "loss": ("squares", "cross-entropy"), "frozen": (False, True),
    "metric": (False, True),
}  # fmt: skip


def singles() -> list[dict[str, Any]]:
    found = [{name: value} for name, values in FIELDS.items() for value in values[1:]]
    found += [{"gate": "flag", "gate_form": form} for form in choices.GATE_FORMS[1:]]
    found += [{"clip": clip, "clip_layout": kind} for clip in ("value", "norm", "global") for kind in choices.LAYOUTS[1:-1]]
    found += [{"tail": (tail,), "tail_on": "all", "rules": ("adam",)} for tail in choices.TAILS]
    return found


def outcome(said: dict[str, Any]) -> Verdict:
    return tried(replace(Plan(), **said), Setting(stage=0), verify=len(said) == 1)


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(exist_ok=True, parents=True)
    alone = singles()
    twos = [a | b for a, b in itertools.combinations(alone, 2) if not set(a) & set(b)]
    seen: dict[frozenset[str], str] = {}
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    counts: collections.Counter[str] = collections.Counter()
    with ProcessPoolExecutor(2) as pool:
        for said, verdict in zip(alone + twos, pool.map(outcome, alone + twos, chunksize=16)):
            counts[verdict.outcome] += 1
            if verdict.outcome == "proven":
                continue
            parts = {f"{name}={value}" for name, value in said.items()}
            if any(verdict.outcome == seen_out and set(few) < parts for few, seen_out in seen.items()):
                continue
            seen[frozenset(parts)] = verdict.outcome
            told = replace(Plan(), **said).told()
            kinds[verdict.kind if verdict.outcome != "WRONG" else "WRONG"].append(told)
            if verdict.outcome in ("WRONG", "alarm", "crash") or len(kinds[verdict.kind]) < 3:
                name = "".join(c if c.isalnum() else "_" for c in told)
                onnx.save(make(replace(Plan(), **said)).model, out / f"{verdict.outcome}__{name}.onnx")
    print(dict(counts))
    for kind, told in kinds.items():
        print(f"{len(told):5} {kind}")
        for each in told:
            print(f"        {each}")


if __name__ == "__main__":
    main()
