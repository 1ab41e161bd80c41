"""A step through ``gopt shard``, its ranks against the truth of its gradients. No verifier of gopt takes part."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from draws import Verdict
from rank_files import Stuck, Values
from rank_simulator import World, elements
from steps_gen.oracle import Nudge, Oracle, nudged

import gopt
from gopt.errors import GoptError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from mesh_gen.make import Step

STEPS = 2
NUDGES = 3
NOISE = 10.0
"""How many times what a nudge shows is still taken for rounding."""
MESHES = (
    "tp=2", "tp=3", "cp=2", "cp=3", "sp=2", "cp=2,tp=2", "sp=2,tp=2", "cp=2,sp=2", "dp=2,cp=2", "dp=2,tp=2",
    "shard=2,tp=2", "shard=2,cp=2", "tp=2,cp=2", "cp=4", "tp=4", "cp=2,dp=2", "shard=2,sp=2,tp=2", "sp=3,shard=2",
)  # fmt: skip
EXPERTS = ("ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "shard=2,ep=2", "ep=2,cp=2", "cp=2,ep=2", "ep=2,sp=2", "ep=3")


@dataclass(frozen=True)
class Setting:
    """How a step is sharded."""

    mesh: str
    stage: int = 2
    micro: int = 1
    options: tuple[tuple[str, object], ...] = ()

    @classmethod
    def draw(cls, step: Step) -> Setting:
        r = random.Random(step.recipe.seed * 7 + 3)
        mesh = r.choice(EXPERTS if "experts" in step.recipe.blocks and r.random() < 0.7 else MESHES)
        axes = [axis for axis in ("tp", "cp", "sp") if axis in mesh] or ["ep"]
        fed = [axis for axis in axes if axis not in ("tp", "ep")]
        words: list[str] = []
        for name, shape in ((name, step.known[name].shape) for name in step.gradients):
            axis = r.choice(axes)
            if shape and axis != "ep" and r.random() < (0.6 if axis == "tp" else 0.1):
                words.append(f"{name}:{_dimension(r, mesh, axis, shape)}@{axis}")
        given = []
        for name, (shape, _, _) in step.batch.items():
            if fed and r.random() < 0.25:
                axis = r.choice(fed)
                given.append(f"{name}:{r.choice(['whole', _dimension(r, mesh, axis, shape)])}@{axis}")
        options = {
            "parameters": ";".join(words), "inputs": ";".join(given), "sequence": "tp" in axes and r.random() < 0.4,
            "sizes": r.choice(["balanced", "balanced", "ceil", "floor-last"]),
        }  # fmt: skip
        return cls(mesh, r.randint(0, 3), r.choice([1, 1, 1, 2]), tuple(options.items()))

    def told(self) -> str:
        said = " ".join(f"{key}={value}" for key, value in self.options if value not in ("", False, "balanced"))
        return f"{self.mesh} stage {self.stage} x{self.micro} {said}"


def _dimension(r: random.Random, mesh: str, axis: str, shape: tuple[int, ...]) -> str:
    """A dimension, in equal parts or in given ones, some of them perhaps empty."""
    members, dim = dict(Mesh.parse(mesh).axes)[axis], r.randrange(len(shape))
    if r.random() < 0.85 or shape[dim] < members:
        return f"dim{dim}"
    ends = sorted(r.randint(0, shape[dim]) for _ in range(members - 1))
    sizes = np.diff([0, *ends, shape[dim]])
    return f"dim{dim}={'+'.join(map(str, sizes))}"


def batch(step: Step, *seed: int) -> Values:
    """A batch of its own, unlike others in size."""
    generator = np.random.default_rng((step.recipe.seed, *seed))
    size = 0.5 + generator.random() * 1.5
    return {
        name: (size * generator.standard_normal(shape)).astype(np.float32) if dtype == "float32"
        else generator.integers(0, bound, shape).astype(dtype)
        for name, (shape, dtype, bound) in step.batch.items()
    }  # fmt: skip


def differences(step: Step, folder: Path, steps: int = STEPS) -> Iterator[str]:
    """Where ranks and truth differ; one line each."""
    world, truth = World(folder), Oracle(step)
    wanted = {name: step.known[name] for name in step.states}
    nearby = [_nudged(wanted, seed) for seed in range(NUDGES)]
    have = [world.feeds(rank, wanted) for rank in world.ranks]
    parts = max(world.sees) + 1
    turns = max(times for _, times in world.phases)
    for number in range(steps):
        batches = [[batch(step, number, turn, place) for place in range(parts)] for turn in range(turns)]
        before = wanted
        nearby = [truth.step(_nudged(each, seed), {}, batches) for seed, each in enumerate(nearby)]
        wanted = truth.step(wanted, {}, batches)
        world.step(have, world.dealt(batches, {}))
        for rank in world.ranks:
            for state in world.held[rank]:
                fault = _fault(state, have[rank][state["input"]], wanted, before, nearby)
                if fault:
                    yield f"step {number + 1} rank {rank}: {fault}"
            last = truth.losses[(turns - 1) * parts + world.sees[rank]]
            told = world.last[rank].get("loss")
            if told is not None and not np.isclose(float(told), last, rtol=1e-4, atol=1e-6) and np.isfinite(last):
                yield f"step {number + 1} rank {rank}: the loss is {float(told)}, not {last}"


def _nudged(states: Values, seed: int) -> Values:
    """States that differ by rounding: what becomes of them shows how far rounding goes."""
    generator = np.random.default_rng(seed)
    return {name: nudged(value, Nudge(2.0**-22), generator) for name, value in states.items()}


def _fault(state: Mapping[str, object], value: np.ndarray, wanted: Values, before: Values, nearby: list[Values]) -> str:
    value, place = value.reshape(-1).astype(np.float64), 0
    for piece in state["pieces"]:  # type: ignore[attr-defined]
        real, old = (elements(each[piece["tensor"]], piece).astype(np.float64) for each in (wanted, before))
        part, place = value[place : place + real.size], place + real.size
        if not np.isfinite(real).all():
            continue
        whole = wanted[piece["tensor"]].astype(np.float64)
        moved = np.linalg.norm(whole - before[piece["tensor"]])
        off = np.linalg.norm(part - real)
        spread = max(float(np.linalg.norm(each[piece["tensor"]].astype(np.float64) - whole)) for each in nearby)
        off = max(0.0, off - NOISE * spread)
        if not off <= 3e-4 * moved + 2e-6 * np.linalg.norm(whole) + 1e-7:
            return (
                f"{piece['tensor']} {piece.get('box', '')} is off by {off:.3g}, moved {np.linalg.norm(real - old):.3g}"
            )
    if place != value.size:
        return f"{state['input']} has {value.size} elements, and pieces of {place}"
    return ""


def judge(step: Step, setting: Setting, folder: Path) -> Verdict:
    """Write ranks, run them, and compare."""
    path, out = folder / "step.onnx", folder / "out"
    path.write_bytes(step.model.SerializeToString(deterministic=True))
    options = {"tensor-parallel": dict(setting.options), "shard": {"stage": setting.stage}}
    try:
        pipeline = build_pipeline(defaults=options)
        made = gopt.shard(gopt.load(path), Mesh.parse(setting.mesh), accumulate=setting.micro, pipeline=pipeline)
        made.write(out)
    except GoptError as error:
        return Verdict("refused" if error.exit_code in (2, 3, 4) else "CRASH", error.message)
    except Exception as error:
        return Verdict("CRASH", f"{error!r}\n{traceback.format_exc()}")
    try:
        fault = next(differences(step, out), None)
    except Stuck as error:
        fault = f"the ranks are stuck: {error}"
    except Exception as error:
        return Verdict("CRASH", f"running: {error!r}\n{traceback.format_exc()}")
    return Verdict("right") if fault is None else Verdict("WRONG", fault)
