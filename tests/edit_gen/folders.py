"""Folders of ranks of drawn steps, of every generator."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from gopt.cli.main import main
from mesh_gen import judge as streams
from mesh_gen.make import Recipe, make
from option_gen.make import Setting, fixtures, structure, wild
from option_gen.rows import Row, as_shard
from option_gen.servers import Split

import gopt
from gopt.errors import UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh

Write = Callable[[Path], None]
WIRES = ("int8", "fp8")


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


KINDS: Mapping[str, Callable[[int], tuple[str, Write]]] = {
    "settings": setting, "streams": stream, "stages": stages, "rows": row,
    "structures": lambda seed: setting(seed, structure(seed)),
    "wild": lambda seed: setting(seed, wild(seed)),
    "servers": servers,
    "served": lambda seed: servers(seed, random.Random(seed).choice((structure(seed), *fixtures()))),
}  # fmt: skip
"""Kind -> the folder of a seed: in words, and what writes it."""


def drawn_kind(seed: int) -> str:
    return random.Random(f"kind {seed}").choices(list(KINDS), [3, 5, 2, 1, 2, 2, 1, 1])[0]
