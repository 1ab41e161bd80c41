"""Splits a step between trainers and servers, simulates the split, and compares states with the source's on the whole
batch."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from split_gen.judge import Setting
from split_gen.simulator import Simulation

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import StateKind
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import GoptError, InvariantError, OptionError
from whole_gen.judge import Verdict, different, feeds_of, truth
from whole_gen.writer import Writer


def drawn_split(seed: int) -> Setting:
    """How a step of a seed is split; no halves on the wire, which round."""
    r = random.Random(seed * 17 + 3)
    accumulate = r.choice([1, 1, 1, 3])
    return Setting(
        trainers=r.choice([1, 2, 3]), servers=r.choice([1, 2, 3, 5]), slicing=r.choice(["off", "classic", "balanced"]),
        minimum=r.choice([1, 2, 5, 16]), placement=r.choice(["round-robin", "hash", "bytes"]),
        pull=r.choice(["", "start", "end"]) if accumulate == 1 else "", accumulate=accumulate,
        cap=r.choice([4 << 20, 64, 1]),
        tables=r.choice(["", "", "modulo", "range", "columns", "whole"]) if accumulate == 1 else "",
    )  # fmt: skip


def judged_split(
    make: Callable[[int, int], Writer], how: Setting, seed: int = 0, samples: int = 4, told: bool = False,
    tolerance: float = 1e-7, verify: bool = False,
) -> Verdict:  # fmt: skip
    """As ``judged``. gopt must read what it wrote."""
    w, parts = make(samples, 1), how.trainers * how.accumulate
    whole = make(samples * parts, parts)
    folder = Path(tempfile.mkdtemp(prefix="attack-", dir="/tmp"))
    try:
        path = folder / "step.onnx"
        onnx.save(w.model(), str(path))
        reduction = w.options.get("loss_reduction", "mean")
        feeds = feeds_of(w, how.trainers, how.accumulate, seed, samples)
        try:
            roles = RoleMap("loss" if "loss" in w.outputs else "", dict(w.states) if told else {})
            source, how = gopt.load(str(path), roles=roles), replace(how, reduce=reduction)
            try:
                made = gopt.split(source, how.options())
            except OptionError:  # it has no table
                made = gopt.split(source, replace(how, tables="").options())
            made.write(folder / "split")
        except InvariantError as error:
            return Verdict("invariant", str(error))
        except GoptError as error:
            return Verdict("refused", f"{type(error).__name__}: {error} | {'; '.join(getattr(error, 'hints', ()))}")
        except Exception:
            return Verdict("crash", traceback.format_exc())
        try:
            read_manifest(folder / "split")
        except GoptError as error:
            return Verdict("unreadable", str(error))
        couplings = json.loads((folder / "split/report.json").read_text())["couplings"]
        own = {each.tensor for each in source.training.states if each.kind is StateKind.STATISTIC}
        start = {name: w.stored[name] for name in w.states}
        joined = [{name: np.concatenate([part[name] for turn in step for part in turn]) for name in w.batch} | w.hyper
                  for step in feeds]  # fmt: skip
        expected = truth(whole.model(), w.states, start, joined)
        simulation = Simulation(folder / "split", dict(start))
        for at, step in enumerate(feeds):
            simulation.round([[turn[t] for turn in step] for t in range(how.trainers)], w.hyper)
            found = simulation.states()
            for name in {*w.apart, *own} if parts > 1 else ():  # the chief's own counts
                expected[at][name] = found[name]
            wrong = different(found, expected[at], expected[at - 1] if at else start, tolerance)
            if wrong:  # a step that gopt says is not the step of one large batch may differ
                return Verdict("noted" if couplings else "WRONG", f"step {at}: {wrong}")
        if verify:
            result = gopt.verify(folder / "split", steps=2)
            if result.outcome != "equal":
                return Verdict({"different": "alarm"}.get(result.outcome, "unconfirmed"), str(result.to_json())[:2000])
        return Verdict("right")
    except Exception as error:
        return Verdict("WRONG", f"{error!r} {traceback.format_exc()[-900:]}")
    finally:
        shutil.rmtree(folder)
