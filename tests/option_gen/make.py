"""A fixture, a mesh of any axes, and options of any pass, drawn together from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from drawn_schedules import draw
from helpers import FIXTURES, stage_on
from mesh_gen.make import Recipe, make
from onnx import ModelProto
from option_values import PASSES, SCHEDULES
from whole_gen.kinds import of_seed
from whole_gen.steps import written as of_plan
from wild_gen.form import Form
from wild_gen.table import GENERAL, rewritten

from gopt.schedules.schedule_file import to_text

STREAM = "stream "
"""A step of ``mesh_gen``: this, and the seed of its recipe."""
DROPPED = "dropped "
"""A step of ``mesh_gen`` with fewer tokens behind a block: this, and the seed."""
STRUCTURE, WRITTEN = "structure ", "written "
"""Steps of ``whole_gen``, of the table of structures or not: this, and the seed."""
STEPS: Mapping[str, Callable[[int], ModelProto]] = {
    STREAM: lambda seed: make(Recipe.draw(seed)).model, DROPPED: lambda seed: make(Recipe.dropped(seed)).model,
    STRUCTURE: lambda seed: of_seed(seed, SAMPLES, 1).model(),
    WRITTEN: lambda seed: of_plan(seed, SAMPLES, 1).model(),
}  # fmt: skip
FORM = " / "
"""Behind a step, and in front of a form of ``wild_gen`` that it is written in."""
SAMPLES = 4
DRAWN = "drawn "
"""A schedule of ``drawn_schedules``: this, and the seed, members and micro-batches."""
SMALL = ("mlp_*", "cnn_*", "emb_*", "gpt_adamw", "optim/*", "sparse/*", "families/*", "real/mlp_*", "real/dropout_*")
AXES = ("pp", "dp", "shard", "tp")
OWN_AXES = {
    "cnn_*": "hw", "*/vit_*": "hw", "gpt_*": ("cp", "sp"), "*/llama_*": ("cp", "sp"), "*/moe_*": ("ep", "ep", "cp"),
    f"{STREAM}*": ("cp", "sp", "ep"), f"{DROPPED}*": (*("cp", "sp") * 3,),
}  # fmt: skip
"""Fixtures -> axes that split what only they have: rows of images, tokens, experts."""
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """How a step is sharded. ``step``: a fixture, or a drawn step; ``passes``: options of passes."""

    step: str
    mesh: str
    stage: int
    accumulate: int
    schedule: str | None
    passes: Mapping[str, Mapping[str, object]]

    @classmethod
    def draw(cls, seed: int, step: str | None = None) -> Setting:
        """The setting of a seed, on 2 to 8 ranks; of a ``step``, or of a drawn one."""
        r = random.Random(f"options {seed}")
        if step is None:
            step = r.choice(fixtures()) if r.random() < 0.75 else f"{STREAM}{r.randrange(100000)}"
        own = [axis for pattern, axes in OWN_AXES.items() if fnmatch(step, pattern) for axis in axes]
        axes = _axes(r, [*AXES, *own])
        stages = any(axis == "pp" for axis, _ in axes)
        accumulate = r.choice((1, 2, 3, 4, 6)) if stages else r.choice((1, 1, 1, 2, 3))
        schedule = r.choice(SCHEDULES) if stages and r.random() < 0.8 else None
        mesh = ",".join(f"{axis}={size}" for axis, size in axes)
        stage = r.randint(0, 3)
        if schedule and r.random() < 0.4:
            schedule = f"{DRAWN}{r.randrange(100000)} {dict(axes)['pp']} {accumulate}"
        ordered = schedule if accumulate > 1 else None
        return cls(step, mesh, stage, accumulate, ordered, _passes(r, stage_on(mesh, stage) or 0))

    def options(self, folder: Path) -> dict[str, Any]:
        """Keywords of ``gopt.shard``; a drawn schedule is written into the folder."""
        return {
            "stage": stage_on(self.mesh, self.stage), "accumulate": self.accumulate,
            "schedule": self.schedule and written(self.schedule, folder), "passes": self.passes,
        }  # fmt: skip

    @property
    def forms(self) -> list[Form]:
        """The forms that the step is written in."""
        return [GENERAL[name] for name in self.step.split(FORM)[1:]]

    @property
    def plain(self) -> Setting:
        """The same of the step as it is."""
        return replace(self, step=self.step.split(FORM)[0])

    def file(self, folder: Path) -> Path:
        """The step's file: a fixture, or written into the folder. Raises Unfit."""
        return self.named_file(folder)[0]

    def named_file(self, folder: Path) -> tuple[Path, dict[str, str]]:
        """The file, and what became of the plain step's names."""
        plain = self.plain.step
        kind, path = next((kind for kind in STEPS if plain.startswith(kind)), None), folder / "step.onnx"
        if kind is None and not self.forms:
            return FIXTURES / f"{plain}.onnx", {}
        model = STEPS[kind](int(plain.removeprefix(kind))) if kind else onnx.load(FIXTURES / f"{plain}.onnx")
        names = rewritten(model, self.forms, folder) if self.forms else {}
        path.write_bytes(model.SerializeToString())
        return path, names

    def told(self) -> str:
        """As a command line."""
        return " ".join([f"{self.step}.onnx", *self.words()])

    def words(self) -> list[str]:
        """The words of the command line behind the step."""
        stage = stage_on(self.mesh, self.stage)
        words = ["--mesh", self.mesh, *([] if stage is None else ["--stage", str(stage)])]
        words += ["--micro-batches", str(self.accumulate)] * (self.accumulate > 1)
        words += ["--schedule", str(self.schedule)] * (self.schedule is not None)
        options = [f"{owner}.{name}={value}" for owner, table in self.passes.items() for name, value in table.items()]
        return words + [word for option in options for word in ("-O", option)]


