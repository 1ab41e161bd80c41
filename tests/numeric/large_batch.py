"""The oracle of coupled batches: the step exported for one large batch, run on the ranks' batches put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.api import Source
from gopt.ir.load import load as load_graph
from gopt.ir.types import numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import run_ranks
from gopt.runtime.executor import Executor
from gopt.runtime.reference_eval import run_graph
from gopt.runtime.session import SessionCache

Build = Callable[[int], ModelProto]
"""A training step for so many samples."""
Values = dict[str, np.ndarray]
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
    which = _which(grid)
    turns = micro_steps * (max(which) + 1)
    big = folder / "large.onnx"
    big.write_bytes(build(batch * turns).SerializeToString())
    large = load_graph(big)
    cache = SessionCache()
    manifest = json.loads((folder / "ranks" / "manifest.json").read_text())
    phases = {each["name"]: each["times"] for each in manifest.get("phases", [{"name": "step", "times": 1}])}
    common = manifest["common"]["state"]
    ranks = [_Rank(folder / "ranks", each, common, phases, cache) for each in manifest["ranks"]]
    types = source.training.graph.types
    settings = hyper if hyper is not None else {name: np.float32(0.05) for name in source.training.hyper}
    wanted = {s.tensor: np.array(source.training.graph.initializers[s.tensor].numpy()) for s in source.training.states}
    start, held = dict(wanted), [rank.feeds(wanted) for rank in ranks]
    generator, worst = np.random.default_rng(seed), 0.0
    for _ in range(steps):
        batches = [[draw(source, generator) for _ in range(max(which) + 1)] for _ in range(micro_steps)]
        if "mask" in batches[0][0]:  # a batch in which nothing counts has no step
            batches[0][0]["mask"].reshape(-1)[0] = 1.0
        together = {name: np.concatenate([each[name] for turn in batches for each in turn]) for name in batches[0][0]}
        made = run_graph(large, {**wanted, **settings, **together}, cache)
        wanted = {state.tensor: np.asarray(made[state.updated]) for state in source.training.states}
        outputs: list[Values] = [{} for _ in ranks]
        for phase, times in phases.items():
            for turn in range(times):
                programs = [rank.programs[phase] for rank in ranks]
                given = [{**held[r], **settings, **batches[turn][which[r]]} for r in range(len(ranks))]
                feeds = [{k: v for k, v in each.items() if k in p.graph.inputs} for each, p in zip(given, programs)]
                for r, output in enumerate(run_ranks(programs, feeds, grid)):
                    ranks[r].carry(held[r], output)
                    outputs[r].update(output)
        worst = max(worst, _compare(ranks, outputs, types, start, wanted))
    return worst


class _Rank:
    """One rank's files and what they hold; independent of what ``verify`` has for it."""

    def __init__(
        self, folder: Path, record: Any, common: list[Any], phases: dict[str, int], cache: SessionCache
    ) -> None:
        self.states = [*common, *record["state"]]
        self.sums = record.get("accumulators", [])
        graphs = {phase: load_graph(folder / record["files"][phase], own=True) for phase in phases}
        self.types = {name: type for graph in graphs.values() for name, type in graph.inputs.items()}
        self.programs = {phase: Executor(graph, cache) for phase, graph in graphs.items()}

    def feeds(self, whole: Values) -> Values:
        """What the rank holds of whole tensors; sums at zero."""
        found: Values = {}
        for state in self.states:
            type = self.types[state["input"]]
            parts = [whole[p["tensor"]].reshape(-1)[p["start"] : p["stop"]] for p in state["pieces"]]
            value = np.concatenate([*parts, np.zeros(0, parts[0].dtype if parts else np.float32)])
            found[state["input"]] = value.astype(numpy_dtype(type.dtype)).reshape(type.dims)
        for each in self.sums:
            found[each["input"]] = np.zeros(each["shape"], numpy_dtype(each["dtype"]))
        return found

    def carry(self, held: Values, outputs: Values) -> None:
        for each in (*self.states, *self.sums):
            if each["output"] in outputs:
                held[each["input"]] = np.asarray(outputs[each["output"]])


def _joined(ranks: Sequence[_Rank], outputs: Sequence[Values], types: Any) -> Values:
    """Whole tensors, flat, of what the ranks hold together; narrow copies take no part."""
    found: Values = {}
    seen: dict[str, int] = {}
    for rank, made in zip(ranks, outputs):
        for state in rank.states:
            flat, place = np.asarray(made[state["output"]]).reshape(-1), 0
            for piece in state["pieces"] if not state.get("copy") else ():
                name, length = piece["tensor"], piece["stop"] - piece["start"]
                whole = found.setdefault(name, np.full(types[name].elements, np.nan, flat.dtype))
                whole[piece["start"] : piece["stop"]] = flat[place : place + length]
                seen[name] = seen.get(name, 0) + length
                place += length
    return {name: whole for name, whole in found.items() if seen[name] >= types[name].elements}


def _which(mesh: Mesh) -> list[int]:
    seen: dict[tuple[int, ...], int] = {}
    keys = [tuple(v for k, v in mesh.coordinates(rank).items() if k in mesh.data_axes) for rank in range(mesh.ranks)]
    return [seen.setdefault(key, len(seen)) for key in keys]


def _compare(ranks: Sequence[Any], outputs: Sequence[Values], types: Any, start: Values, wanted: Values) -> float:
    """Whole states put together from all ranks, and what each rank alone holds whole."""
    worst = 0.0
    whole = _joined(ranks, outputs, types)
    alone = [_joined([rank], [output], types) for rank, output in zip(ranks, outputs)]
    for name, reference in wanted.items():
        assert np.isfinite(reference).all(), f"{name} is not finite in the large batch"
        change = np.linalg.norm((reference - start[name]).astype(np.float64))
        floor = 1e-3 * np.linalg.norm(reference.astype(np.float64)) + 1e-9
        found = [each[name] for each in (whole, *alone) if name in each]
        assert found, f"no rank holds {name}"
        for value in found:
            error = np.linalg.norm(value.reshape(-1).astype(np.float64) - reference.reshape(-1).astype(np.float64))
            worst = max(worst, float(error / (change + floor)) if np.isfinite(error) else float("inf"))
    return worst
