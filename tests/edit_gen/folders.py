"""Folders of ranks of drawn steps, of every generator."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from gopt.cli.main import main
from mesh_gen import judge as streams
from mesh_gen.make import Recipe, make
from option_gen.make import Setting, dropped, fixtures, structure, wild
from option_gen.rows import Row, as_shard
from option_gen.servers import Split
from whole_gen.judge import MESHES, SPLIT, STAGED, drawn_memory
from whole_gen.judge import drawn as of_step
from whole_gen.kinds import of_seed
from whole_gen.mixed import written_mixed
from whole_gen.splits import drawn_split
from whole_gen.steps import written

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh

Write = Callable[[Path], None]
NARROW = ((np.float32, np.float64), (np.float16, np.float32), (np.float16,))
"""Types of parameters."""


def setting(seed: int, step: str | None = None) -> tuple[str, Write]:
    drawn = Setting.draw(seed, step)

    def write(folder: Path) -> None:
        path = drawn.file(folder.parent)
        gopt.shard(path, drawn.mesh, prove=False, **drawn.options(folder.parent)).write(folder)

    return drawn.told(), write


def stream(seed: int) -> tuple[str, Write]:
    """Tokens on a mesh, with placements of parameters."""
    recipe = Recipe.draw(seed)
    step = make(recipe)
    drawn = streams.Setting.draw(step)

    def write(folder: Path) -> None:
        path = folder.parent / "step.onnx"
        path.write_bytes(step.model.SerializeToString(deterministic=True))
        options = {"tensor-parallel": dict(drawn.options), "shard": {"stage": drawn.stage}}
        made = gopt.shard(
            gopt.load(path), Mesh.parse(drawn.mesh), accumulate=drawn.micro, prove=False,
            pipeline=build_pipeline(defaults=options),
        )  # fmt: skip
        made.write(folder)

    return f"{recipe.told()} @ {drawn.told()}", write


def servers(seed: int, step: str | None = None) -> tuple[str, Write]:
    drawn = Split.draw(seed, step)

    def write(folder: Path) -> None:
        path = drawn.step.file(folder.parent)
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
            if main(["split", str(path), *drawn.words, "-o", str(folder), "--quiet"]):
                raise UnsupportedError(said.getvalue())

    return drawn.told(), write


def row(seed: int, step: str | None = None) -> tuple[str, Write]:
    drawn = Row.draw(seed, step)

    def write(folder: Path) -> None:
        path = drawn.step.file(folder.parent)
        plan = gopt.plan(path, drawn.over, device=drawn.device, link=drawn.link, memory=drawn.memory)
        choice = plan.choices[int(drawn.share * len(plan.choices))].choice
        as_shard(choice, path, drawn.link, prove=False).write(folder)

    return drawn.told(), write


def stages(seed: int) -> tuple[str, Write]:
    """A step on stages that follow a schedule."""
    r = random.Random(f"stages {seed}")
    step = r.choice(["mlp_adamw", "gpt_adamw", "optim/clip_global", "mlp_adamw_fp16_scaler", "families/t5_adamw",
                     "real/mlp_adamw", "cnn_sgd", "emb_adamw", f"stream {seed}", f"structure {seed}"])  # fmt: skip
    for number in range(seed * 1000, seed * 1000 + 1000):
        drawn = Setting.draw(number, step)
        if drawn.schedule:
            return setting(number, step)
    return setting(seed, step)


def whole(seed: int) -> tuple[str, Write]:
    """A step of ``whole_gen`` with reductions, roles and memory of its own; in doubles, mixed types or halves."""
    r = random.Random(f"whole {seed}")
    make = r.choice((of_seed, of_seed, written, written_mixed))
    w = make(seed, 4, 1) if make is not written_mixed else written_mixed(seed, 4, 1, r.choice(NARROW))
    meshes = r.choice((MESHES, SPLIT, STAGED))
    drawn = drawn_memory(seed, meshes, w) if r.random() < 0.6 else of_step(seed, meshes, w)
    if r.random() < 0.2 and "loss_reduction" not in w.options:
        drawn.options["loss_reduction"] = r.choice(("sum", "weighted"))

    def write(folder: Path) -> None:
        path = folder.parent / "step.onnx"
        onnx.save(w.model(), str(path))
        source = gopt.load(str(path), roles=drawn.roles_of(w))
        gopt.shard(source, drawn.mesh, prove=False, **drawn.options_of(w)).write(folder)

    return f"{make.__name__} {drawn}", write


def whole_served(seed: int) -> tuple[str, Write]:
    """A step of ``whole_gen`` between trainers and servers."""
    r = random.Random(f"whole served {seed}")
    w = of_seed(seed, 4, 1, servers=True) if r.random() < 0.7 else written(seed, 4, 1)
    drawn = replace(drawn_split(seed), reduce=w.options.get("loss_reduction", "mean"))

    def write(folder: Path) -> None:
        path = folder.parent / "step.onnx"
        onnx.save(w.model(), str(path))
        roles = RoleMap("loss" if "loss" in w.outputs else "", dict(w.states))
        gopt.split(gopt.load(str(path), roles=roles), drawn.options()).write(folder)

    return str(drawn), write


KINDS: Mapping[str, Callable[[int], tuple[str, Write]]] = {
    "settings": setting, "streams": stream, "stages": stages, "rows": row,
    "structures": lambda seed: setting(seed, structure(seed)),
    "wild": lambda seed: setting(seed, wild(seed)),
    "dropped": lambda seed: setting(seed, dropped(seed)),
    "servers": servers, "whole": whole, "whole served": whole_served,
    "served": lambda seed: servers(seed, random.Random(seed).choice((structure(seed), *fixtures()))),
}  # fmt: skip
"""Kind -> the folder of a seed: in words, and what writes it."""


def drawn_kind(seed: int) -> str:
    return random.Random(f"kind {seed}").choices(list(KINDS), [3, 5, 2, 1, 2, 2, 3, 1, 2, 1, 1])[0]
