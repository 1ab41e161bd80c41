"""Ranks of one drawn setting train, go on as ranks of another, and every reader reads both folders."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from draws import Verdict
from gopt.cli.main import main
from onnx import numpy_helper

import gopt
from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.verification import sampling
from option_gen.make import Setting

STEPS = 2
States = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Life:
    """The settings before and after ``gopt reshard``, of one step."""

    before: Setting
    after: Setting

    @classmethod
    def draw(cls, seed: int) -> Life:
        before = Setting.draw(seed)
        return cls(before, Setting.draw(random.Random(f"life {seed}").randrange(1 << 30), before.step))

    def told(self) -> str:
        """As two command lines."""
        return f"{self.before.told()}, then {' '.join(self.after.words())}"


def judge(life: Life, folder: Path) -> Verdict:
    """``right``; ``refused``, by either setting; ``unproven``, the new ranks; ``WRONG`` and ``CRASH`` are faults."""
    try:
        return _judged(life, folder)
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-4))


def _judged(life: Life, folder: Path) -> Verdict:
    step, first, second = life.before.file(folder), folder / "first", folder / "second"
    try:
        gopt.shard(step, life.before.mesh, **life.before.options).write(first)
    except (OptionError, UnsupportedError) as error:
        return Verdict("refused", str(error))
    trained = _trained(step, first, folder / "kept")
    due = _states(trained, folder / "trained.onnx")
    code = main(["reshard", str(trained), *life.after.words(), "-o", str(second), "--quiet"])
    if code in (OptionError.exit_code, UnsupportedError.exit_code):
        return Verdict("refused", "gopt reshard refuses the second setting")
    if code:
        return Verdict("CRASH", f"gopt reshard ends with {code}")
    found = _states(second, folder / "moved.onnx")
    for name in {**due, **found}:
        if name not in due or name not in found or due[name].tobytes() != found[name].tobytes():
            return Verdict("WRONG", f"{name} was {due.get(name)}, and is {found.get(name)} on the new ranks")
    for path in (first, second):
        for read in (gopt.inspect, gopt.explain, gopt.report):
            json.dumps(read(path).to_json())
    gopt.diff(first, second)
    gopt.provenance(second)
    _states(_trained(step, second, folder / "again"), folder / "again.onnx")
    proof = json.loads((second / "report.json").read_text())["proof"]
    return Verdict("right" if proof["verdict"] == "proven" else "unproven", proof["reason"])


def _trained(step: Path, ranks: Path, kept: Path) -> Path:
    """The last checkpoint of a short training, on drawn samples and, where the ranks have none, start values."""
    source = gopt.load(step).training
    start = kept.with_suffix(".npz")
    drawn = np.random.default_rng(1)
    np.savez(start, **{state.tensor: sampling.initial_state(source, state, drawn) for state in source.states})
    settings = {name: float(sampling.hyper(source, name)) for name in source.hyper}
    return gopt.run(ranks, _batches(source), STEPS, checkpoint=kept, settings=settings, state=str(start)).path


def _batches(source: TrainingGraph) -> Iterator[dict[str, np.ndarray]]:
    ranges = sampling.without_ignored(sampling.integer_ranges(source))
    for number in range(1000):
        yield sampling.draw_inputs(source, source.batch, np.random.default_rng(number), ranges)


def _states(what: Path, model: Path) -> States:
    gopt.merge(what, model)
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(model).graph.initializer}
