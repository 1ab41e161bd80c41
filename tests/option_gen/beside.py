"""The ranks of a step in other forms, beside ranks of the plain step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from draws import Verdict
from rank_files import Array, Values, has_halves
from rank_simulator import World
from wild_gen import bodies, functions, scopes
from wild_gen import values as values_of_steps

import gopt
from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.verification import sampling
from option_gen.make import Setting

NEAR, NEAR_OF_HALVES = 1e-4, 2e-2
ODD = ("bfloat16", "float8", "int4", "uint4")
"""Types that the simulator of ranks does not carry."""
WHOLE = {"dp", "shard"}
_LISTS = [form for form in values_of_steps.FORMS if form.name in ("sequences", "optionals", "split and joined")]
CALLS = [*functions.FORMS, *bodies.FORMS, *scopes.FORMS, *_LISTS]


def beside(setting: Setting, found: Verdict, folder: Path) -> Verdict:
    """What was found of a step in other forms, whose ranks are in the folder: ``UNLIKE``, where gopt takes the plain
    step and not this, or this alone; ``WRONG``, where its ranks compute other values."""
    home = folder / "plain"
    home.mkdir()
    path = setting.plain.file(home)
    try:
        gopt.shard(path, setting.mesh, prove=False, **setting.options(home)).write(home / "ranks")
    except (InputError, OptionError, UnsupportedError) as error:
        also = found.outcome == "refused" or "data flow does not say" in str(error)  # an If of states may say
        return found if also else Verdict("UNLIKE", f"the plain step is refused: {error}")
    if found.outcome == "refused":
        return found if due(setting, found.why) else Verdict("UNLIKE", found.why)
    source, (other, names) = gopt.load(path).training, setting.named_file(folder)
    types = gopt.load(other).training.graph.types.values()
    run = not source.random and not any(type.dtype.startswith(ODD) for type in types)
    differences = list(_differences(source, home / "ranks", folder / "ranks", names)) if run else ()
    return Verdict("WRONG", "; ".join(differences[:4])) if differences else found


def due(setting: Setting, why: str) -> bool:
    """Whether gopt may refuse the forms alone: calls of functions, control flow and lists have no rule by which they
    could be split, or samples be followed; behind a loop that carries a value, no type is known; names may settle what
    replaces a state, and the sum of losses may be a state's new value."""
    forms = setting.forms
    calls = any(form in CALLS for form in forms)
    return (
        any(form.gaps or form.name == "Loop that carries a value" for form in forms)
        or (calls and ("cannot be followed" in why or not WHOLE.issuperset(axes(setting.mesh))))
        or (any("name" in form.name or "losses" in form.name for form in forms) and "data flow does not say" in why)
    )


def axes(mesh: str) -> list[str]:
    return [axis.split("=")[0] for axis in mesh.split(",")]


def _differences(source: TrainingGraph, plain: Path, other: Path, names: Mapping[str, str]) -> Iterator[str]:
    """Where both compute different values in a step from equal states and batches."""
    one, two, drawn = World(plain), World(other), np.random.default_rng(5)
    parts, turns = max(one.sees) + 1, one.manifest.get("accumulate", 1)
    start = {state.tensor: sampling.initial_state(source, state, drawn) for state in source.states}
    settings = {name: sampling.hyper(source, name) for name in source.hyper}
    ranges = sampling.without_ignored(sampling.integer_ranges(source))
    batches = [
        [sampling.draw_inputs(source, source.batch, drawn, ranges) for _ in range(parts)] for _ in range(turns)
    ]  # fmt: skip
    due, held = _run(one, start, batches, settings)
    found, also = _run(
        two, _named(start, names), [[_named(part, names) for part in turn] for turn in batches], _named(settings, names)
    )
    near = NEAR_OF_HALVES if has_halves(plain) else NEAR
    for name, value in held.items():
        yield from _apart(name, also[names.get(name, name)], value, start[name], near)
    shown = source.graph.outputs.keys() - {state.updated for state in source.states}
    for rank, values in enumerate(due):
        for name in values.keys() & shown:
            yield from _apart(f"{name} of rank {rank}", found[rank][names.get(name, name)], values[name], None, near)


def _run(world: World, start: Values, batches: list[list[Values]], settings: Values) -> tuple[list[Values], Values]:
    """What ranks show, and the new states."""
    held = [world.feeds(rank, start) for rank in world.ranks]
    world.step(held, world.dealt(batches, settings))
    return world.last, world.whole(held)


def _named(values: Values, names: Mapping[str, str]) -> Values:
    return {names.get(name, name): value for name, value in values.items()}


def _apart(name: str, value: Array, due: Array, before: Array | None, near: float) -> Iterator[str]:
    if value.dtype != due.dtype or value.shape != due.shape:
        yield f"{name} is {value.dtype}{value.shape}, not {due.dtype}{due.shape}"
        return
    if due.dtype.kind in "SUO":
        return
    one, two = value.astype(float), due.astype(float)
    moved = two if before is None else two - before.astype(float)
    with np.errstate(invalid="ignore"):
        off = np.abs(np.where(np.isnan(one) & np.isnan(two) | (one == two), 0, one - two)).max(initial=0)
    change, size = (np.nan_to_num(np.abs(each)).max(initial=0) for each in (moved, two))
    if not off <= near * (change + 1e-3 * size):
        yield f"{name} is {value}, not {due}"
