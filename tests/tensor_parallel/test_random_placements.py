"""A law: whatever parameters are split by whatever dimensions, ranks and source agree. Placements are drawn."""

from __future__ import annotations

import random

import pytest
from fuzz_placements import outcome, placements
from helpers import source
from products import part
from steps_gen.make import make
from steps_gen.plan import draw as draw_plan

import gopt
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

STEPS = ("gpt_adamw", "cnn_mom_fp16", "emb_adamw", "mlp_mom_clip_sched", "mlp_lamb", "mlp_adamw_accum", "mlp_muon")
FAMILIES = ("families/llama_adamw_clip", "families/moe_adamw", "families/t5_adamw", "families/vit_mom")


def draw(name: str, seed: int, members: int) -> str:
    """Half of the parameters, each split along one of the dimensions that come out even."""
    generator = random.Random(f"{name} {seed}")
    training = source(name).training
    words: list[str] = []
    for state in training.parameters:
        dims = training.graph.types[state.tensor].dims
        even = [dim for dim, size in enumerate(dims) if size % members == 0]
        if even and (generator.random() < 0.5 or not words):
            dim = generator.choice(even)
            runs = generator.choice([r for r in (1, 2, 3) if dims[dim] % (r * members) == 0])
            words.append(f"{state.tensor}:dim{dim}/{runs}")
        else:
            words.append(f"{state.tensor}:replicate")
    return ";".join(words)


@pytest.mark.parametrize("name", [*part(STEPS, 2), *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(8)])
def test_drawn_placements(name, seed, tmp_path):
    options = {
        "tensor-parallel": {"parameters": draw(name, seed, 2), "auto": False, "sequence": bool(seed % 2)},
        "shard": {"stage": seed % 4},
    }
    if name not in ("gpt_adamw", "emb_adamw", *FAMILIES):
        options["tensor-parallel"]["sequence"] = False
    mesh = Mesh.parse("tp=2" if seed % 3 else "shard=2,tp=2")
    gopt.shard(source(name), mesh, pipeline=build_pipeline(defaults=options)).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal, result.to_json()
    assert result.compared > 0


GENERATED = {
    1313: "two parameters that share a gradient are split differently",
    1431: "a function of the model takes a norm of its gradient",
    1333: "a shared gradient and micro-steps",
}
"""Seeds of generated steps that were once wrong or refused -> what they have."""


@pytest.mark.parametrize("seed", GENERATED)
def test_generated_steps(seed, tmp_path):
    made = make(draw_plan(seed))
    path = tmp_path / "step.onnx"
    path.write_bytes(made.model.SerializeToString(deterministic=True))
    step = gopt.load(path)
    words = placements(step, random.Random(seed))
    options = {"tensor-parallel": {"parameters": words, "auto": False}, "shard": {"stage": 1}}
    made_ranks = gopt.shard(step, Mesh.parse("tp=2"), accumulate=2, pipeline=build_pipeline(defaults=options))
    made_ranks.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(confirm=False).equal


DRAWN = {
    8936300: "a gradient that the backward reads as well, in parts, on ranks that see different data",
    8936325: "the same: a state followed one rank's data",
    8936522: "the same, and micro-steps: verify scaled the gradient on its way to the backward",
    8936404: "statistics that are gathered in each micro-step, and no axis of data",
}
"""Seeds of steps, placements, meshes and stages that were once wrong or refused -> what they have."""


@pytest.mark.parametrize("seed", DRAWN)
def test_drawn_steps(seed, tmp_path):
    assert outcome(make(draw_plan(seed)), seed, tmp_path) == ("equal", "")
