"""What changes nothing of a step changes neither its roles nor its numbers, in every fixture and in drawn steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, NAMES
from onnx import ModelProto, helper
from steps_gen.edits import KINDS, WHOLE, Edited, before_outputs, behind, products_merged
from steps_gen.engine import Values, World
from steps_gen.make import make
from steps_gen.plan import Plan

import gopt
from gopt.analysis.training import Phase, Training
from gopt.mesh import Mesh
from gopt.runtime.proof import draws

PLANS = {
    "gated adam": Plan(rules=("adam",), gate="flag", decay="decoupled"),
    "clips and halves": Plan(precision="cast", scale="dynamic", gate="finite", clip="global", rules=("momentum", "rms")),
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


@cache
def roles_of(name: str, folder: Path) -> Training:
    return training(model_of(name), folder / f"{name.replace(' ', '_')}.onnx")


def training(model: ModelProto, path: Path) -> Training:
    onnx.save(model, path)
    return gopt.load(path).training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


def same_roles(plain: Training, found: Training, edited: Edited) -> None:
    """Kinds, owners and pairs are the same; a gradient may be called by the name that stands for it."""
    new, old = edited.names, {value: key for key, value in edited.names.items()}

    def first(name: str) -> str:
        return edited.stands_for.get(old.get(name, name), old.get(name, name))

    def told(step: Training, back: bool) -> dict[str, object]:
        def call(name: str) -> str:
            return first(name) if back else edited.stands_for.get(name, name)

        states = {call(s.tensor): (call(s.updated), s.kind, call(s.of) if s.of else None) for s in step.states}
        gradients = {call(name): call(value) for name, value in step.gradients.items()}
        inputs = sorted(map(call, step.batch)), sorted(map(call, step.hyper)), sorted(map(call, step.metrics))
        return {"states": states, "gradients": gradients, "inputs": inputs, "loss": call(step.loss)}

    assert set(new) >= set() and told(found, True) == told(plain, False)


def update_readers(model: ModelProto, step: Training) -> set[str]:
    """The nodes behind the backward that read a gradient, by name."""
    inside = {
        name for node, phase in zip(step.graph.nodes, step.phases) if phase is not Phase.UPDATE for name in node.outputs
    }
    return {node.name for node in model.graph.node if not inside.intersection(node.output)}


def edits(name: str, step: Training, kind: str) -> Edited:
    """The edit of that name: ``before KIND``, ``behind KIND``, or one of the whole model."""
    model = model_of(name)
    where, _, what = kind.partition(" ")
    if where == "before":
        return before_outputs(model, what)
    if where == "behind":
        return behind(model, what, step.gradients.values(), update_readers(model, step))
    return products_merged(model, step.gradients.values()) if kind == "merged" else WHOLE[kind](model)


EDITS = [*(f"{where} {kind}" for where in ("before", "behind") for kind in KINDS), *WHOLE, "merged"]
CASES = [
    (name, edit)
    for name in [*NAMES, *PLANS]
    for edit in EDITS
    if not (name in OPAQUE and edit.startswith("behind")) and not (name.endswith("external") and edit == "renamed")
]


@pytest.mark.parametrize(("name", "edit"), CASES)
def test_roles_stay(name, edit, folder, tmp_path):
    plain = roles_of(name, folder)
    edited = edits(name, plain, edit)
    same_roles(plain, training(edited.model, tmp_path / "edited.onnx"), edited)


# --- and so do the numbers ------------------------------------------------------------------------------------------


def states_after(model: ModelProto, edited: Edited, path: Path) -> list[dict[str, np.ndarray]]:
    """What two ranks hold of every state after a step, each with a batch of its own; by the plain model's names."""
    source = gopt.load(path)
    gopt.shard(source, Mesh.parse("shard=2"), stage=2).write(path.parent / "out")
    world = World(path.parent / "out")
    step, new = source.training, edited.names
    types = {each.name: each.type.tensor_type for each in model.graph.input}
    values = {name: value for name, value in zip(_inputs(model), _drawn(model, step, new))}
    states = {new.get(name, name): value for name, value in values.items()}
    feeds = []
    for rank in range(2):
        generator = np.random.default_rng(rank + 7)
        given = {**states, **world.feeds(rank, states)}
        for name in types:
            if new.get(name, name) in step.batch:
                given[new.get(name, name)] = _batch(values[name], generator, types[name])
        feeds.append(given)
    outputs = world.step(feeds)
    old = {value: key for key, value in new.items()}
    found = []
    for rank, output in enumerate(outputs):
        held: dict[str, np.ndarray] = {}
        for state in world.held[rank]:
            flat, place = output[state["output"]].reshape(-1), 0
            for piece in state["pieces"]:
                count = piece["stop"] - piece["start"]
                held[f"{old.get(piece['tensor'], piece['tensor'])} {piece['start']}"] = flat[place : place + count]
                place += count
        found.append(held)
    return found