def written(word: str, folder: Path) -> str:
    """The word; the path of a file in the folder where the word is a drawn schedule."""
    if not word.startswith(DRAWN):
        return word
    path = folder / f"{word}.txt"
    path.write_text(to_text(draw(*map(int, word.removeprefix(DRAWN).split()))))
    return str(path)


def outcomes(step: str, *good: str) -> tuple[str, ...]:
    """The ``good`` outcomes of a step: ranks of a drawn step may be unproven, too."""
    return (*good, "unproven") if step.startswith((*STEPS,)) else good


def structure(seed: int) -> str:
    """The name of a drawn step of a seed: of a structure, two of three times."""
    return f"{STRUCTURE if seed % 3 else WRITTEN}{seed}"


def dropped(seed: int) -> str:
    """The name of a drawn step with fewer tokens."""
    return f"{DROPPED}{seed}"


def wild(seed: int) -> str:
    """A drawn step or a fixture in one form or two."""
    r = random.Random(f"wild {seed}")
    step = r.choice((structure(seed), r.choice(fixtures()), f"{STREAM}{seed}"))
    return FORM.join([step, *r.sample([*GENERAL], r.choice((1, 2)))])


@cache
def fixtures() -> tuple[str, ...]:
    """Names of the small fixtures that are one file each."""
    files = sorted(path for pattern in SMALL for path in Path(FIXTURES).glob(f"{pattern}.onnx"))
    return tuple(str(path.relative_to(FIXTURES).with_suffix("")) for path in files)


def _axes(r: random.Random, names: Sequence[str]) -> list[tuple[str, int]]:
    while True:
        drawn = dict.fromkeys(r.sample(names, r.choice((1, 2, 2, 2, 3))))
        axes = [(axis, r.choice((2, 2, 2, 3, 4))) for axis in drawn]
        if math.prod(size for _, size in axes) <= MOST_RANKS:
            return axes


def _passes(r: random.Random, stage: int) -> dict[str, dict[str, object]]:
    """Each option away from its default in one setting of six; passes on request in one of four."""
    passes: dict[str, dict[str, object]] = {}
    for owner, options in PASSES.items():
        if owner in ("recompute", "offload") and r.random() < 0.75:
            continue
        chance = 0.7 if owner in ("recompute", "offload") else 1 / 6
        drawn = {name: r.choice(values) for name, values in options.items() if r.random() < chance}
        if owner == "shard":
            drawn = _used(drawn, stage)
        if drawn:
            passes[owner] = drawn
    return passes


def _used(drawn: dict[str, object], stage: int) -> dict[str, object]:
    """The options of ``shard`` that go together at a stage."""
    unused = () if stage else ("partition", "owners", "rule", "min-piece", "style")
    late = () if stage == 3 else ("reshard-after-forward", "persist")
    kept = {name: value for name, value in drawn.items() if name not in (*unused, *late)}
    if "rule" in kept or "min-piece" in kept:
        kept.pop("style", None)
        kept["partition"] = "rows"
    if "style" in kept:
        kept["partition"] = "whole"
    return kept
