"""Steps of four families, split along axes of every kind: what gopt reads in them, and ranks beside the source.

``fixtures/families``: Llama, ViT, T5, a mixture of experts.
"""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import FIXTURES, source
from products import fewer, spread

import gopt
from gopt.offline.inspect import inspect_model
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

FAMILIES = sorted(path.stem for path in (FIXTURES / "families").glob("*.onnx"))
WAYS = [
    ("tp=2", True, 2, 1), ("tp=3", False, 2, 1), ("tp=4", True, 2, 1), ("shard=2,tp=2", False, 1, 1),
    ("shard=2,tp=2", True, 3, 2), ("dp=2,tp=3", True, 2, 2), ("tp=4", False, 2, 1), ("shard=2,tp=2", False, 2, 2),
]  # fmt: skip
"""Mesh, whether activations are shared out by tokens, stage, micro-steps."""


def equal(name, mesh, folder, *, sequence=False, stage=2, accumulate=1) -> None:
    options = {"tensor-parallel": {"sequence": sequence}, "shard": {"stage": stage}}
    made = gopt.shard(
        source(f"families/{name}"), Mesh.parse(mesh), pipeline=build_pipeline(defaults=options), accumulate=accumulate
    )
    made.write(folder)
    result = Verifier(folder).run(confirm=False)
    assert result.equal, result.to_json()
    assert result.compared > 0


def test_all_four_are_there():
    assert FAMILIES == ["llama_adamw_clip", "moe_adamw", "t5_adamw", "vit_mom"]


@pytest.mark.parametrize(("name", "way"), fewer(spread(FAMILIES, WAYS), 1))
def test_ranks_equal_the_source(name, way, tmp_path):
    mesh, sequence, stage, accumulate = way
    equal(name, mesh, tmp_path / "out", sequence=sequence, stage=stage, accumulate=accumulate)


@pytest.mark.parametrize("mesh", ["tp=2,ep=2", pytest.param("shard=2,ep=3", marks=pytest.mark.slow)])
def test_experts_on_an_axis_of_their_own(mesh, tmp_path):
    equal("moe_adamw", mesh, tmp_path / "out")


PARAMETERS = {"llama_adamw_clip": 21, "moe_adamw": 16, "t5_adamw": 26, "vit_mom": 32}
EXTRAS = {"t5_adamw": 1, "vit_mom": 6}
"""Inputs of the batch beside x and y."""


@pytest.mark.parametrize("name", FAMILIES)
def test_roles(name):
    training = source(f"families/{name}").training
    assert training.loss == "loss" and not training.metrics and training.hyper == ["lr"]
    adam, count = "adamw" in name, PARAMETERS[name]
    kinds = Counter(state.kind.value for state in training.states)
    assert kinds["parameter"] == count == len(training.gradients)
    assert kinds["optimizer_state"] == (2 if adam else 1) * count and kinds["scalar"] == adam
    assert training.batch[:2] == ["x", "y"] and len(training.batch) == 2 + EXTRAS.get(name, 0)
    inputs = list(training.graph.inputs)
    moments = [f"{state.of}." for state in training.states if state.kind.value == "optimizer_state"]
    assert len(inputs) == len(training.batch) + 1 + len(training.states) and len(set(moments)) == count


@pytest.mark.parametrize("name", FAMILIES)
def test_optimizers(name):
    found = inspect_model(source(f"families/{name}"))
    assert [each.name for each in found.optimizers] == ["AdamW" if "adamw" in name else "momentum"]
    assert len(found.controls.clips) == ("clip" in name)
