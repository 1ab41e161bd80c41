"""Splits a step without rounds, runs an order of pulls and pushes, and compares states with the source's updates."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from rank_files import Runner, Values
from split_gen.arrivals import Serial, Served, compared, drawn_order, rate_at
from split_gen.exchanges import Exchange, exchanged
from split_gen.reference import Reference

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.artifact.server_entries import Mode
from gopt.errors import GoptError
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import Placement
from gopt.parameter_server.slicing import Slicing
from whole_gen.judge import Verdict, different
from whole_gen.writer import Writer

Make = Callable[[int, int], Writer]
PUSHES = 6
TOLERANCE = 1e-7


def options(r: random.Random, **given: object) -> SplitOptions:
    return SplitOptions(
        trainers=r.choice([1, 2, 3]), servers=r.choice([1, 2, 3]), minimum=r.choice([1, 2, 5, 16]),
        slicing=Slicing(r.choice(["off", "classic", "balanced"])),
        placement=Placement(r.choice(["round-robin", "hash", "bytes"])), cap=r.choice([4 << 20, 64, 1]), **given,
    )  # fmt: skip


def drawn_late(seed: int) -> SplitOptions:
    """Options without rounds."""
    r = random.Random(seed * 7 + 1)
    return options(
        r, mode=r.choice([Mode.ASYNC, Mode.HALF_ASYNC]), compensation=r.choice([None, None, 0.5, 2.0]),
        count=r.choice(["round", "push", "chief"]), tables_off=True,
    )  # fmt: skip


def drawn_geo(seed: int) -> SplitOptions:
    r = random.Random(seed * 7 + 2)
    return options(r, mode=Mode.GEO, every=r.choice([1, 2, 3]))


def batches(w: Writer, seed: int) -> Iterator[Values]:
    generator = np.random.default_rng(seed)
    while True:
        yield {name: draw(generator, w.inputs[name].shape) for name, draw in w.batch.items()}


def judged_late(make: Make, how: SplitOptions, seed: int = 0, *, told: bool = False) -> Verdict:
    """``make``: as for ``judged``; only the step of one trainer is asked for."""
    w, folder = make(4, 1), Path(tempfile.mkdtemp(prefix="attack-", dir="/tmp"))
    try:
        refused = _split(w, how, folder, told)
        return refused or (_exchange if how.mode is Mode.GEO else _arrive)(w, how, seed, folder)
    finally:
        shutil.rmtree(folder)


def _split(w: Writer, how: SplitOptions, folder: Path, told: bool) -> Verdict | None:
    path = folder / "step.onnx"
    onnx.save(w.model(), str(path))
    roles = RoleMap(states=dict(w.states) if told else {})
    try:
        gopt.split(gopt.load(str(path), roles=roles), how).write(folder / "split")
    except GoptError as error:
        return Verdict("refused" if error.exit_code in (2, 3, 4) else "crash", error.message)
    return None


def _arrive(w: Writer, how: SplitOptions, seed: int, folder: Path) -> Verdict:
    start = {name: w.stored[name] for name in w.states}
    served = Served(folder / "split", dict(start))
    source = Reference.of(folder / "split", start, how.trainers)
    serial = Serial(source, {each["tensor"]: each for each in served.manifest["states"]}, how.count, how.compensation)
    lost = set(source.shared) - set(serial.states()) - set(serial.counters)
    if lost:
        return Verdict("WRONG", f"written, although {min(lost)} belongs to no key")
    hyper = {name: np.full_like(value, rate_at(0)) for name, value in w.hyper.items()}
    order = drawn_order(seed, how.trainers, PUSHES)
    for number, found, wanted, before in compared(served, serial, order, batches(w, seed), hyper):
        wrong = different(found, wanted, before, TOLERANCE) if found.keys() == wanted.keys() else "other states"
        if wrong:
            return Verdict("WRONG", f"event {number} of {order}: {wrong}")
    return Verdict("right")


def _exchange(w: Writer, how: SplitOptions, seed: int, folder: Path) -> Verdict:
    start = {name: w.stored[name] for name in w.states}
    model = w.model()
    rest = [each for each in model.graph.initializer if each.name not in w.states]
    del model.graph.initializer[:]
    model.graph.initializer.extend(rest)
    runner = Runner(model)

    def step(held: Values, fed: Values) -> Values:
        got = runner({**held, **fed})
        return {name: got[new] for name, new in w.states.items()}

    made = Exchange(folder / "split", dict(start))
    for when, found, wanted in exchanged(made, step, start, how, batches(w, seed), w.hyper, seed):
        wrong = different(found, wanted, {name: value + 1 for name, value in wanted.items()}, TOLERANCE)
        if wrong:
            return Verdict("WRONG", f"{when}: {wrong}")
    return Verdict("right")
