"""Roles before and after an edit that changes nothing."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import ModelProto

import gopt
from gopt.analysis.training import Phase, TrainingGraph
from steps_gen.edits import KINDS, WHOLE, Edited, before_outputs, behind, products_merged

EDITS = (*(f"{where} {kind}" for where in ("before", "behind") for kind in KINDS), *WHOLE, "merged")


def training(model: ModelProto, path: Path) -> TrainingGraph:
    """The roles that gopt finds; ``path``: a place for the file."""
    onnx.save(model, path)
    return gopt.load(path).training


def edited(model: ModelProto, step: TrainingGraph, kind: str) -> Edited:
    """The edit of that name: ``before KIND`` of an output, ``behind KIND`` of a gradient, or one of the whole model."""
    where, _, what = kind.partition(" ")
    if where == "before":
        return before_outputs(model, what)
    if where == "behind":
        return behind(model, what, step.gradients.values(), update_readers(model, step))
    return products_merged(model, step.gradients.values()) if kind == "merged" else WHOLE[kind](model)


def update_readers(model: ModelProto, step: TrainingGraph) -> set[str]:
    """The nodes that stand in the update, by name."""
    inside = {name for node in step.graph.nodes if node.phase is not Phase.UPDATE for name in node.outputs}
    return {node.name for node in model.graph.node if not inside.intersection(node.output)}


def told(step: TrainingGraph, edit: Edited) -> dict[str, object]:
    """Kinds, owners, pairs, gradients and the rest by their first names; what stands for a value is called as it is."""
    old = {new: name for name, new in edit.names.items()}

    def first(name: str) -> str:
        name = old.get(name, name)
        return edit.stands_for.get(name, name)

    states = {first(s.tensor): (first(s.updated), s.kind.value, first(s.of) if s.of else "") for s in step.states}
    return {
        **{f"state {name}": what for name, what in states.items()},
        **{f"gradient of {first(name)}": first(value) for name, value in step.gradients.items()},
        "batch": sorted(map(first, step.batch)),
        "hyper": sorted(map(first, step.hyper)),
        "metrics": sorted(map(first, step.metrics)),
        "loss": first(step.loss),
    }


def changes(model: ModelProto, kind: str, folder: Path) -> list[str]:
    """What an edit changes of the roles, one line each; nodes of the model have names."""
    plain = training(model, folder / "plain.onnx")
    edit = edited(model, plain, kind)
    found = told(training(edit.model, folder / "edited.onnx"), edit)
    wanted = told(plain, Edited(model, {}, edit.stands_for))
    names = sorted({*wanted, *found})
    return [
        f"{name}: {wanted.get(name)} becomes {found.get(name)}" for name in names if wanted.get(name) != found.get(name)
    ]
