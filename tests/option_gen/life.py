"""Ranks of a drawn setting train, and go on as trainers and servers, or as ranks of another; every reader reads the
folders."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
SPLITS = (
    ("--slicing", ("off", "classic"), 0.4), ("--minimum", ("16", "100"), 0.4), ("--accumulate", ("2",), 0.2),
    ("--placement", ("round-robin", "hash"), 0.4), ("--mode", ("async", "half-async", "geo"), 0.4),
    ("--bucket-mb", ("0", "0.001"), 0.3), ("--rows", ("lazy",), 0.2), ("--pull", ("end",), 0.2),
)  # fmt: skip
"""An option of ``gopt split``, its values, and how often one is drawn."""


@dataclass(frozen=True, slots=True)
class Life:
    """A setting, and behind it the words of ``gopt reshard``, once or more."""

    before: Setting
    after: tuple[tuple[str, ...], ...]

    @classmethod
    def draw(cls, seed: int) -> Life:
        before, r = Setting.draw(seed), random.Random(f"life {seed}")
        ranks = (*Setting.draw(r.randrange(1 << 30), before.step).words(),)
        if r.random() < 0.7:
            return cls(before, (ranks,))
        return cls(before, (split_words(r), ranks))

    def told(self) -> str:
        """As command lines."""
        return ", then ".join([self.before.told(), *map(" ".join, self.after)])


def split_words(r: random.Random) -> tuple[str, ...]:
    """Options of ``gopt split``."""
    words = ["--trainers", r.choice("123"), "--servers", r.choice("123")]
    for option, values, often in SPLITS:
        words += [option, r.choice(values)] if r.random() < often else []
    return (*words,)


def judge(life: Life, folder: Path) -> Verdict:
    """``right``; ``refused``, by some setting; ``unproven``, the last ranks; ``WRONG`` and ``CRASH`` are faults."""
    try:
        return _judged(life, folder)
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-4))


def _judged(life: Life, folder: Path) -> Verdict:
    step, home, proof = life.before.file(folder), folder / "0", None
    try:
        gopt.shard(step, life.before.mesh, **life.before.options).write(home)
    except (OptionError, UnsupportedError) as error:
        return Verdict("refused", str(error))
    kept = first = _trained(step, home)
    due = _states(kept)
    for number, words in enumerate(life.after, 1):
        before, home = home, folder / str(number)
        code = main(["reshard", str(kept), *words, "-o", str(home), "--quiet"])
        if code in (OptionError.exit_code, UnsupportedError.exit_code):
            home = before  # and the next setting is tried
            continue
        if code:
            return Verdict("CRASH", f"gopt reshard ends with {code}")
        found = _states(home)
        for name in {**due, **found}:
            if name not in due or name not in found or due[name].tobytes() != found[name].tobytes():
                return Verdict("WRONG", f"{name} was {due.get(name)}, and is {found.get(name)} in folder {number}")
        for read in (gopt.inspect, gopt.explain, gopt.report):
            json.dumps(read(home).to_json())
        gopt.diff(before, home)
        gopt.provenance(home)
        kept = _trained(step, home)
        due = _states(kept)
        proof = json.loads((home / "report.json").read_text()).get("proof")
    if kept == first:
        return Verdict("refused", "gopt reshard refuses all settings")
    proven = proof is None or proof["verdict"] == "proven"
    return Verdict("right" if proven else "unproven", "" if proof is None else proof["reason"])


def _trained(step: Path, home: Path) -> Path:
    """The last checkpoint of a short training, on drawn samples and, where the folder has none, start values. Raises
    InvariantError where a training that is continued ends in other states than one without a stop."""
    source = gopt.load(step).training
    start = home.with_suffix(".npz")
    drawn = np.random.default_rng(1)
    np.savez(start, **{state.tensor: sampling.initial_state(source, state, drawn) for state in source.states})

    def run(steps: int, **options: Any) -> gopt.Run:
        settings = {name: float(sampling.hyper(source, name)) for name in source.hyper}
        return gopt.run(home, _batches(source), steps, settings=settings, state=str(start), **options)

    kept = home.with_suffix(".kept")
    run(1, checkpoint=kept)
    continued = run(STEPS, checkpoint=kept, resume=True)
    if [*home.glob("rank_0000*.onnx")] and not source.random:  # trainers and servers may run apart, and draws differ
        straight = run(STEPS).states
        for name, value in continued.states.items():
            if value.tobytes() != straight[name].tobytes():
                raise gopt.InvariantError(f"{name} is {value} in a training that is continued, and {straight[name]}")
    return continued.path


def _batches(source: TrainingGraph) -> Iterator[dict[str, np.ndarray]]:
    ranges = sampling.without_ignored(sampling.integer_ranges(source))
    for number in range(1000):
        yield sampling.draw_inputs(source, source.batch, np.random.default_rng(number), ranges)


def _states(what: Path) -> States:
    model = next(folder for folder in what.parents if not folder.suffix) / f"{what.parent.name}.{what.name}.onnx"
    gopt.merge(what, model)
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(model).graph.initializer}
