"""Shards a step, runs its ranks, and compares every state with what the source makes of the whole batch."""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from helpers import stage_on
from option_values import PASSES, SCHEDULES
from rank_files import Runner, Values
from rank_simulator import World

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.artifact.open_couplings import open_couplings
from gopt.errors import GoptError, InvariantError
from whole_gen.writer import Writer

MESHES = ["shard=2", "shard=3", "dp=2", "dp=2,shard=2", "shard=2,dp=2", "shard=4", "shard=5", "dp=3"]
SPLIT = ["tp=2", "tp=3", "shard=2,tp=2", "dp=2,tp=2", "tp=2,shard=2", "ep=2", "cp=2", "sp=2", "cp=2,tp=2"]
SPLIT += ["shard=2,cp=2", "dp=2,ep=2", "h=2", "w=2", "shard=2,sp=2"]
STAGED = ["pp=2", "pp=2", "pp=3", "pp=2,dp=2", "pp=2,shard=2", "shard=2,pp=2", "pp=2,tp=2", "dp=2,pp=2,shard=2"]
STEPS = 3
SIZES = (4, 4, 5, 2, 4, 6, 10)
"""Numbers of samples."""
UNDECIDED = (
    "may (be|divide by) (a|their|the) number|one over their number|a rate, or|a batch of this size|no multiple of them"
)
"""A tenth over five or ten samples is a rate or a mean."""


@dataclass
class Setting:
    mesh: str
    options: dict[str, Any] = field(default_factory=dict)
    told: bool = False
    """Whether gopt is told which output replaces which state."""
    named: bool = False
    """Whether it is told the gradients."""

    def options_of(self, w: Writer) -> dict[str, Any]:
        """The options for a step, whose own go first; a step of one micro-batch has no order."""
        options = {**self.options, **w.options}
        if options.get("accumulate", 1) == 1:
            options.pop("schedule", None)
        return options

    def roles_of(self, w: Writer) -> RoleMap:
        """What gopt is told of a step's roles."""
        gradients = {name: value.name for name, value in w.gradients.items()}
        return RoleMap(
            states=dict(w.states) if self.told or w.told else {}, params=gradients if self.named else {},
            statistics=w.stated,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.mesh} {self.options}{' told' if self.told else ''}{' named' if self.named else ''}"


def drawn(seed: int, meshes: Sequence[str] = MESHES, w: Writer | None = None) -> Setting:
    r = random.Random(seed * 31 + 5)
    mesh = r.choice(meshes)
    stage = r.randint(0, 3)
    options: dict[str, Any] = {"stage": stage_on(mesh, stage)}
    shard: dict[str, Any] = {}
    if stage and ("shard" in mesh):
        options["partition"] = r.choice(["flat", "flat", "rows", "whole"])
        if options["partition"] == "whole":
            shard["style"] = r.choice(["gather", "broadcast"])
            shard["owners"] = r.choice(["largest-first", "round-robin", "in-order", "hash"])
        if options["partition"] == "rows":
            shard["rule"] = r.choice(["balanced", "ceil"])
            if shard["rule"] == "ceil":
                shard["min-piece"] = r.choice([1, 4, 8192])
    options["bucket_mb"] = r.choice([None, None, 0.0, 0.0001, 0.00003])
    options["accumulate"] = r.choice([1, 1, 1, 2, 3])
    if stage == 3 and "shard" in mesh:
        shard["reshard-after-forward"] = r.choice([True, False])
        shard["persist"] = r.choice([0, 4, 100])
    passes: dict[str, Any] = {"shard": shard}
    if r.random() < 0.3:
        passes["fuse-collectives"] = {"max-tensors": r.choice([1, 2, 3])}
    if r.random() < 0.3:
        passes["overlap"] = {"prefetch": r.choice([0, 2])}
    axes = [each.split("=")[0] for each in mesh.split(",") if each[:2] in ("tp", "cp", "sp", "ep")]
    if axes and w is not None and r.random() < 0.8:
        words = []
        for name in w.states:
            shape = w.inputs[name].shape
            if shape and "." not in name and r.random() < 0.5:
                words.append(f"{name}:dim{r.randrange(len(shape))}@{r.choice(axes)}")
        tokens = []
        for name in w.batch:
            shape = w.inputs[name].shape
            if len(shape) > 1 and r.random() < 0.5 and not {"cp", "sp"}.isdisjoint(axes):
                tokens.append(f"{name}:dim{r.randrange(len(shape))}@{r.choice([a for a in axes if a in ('cp', 'sp')])}")
        passes["tensor-parallel"] = {"parameters": ";".join(words), "inputs": ";".join(tokens),
                                     "sizes": r.choice(["balanced", "ceil", "floor-last"])}  # fmt: skip
    options["passes"] = passes
    return Setting(mesh, options, r.random() < 0.5, r.random() < 0.15)


def drawn_memory(seed: int, meshes: Sequence[str] = STAGED, w: Writer | None = None) -> Setting:
    """A drawn setting whose ranks compute values again or keep them on the host; on stages in a drawn order."""
    r, how = random.Random(seed * 37 + 11), drawn(seed, meshes, w)
    if "pp" in how.mesh:
        how.options["accumulate"] = r.choice([1, 2, 3, 4])
        how.options["schedule"] = r.choice([None, None, None, *SCHEDULES])
    for owner in ("recompute", "offload"):
        if r.random() < 0.4:
            how.options["passes"][owner] = {name: r.choice(values) for name, values in PASSES[owner].items()}
    return how


