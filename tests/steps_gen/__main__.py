"""Fresh steps, one after the other: a table of outcomes, and the models that gopt got wrong."""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import onnx

from steps_gen.judge import GOOD, Setting, Verdict, judge
from steps_gen.make import make
from steps_gen.plan import Plan, draw


def setting(seed: int) -> Setting:
    """How the step of a seed is sharded."""
    r = random.Random(seed * 7 + 1)
    return Setting(
        r.choice(["shard=2", "shard=3", "shard=3", "dp=2", "dp=2,shard=2"]),
        r.choice([0, 1, 2, 3]),
        r.choice(["flat", "flat", "rows", "whole"]),
        r.choice([1, 1, 1, 1, 3]),
    )


def tried(plan: Plan, how: Setting, verify: bool = True) -> Verdict:
    try:
        return judge(make(plan), how, verify)
    except Exception as error:
        return Verdict("crash", f"the test itself: {error!r}\n{traceback.format_exc()}")


def alike(plan: Plan) -> Plan:
    """The same with layers and batch of one size, 1 to 3: shapes tell nothing apart."""
    size = 1 + plan.seed % 3
    return replace(plan, widths=(size,) * len(plan.widths), batch=size)


def one(seed: int) -> tuple[int, Verdict]:
    return seed, tried(draw(seed), setting(seed))


def one_alike(seed: int) -> tuple[int, Verdict]:
    return seed, tried(alike(draw(seed)), setting(seed))


Case = tuple[Plan, Setting, Verdict]


def simpler(plan: Plan, how: Setting) -> Iterator[tuple[Plan, Setting]]:
    """The same with one choice fewer; plain ways to shard first."""
    for plain in (Setting(stage=0), Setting()):
        if how not in (Setting(stage=0), plain):
            yield plan, plain
    for smaller in plan.smaller():
        yield smaller, how


def smallest(case: Case, budget: int = 80) -> Case:
    """The plainest case of the same outcome that is found by taking choices away one by one."""
    plan, how, verdict = case
    for other, where in simpler(plan, how):
        budget -= 1
        found = tried(other, where, verdict.outcome != "WRONG")
        if found.outcome == verdict.outcome and (found.outcome == "WRONG" or found.kind == verdict.kind):
            return smallest((other, where, found), budget)
        if budget <= 0:
            break
    return case


def sweep(seeds: range, jobs: int, of: Callable[[int], tuple[int, Verdict]]) -> Iterator[tuple[int, Verdict]]:
    if jobs == 1:
        yield from map(of, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(of, seeds, chunksize=4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="steps_gen", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**8))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("failing"), help="where failing models are written")
    parser.add_argument("--shrink", type=int, default=2, help="how many of each kind are made small")
    parser.add_argument("--alike", action="store_true", help="layers and batch of one size, 1 to 3")
    options = parser.parse_args()
    drawn = (lambda seed: alike(draw(seed))) if options.alike else draw
    print(f"seeds {options.seed} to {options.seed + options.count - 1}", flush=True)
    outcomes: collections.Counter[str] = collections.Counter()
    kinds: dict[str, list[tuple[int, Verdict]]] = {}
    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    for seed, verdict in sweep(seeds, options.jobs, one_alike if options.alike else one):
        outcomes[verdict.outcome] += 1
        if verdict.outcome not in GOOD:
            print(f"seed {seed}: {verdict.kind}: {drawn(seed).told()}", file=sys.stderr, flush=True)
        if verdict.outcome != "proven":
            key = verdict.outcome + f" (verify {verdict.verify})" if verdict.outcome == "WRONG" else verdict.kind
            kinds.setdefault(key, []).append((seed, verdict))
    print(f"{options.count} steps in {time.monotonic() - began:.0f} s")
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):6} {kind}")
        told: set[str] = set()
        for seed, verdict in found[: options.shrink]:
            plan, how, last = smallest((drawn(seed), setting(seed), verdict))
            if plan.told() in told:
                continue
            told.add(plan.told())
            print(f"         seed {seed}: {how.mesh} stage {how.stage} {how.partition} x{how.micro}: {plan.told()}")
            print(f"           {last.why.strip().splitlines()[0][:200] if last.why else ''}", flush=True)
            options.out.mkdir(exist_ok=True, parents=True)
            onnx.save(make(plan).model, options.out / f"{verdict.outcome}_{seed}.onnx")
    return 0 if set(outcomes) <= set(GOOD) else 1


if __name__ == "__main__":
    raise SystemExit(main())
