"""Ranks of a drawn setting train, and go on as trainers and servers, or as ranks of another; every reader reads the
folders."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from draws import Verdict
from gopt.cli.main import main
from onnx import numpy_helper

import gopt
from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.offline.folder_contents import read_folder
from gopt.verification import sampling
from option_gen.make import Setting, written

STEPS, MOST_PROCESSES = 2, 4
States = dict[str, np.ndarray]
SPLITS = (
    ("--slicing", ("off", "classic"), 0.4), ("--minimum", ("16", "100"), 0.4), ("--accumulate", ("2",), 0.2),
    ("--placement", ("round-robin", "hash"), 0.4), ("--mode", ("async", "half-async", "geo"), 0.4),
    ("--bucket-mb", ("0.0001", "0.001"), 0.3), ("--rows", ("lazy",), 0.2), ("--pull", ("end",), 0.2),
)  # fmt: skip
"""An option of ``gopt split``, its values, and how often one is drawn."""


@dataclass(frozen=True, slots=True)
class Life:
    """A setting, and behind it the words of ``gopt reshard``, once or more. ``engine``: of folders of few ranks, or
    trainers and servers; others run as threads."""

    before: Setting
    after: tuple[tuple[str, ...], ...]
    engine: str = "threads"

    @classmethod
    def draw(cls, seed: int, step: str | None = None) -> Life:
        before, r = Setting.draw(seed, step), random.Random(f"life {seed}")
        ranks = (*Setting.draw(r.randrange(1 << 30), before.step).words(),)
        after = (ranks,) if r.random() < 0.7 else (split_words(r), ranks)
        return cls(before, after, "mpi" if r.random() < 0.1 else "threads")

    def told(self) -> str:
        """As command lines."""
        words = ", then ".join([self.before.told(), *map(" ".join, self.after)])
        return words if self.engine == "threads" else f"{words}, by {self.engine}"


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
    home, proof = folder / "0", None
    try:
        step = life.before.file(folder)
        gopt.shard(step, life.before.mesh, **life.before.options(folder)).write(home)
    except (InputError, OptionError, UnsupportedError) as error:
        return Verdict("refused", str(error))
    source = _source(str(step))
    if any(sampling.hyper(source, name).size > 1 for name in source.hyper):
        return Verdict("refused", "a setting of several numbers, which --set does not take")
    kept, due = first, _ = _trained(step, home, life.engine)
    for number, words in enumerate(life.after, 1):
        before, home = home, folder / str(number)
        words = tuple(written(word, folder) for word in words)
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
        kept, due = _trained(step, home, life.engine)
        proof = json.loads((home / "report.json").read_text()).get("proof")
    if kept == first:
        return Verdict("refused", "gopt reshard refuses all settings")
    proven = proof is None or proof["verdict"] == "proven"
    return Verdict("right" if proven else "unproven", "" if proof is None else proof["reason"])


def _trained(step: Path, home: Path, engine: str) -> tuple[Path, States]:
    """The last checkpoint of a short training and its states: on drawn samples and, where the folder has none, start
    values. Raises InvariantError for another end without a stop, or by threads."""
    source = _source(str(step))
    manifest = json.loads((home / "manifest.json").read_text())
    start, data = home.with_suffix(".npz"), home.with_suffix(".py")
    drawn = np.random.default_rng(1)
    np.savez(start, **{state.tensor: sampling.initial_state(source, state, drawn) for state in source.states})
    path = [str(Path(__file__).parents[1])]
    data.write_text(f"import sys\nsys.path[:0] = {path}\nfrom option_gen.life import Batches\n"
                    f"batches = Batches({str(step)!r})\n")  # fmt: skip
    words = [word for name in source.hyper for word in ("--set", f"{name}={sampling.hyper(source, name).item()}")]
    words += ["--data", f"{data}:batches", "--state", str(start), "--quiet"]

    def run(kept: Path, steps: int, by: str, *more: str) -> Path:
        launch = ["--engine", by, "--launch", str(len(manifest["ranks"]))] if by != "threads" else []
        options = ["--steps", str(steps), "--checkpoint", str(kept), *more, *launch]
        if code := main(["run", str(home), *words, *options]):
            raise gopt.InvariantError(f"gopt run of {home.name} {' '.join(options)} ends with {code}")
        return kept / f"step_{steps:08d}"

    small = len(manifest["ranks"]) <= MOST_PROCESSES
    kept, by = home.with_suffix(".kept"), engine if small else "threads"
    run(kept, 1, by)
    continued = run(kept, STEPS, by, "--resume")
    due = _states(continued)
    rounds = manifest.get("parameter_server", {"mode": "sync"})["mode"] == "sync"
    for other in dict.fromkeys([by, "threads"]) if rounds and not source.random else ():  # others differ, and draws
        straight = read_folder(run(home.with_suffix(f".{other}"), STEPS, other)).graph.initializers
        for name in (state.tensor for state in source.states):
            value, single = due[name], straight[name].numpy()
            if not (value.tobytes() == single.tobytes() or (other != by and _near(value, single))):
                raise gopt.InvariantError(f"{name} is {value} in a training by {by} that is continued, and {single}")
    return continued, due


def _near(value: np.ndarray, due: np.ndarray) -> bool:
    """Whether only the order of sums differs."""
    one, two = value.astype(np.float64), due.astype(np.float64)
    return np.allclose(one, two, rtol=0, atol=1e-3 * np.abs(two).max(initial=0), equal_nan=True)


@lru_cache(maxsize=1)
def _source(step: str) -> TrainingGraph:
    return gopt.load(step).training


class Batches:
    """The batches of a step, as a function for ``--data``."""

    def __init__(self, step: str) -> None:
        self.source = _source(step)

    def __call__(self, part: int, parts: int) -> Iterator[dict[str, np.ndarray]]:
        ranges = sampling.without_ignored(sampling.integer_ranges(self.source))
        for number in range(part, 1000, parts):
            yield sampling.draw_inputs(self.source, self.source.batch, np.random.default_rng(number), ranges)


def _states(what: Path) -> States:
    model = next(folder for folder in what.parents if not folder.suffix) / f"{what.parent.name}.{what.name}.onnx"
    gopt.merge(what, model)
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(model).graph.initializer}