@dataclass
class Verdict:
    kind: str
    text: str = ""


def truth(whole: onnx.ModelProto, states: dict[str, str], start: Values, feeds: list[Values]) -> list[Values]:
    """The states after each step of the source on the whole batch."""
    rest = [each for each in whole.graph.initializer if each.name not in states]
    del whole.graph.initializer[:]
    whole.graph.initializer.extend(rest)
    runner, held, found = Runner(whole), dict(start), []
    for fed in feeds:
        got = runner({**held, **fed})
        held = {name: got[output] for name, output in states.items()}
        found.append(held)
    return found


def feeds_of(w: Writer, parts: int, micro: int, seed: int, samples: int) -> list[list[list[Values]]]:
    """By step, micro-step and part of the samples."""
    generator = np.random.default_rng(seed + 99)
    return [
        [[{name: draw(generator, (samples, *w.inputs[name].shape[1:])) for name, draw in w.batch.items()}
          for _ in range(parts)] for _ in range(micro)]
        for _ in range(STEPS)
    ]  # fmt: skip


def judged(
    make: Callable[[int, int], Writer], how: Setting, seed: int = 0, samples: int = 4, verify: bool = False,
    tolerance: float = 1e-8, keep: Path | None = None,
) -> Verdict:  # fmt: skip
    """``make``: the step for so many samples, of so many ranks."""
    w = make(samples, 1)
    parts = int(np.prod([int(each.split("=")[1]) for each in how.mesh.split(",") if each[:2] in ("dp", "sh")] or [1]))
    micro = w.options.get("accumulate", how.options.get("accumulate", 1))
    whole = make(samples * parts * micro, parts * micro)
    assert whole.states == w.states and whole.said == w.said
    folder = Path(tempfile.mkdtemp(prefix="attack-", dir="/tmp"))
    try:
        path = folder / "step.onnx"
        onnx.save(w.model(), str(path))
        if keep:
            shutil.copy(path, keep)
        feeds = feeds_of(w, parts, micro, seed, samples)
        try:
            sharded = gopt.shard(gopt.load(str(path), roles=how.roles_of(w)), how.mesh, **how.options_of(w))
            sharded.write(folder / "ranks")
        except InvariantError as error:
            return Verdict("invariant", str(error))
        except GoptError as error:
            return Verdict("refused", f"{type(error).__name__}: {error} | {'; '.join(getattr(error, 'hints', ()))}")
        except Exception:
            return Verdict("crash", traceback.format_exc())
        kinds = {each["tensor"]: each["updated"] for each in
                 json.loads((folder / "ranks/manifest.json").read_text())["states"]}  # fmt: skip
        if kinds != w.states:
            return Verdict("states", f"{ {k: v for k, v in kinds.items() if w.states.get(k) != v} } "
                                     f"missing {set(w.states) - set(kinds)}")  # fmt: skip
        start = {name: w.stored[name] for name in w.states}
        joined = [{name: np.concatenate([part[name] for turn in step for part in turn]) for name in w.batch} | w.hyper
                  for step in feeds]  # fmt: skip
        expected = truth(whole.model(), w.states, start, joined)
        world, found = World(folder / "ranks"), Verdict("right")
        held = world.starts()
        for at, step in enumerate(feeds):
            world.step(held, world.dealt(step, w.hyper))
            wrong = different(world.whole(held), expected[at], expected[at - 1] if at else start, tolerance)
            if wrong:  # a step that gopt says is not the step of one large batch may differ
                noted = [each.what for each in open_couplings(sharded.program)]
                found = Verdict("noted" if noted else "WRONG", f"step {at}: {wrong} {noted}")
                break
        if verify and found.kind != "WRONG":
            result = gopt.verify(sharded, steps=2)
            if result.outcome == "different":
                return Verdict("alarm", str(result.to_json())[:3000])
            if result.outcome != "equal":
                return Verdict("unconfirmed", str(result.to_json().get("unconfirmed"))[:600])
        return found
    except AssertionError as error:
        return Verdict("WRONG", f"{error} {traceback.format_exc()[-900:]}")
    finally:
        shutil.rmtree(folder)


def is_due(w: Writer, text: str) -> bool:
    """Whether a refusal is right for a step: for the structure, or for a batch that explains a constant."""
    undecided = w.samples != 4 and re.search(UNDECIDED, text)
    return bool(undecided or (w.refusal and re.search(w.refusal, text)))


def different(found: Values, expected: Values, before: Values, tolerance: float) -> str:
    for name, value in expected.items():
        got = found[name]
        if got.dtype != value.dtype or got.shape != value.shape:
            return f"{name}: {got.dtype}{got.shape}, not {value.dtype}{value.shape}"
        a, b, c = (np.asarray(each, np.float64) for each in (got, value, before[name]))
        error, moved = np.abs(a - b).max(initial=0), np.abs(b - c).max(initial=0)
        if not error <= tolerance * moved + tolerance * 1e-2 * np.abs(b).max(initial=0):
            return f"{name}: error {error:.3g}, moved {moved:.3g}"
    return ""
