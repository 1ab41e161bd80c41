"""The oracle of coupled batches: the step exported for one large batch, run on the ranks' batches put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import run_graph
from onnx import ModelProto
from rank_files import Values
from rank_simulator import World

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.api import Source
from gopt.ir.load import load as load_graph
from gopt.records.mesh import Mesh
from gopt.runtime.session import SessionCache

Build = Callable[[int], ModelProto]
"""A training step for so many samples."""
Draw = Callable[[Source, np.random.Generator], Values]


def draw_batch(source: Source, generator: np.random.Generator) -> Values:
    """Normal floats, labels below 2, masks that leave out some samples, and now and then all of them."""
    found: Values = {}
    for name in source.training.batch:
        type = source.training.graph.types[name]
        if type.dtype == "int64":
            found[name] = generator.integers(0, 2, type.dims)
        elif name == "mask":
            found[name] = (generator.random(type.dims) < generator.choice([0.0, 0.3, 0.9])).astype(np.float32)
        else:
            found[name] = generator.standard_normal(type.dims).astype(np.float32)
    return found


def worst_difference(
    build: Build, batch: int, mesh: str, folder: Path, *, micro_steps: int = 1, steps: int = 3, seed: int = 0,
    draw: Draw = draw_batch, hyper: Values | None = None, roles: RoleMap = RoleMap(), **options: Any,
) -> float:  # fmt: skip
    """The largest distance of a state's change on any rank from that in one large batch, over the size of the change.

    Every rank sees ``batch`` samples in each of ``micro_steps``; ``options`` go to ``gopt.shard``.
    """
    grid = Mesh.parse(mesh)
    path = folder / "step.onnx"
    path.write_bytes(build(batch).SerializeToString())
    source = gopt.load(path, roles=roles)
    sharded = gopt.shard(source, grid, accumulate=micro_steps, **options)
    sharded.write(folder / "ranks")
    world = World(folder / "ranks")
    parts = max(world.sees) + 1
    big = folder / "large.onnx"
    big.write_bytes(build(batch * micro_steps * parts).SerializeToString())
    large, cache = load_graph(big), SessionCache()
    settings = hyper if hyper is not None else {name: np.float32(0.05) for name in source.training.hyper}
    wanted = {s.tensor: np.array(source.training.graph.initializers[s.tensor].numpy()) for s in source.training.states}
    start, held = dict(wanted), [world.feeds(rank, wanted) for rank in world.ranks]
    generator, worst = np.random.default_rng(seed), 0.0
    for _ in range(steps):
        batches = [[draw(source, generator) for _ in range(parts)] for _ in range(micro_steps)]
        if "mask" in batches[0][0]:  # a batch in which nothing counts has no step
            batches[0][0]["mask"].reshape(-1)[0] = 1.0
        together = {name: np.concatenate([each[name] for turn in batches for each in turn]) for name in batches[0][0]}
        made = run_graph(large, {**wanted, **settings, **together}, cache)
        wanted = {state.tensor: np.asarray(made[state.updated]) for state in source.training.states}
        world.step(held, world.dealt(batches, settings))
        worst = max(worst, _worst(world.whole(held), start, wanted))
    return worst


def _worst(found: Values, start: Values, wanted: Values) -> float:
    """Whole states, which all ranks that hold them hold alike."""
    worst = 0.0
    for name, reference in wanted.items():
        assert np.isfinite(reference).all(), f"{name} is not finite in the large batch"
        change = np.linalg.norm((reference - start[name]).astype(np.float64))
        floor = 1e-3 * np.linalg.norm(reference.astype(np.float64)) + 1e-9
        error = np.linalg.norm(found[name].astype(np.float64) - reference.astype(np.float64))
        worst = max(worst, float(error / (change + floor)) if np.isfinite(error) else float("inf"))
    return worst
