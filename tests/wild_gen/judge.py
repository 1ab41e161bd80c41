"""What gopt made of a file is held against what ONNX Runtime computes with the plain one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from node_models import session
from onnx import ModelProto
from rank_files import Values
from rank_simulator import World, drawn

from wild_gen.steps import step

RANKS = 2


@cache
def inputs(name: str) -> Values:
    """A value for every input of a plain step."""
    return drawn(step(name))


@cache
def expected(name: str) -> Values:
    """All outputs of a plain step, by name."""
    model = step(name)
    runner = session(model)
    names = [each.name for each in model.graph.output]
    return dict(zip(names, runner.run(names, inputs(name)), strict=True))


def written(model: ModelProto, folder: Path) -> Path:
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def hold_numbers(name: str, out: Path, old: Mapping[str, str]) -> None:
    """Raise AssertionError unless all ranks, fed one batch, give the states and outputs of the plain step.

    ``old``: what became of a name of the plain step.
    """
    world, values = World(out), inputs(name)
    tolerance = 2e-2 if "fp16" in name else 1e-4
    new = {old.get(key, key): value for key, value in values.items()}
    states = {each["tensor"]: each["updated"] for each in world.manifest["states"]}
    held = [world.feeds(rank, new) for rank in world.ranks]
    world.step(held, [[{key: value for key, value in new.items() if key not in states} for _ in world.ranks]])
    wanted = {old.get(key, key): value for key, value in expected(name).items()}
    found = world.whole(held)
    assert found.keys() == states.keys()
    for tensor, updated in states.items():
        _close(tensor, found[tensor], wanted[updated], new[tensor], tolerance)
    metrics = wanted.keys() - set(states.values())
    for last in world.last:
        for output in metrics:
            _close(output, last[output], wanted[output], np.zeros(()), tolerance)


def _close(name: str, found: np.ndarray, wanted: np.ndarray, before: np.ndarray, tolerance: float) -> None:
    """The contract's measure: by the change since before the step, with a floor by the value."""
    assert found.dtype == wanted.dtype, name
    due, error = wanted.astype(float) - before.astype(float), found.astype(float) - wanted.astype(float)
    floor = tolerance * 1e-3 * np.linalg.norm(wanted.astype(float))
    assert np.linalg.norm(error) <= tolerance * np.linalg.norm(due) + floor, name
