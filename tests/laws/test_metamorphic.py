"""What changes nothing of a step changes neither its roles nor its numbers, in every fixture and in drawn steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, NAMES
from onnx import ModelProto
from products import part
from rank_files import Values
from rank_simulator import World, drawn
from steps_gen.edits import Edited
from steps_gen.make import make
from steps_gen.plan import Plan
from steps_gen.roles import EDITS, changes, edited, training

import gopt
from gopt.records.mesh import Mesh

PLANS = {
    "gated adam": Plan(rules=("adam",), gate="flag", decay="decoupled"),
    "clips and halves": Plan(
        precision="cast", scale="dynamic", gate="finite", clip="global", rules=("momentum", "rms")
    ),
    "running statistics": Plan(network="batch-norm", rules=("soft-sign",), average="ema"),
    "accumulation": Plan(network="embedding", gate="accumulate", rules=("adagrad",), schedule="integer"),
    "one element": Plan(network="singles", rules=("adam",), clip="norm"),
    "relative": Plan(network="tied", form="relative", rules=("momentum",), mask="forward"),
    "several": Plan(network="layer-norm", rules=("lion", "rows", "trust"), metric=True, clip="global-max"),
}
OPAQUE = {"mlp_ort_adamw"}
"""Their update has no nodes of its own, so that nothing can be put behind a gradient for it alone."""


@cache
def model_of(name: str) -> ModelProto:
    if name in PLANS:
        return make(PLANS[name]).plain
    model = onnx.load(FIXTURES / f"{name}.onnx")
    for k, node in enumerate(model.graph.node):
        node.name = f"n{k}"
    return model


CASES = [
    (name, edit)
    for name in [*NAMES, *PLANS]
    for edit in EDITS
    if not (name in OPAQUE and edit.startswith("behind")) and not (name.endswith("external") and edit == "renamed")
]


SOME = [case for k, case in enumerate(CASES) if k % 9 == 0 or (case[0] in PLANS and k % 2)]
"""Those that are tried each time; the rest is ``-m slow``."""


@pytest.mark.parametrize(("name", "edit"), SOME)
def test_roles_stay(name, edit, tmp_path):
    assert changes(model_of(name), edit, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "edit"), [case for case in CASES if case not in SOME])
def test_all_roles_stay(name, edit, tmp_path):
    assert changes(model_of(name), edit, tmp_path) == []


# --- and so do the numbers ------------------------------------------------------------------------------------------


def numbers(model: ModelProto, edit: Edited, folder: Path) -> Values:
    """Every state after one step of two ranks with batches of their own, whole, by the plain model's names."""
    new, path = edit.names, folder / "step.onnx"
    onnx.save(edit.model, path)
    source = gopt.load(path)
    gopt.shard(source, Mesh.parse("shard=2"), stage=2).write(folder / "out", force=True)
    world = World(folder / "out")
    values = {new.get(name, name): value for name, value in drawn(model).items()}
    states = {state.tensor for state in source.training.states}
    others = set(values) - states
    held, feeds = [world.feeds(rank, values) for rank in world.ranks], []
    for rank in world.ranks:
        given = dict(values)
        for name in source.training.batch:
            given[name] = given[name] * (rank + 1) if given[name].dtype.kind == "f" else (given[name] + rank) % 2
        feeds.append({k: v.astype(values[k].dtype) for k, v in given.items() if k in others})
    world.step(held, [feeds])
    old = {value: key for key, value in new.items()}
    return {old.get(name, name): value for name, value in world.whole(held).items()}


FEW = ("before identity", "behind mul-one", "before reshape", "behind flat-pair", "shuffled", "before mul-one")
NO_KERNEL = {"mlp_adamw_bf16"}
"""The runtime that this test has cannot run them; their roles are held above."""
TRIED = [name for name in [*NAMES, *PLANS] if name not in NO_KERNEL and not name.endswith("external")]


def same_numbers(name: str, edit: str, folder: Path) -> None:
    model = model_of(name)
    other = edited(model, training(model, folder / "plain.onnx"), edit)
    wanted, found = numbers(model, Edited(model), folder), numbers(model, other, folder)
    assert wanted.keys() == found.keys()
    loose = 1e-3 if edit in ("split", "merged") or "fp16" in name else 1e-6  # halves round otherwise
    for state, value in wanted.items():
        np.testing.assert_allclose(
            found[state].astype(float), value.astype(float), rtol=loose, atol=loose, err_msg=state
        )


@pytest.mark.parametrize(("name", "edit"), part([(name, FEW[k % len(FEW)]) for k, name in enumerate(TRIED)], 5))
def test_numbers_stay(name, edit, tmp_path):
    same_numbers(name, edit, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "edit"), [each for each in CASES if each[0] in TRIED])
def test_all_numbers_stay(name, edit, tmp_path):
    same_numbers(name, edit, tmp_path)
