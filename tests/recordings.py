"""Folders of artifacts with what ONNX Runtime training 1.19.2 computed from them: fixtures/ort/README.md."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from helpers import ROOT

from gopt.artifact.serialize import model_bytes
from gopt.importers.artifacts.checkpoint import read_checkpoint
from gopt.ir.graph import Graph

FOLDERS = ROOT / "fixtures" / "ort"
RECORDED = FOLDERS / "recorded"
NAMES = sorted(each.stem for each in RECORDED.glob("*.checkpoint"))
STEPS, MORE = 3, 2
RATE = 1e-2
Arrays = dict[str, np.ndarray]


def copied(name: str, place: Path, checkpoint: Path | None = None) -> Path:
    """A copy of a folder as ONNX Runtime writes it, or with another checkpoint."""
    folder = place / name
    shutil.copytree(FOLDERS / name, folder)
    if checkpoint is not None:
        shutil.copy(checkpoint, folder / "checkpoint")
    return folder


def scrambled(graph: onnx.GraphProto) -> None:
    """Give every value inside a training graph another name, and gradients one another's."""
    inside = {out for node in graph.node for out in node.output if out} - {each.name for each in graph.output}
    grads = sorted(each for each in inside if each.endswith("_grad"))
    new = {**{each: f"v{k}" for k, each in enumerate(sorted(inside))}, **dict(zip(grads, reversed(grads)))}
    for node in graph.node:
        node.input[:] = [new.get(each, each) for each in node.input]
        node.output[:] = [new.get(each, each) for each in node.output]
    for each in graph.value_info:
        each.name = new.get(each.name, each.name)


def recorded(name: str) -> Arrays:
    """Batches, losses and parameters of all steps, as the real training API gave them."""
    with np.load(RECORDED / f"{name}.npz") as file:
        return dict(file)


def moments(checkpoint: Path) -> Arrays:
    """Optimizer states of a checkpoint, by the names that a step gives them."""
    held = read_checkpoint(checkpoint)
    found = {}
    for group in held.groups:
        for each in group.parameters:
            for state in each.states:
                value = held.value(state)
                assert value is not None
                found[f"{each.parameter}.{state.name}"] = value.numpy()
    return found


class Running:
    """A step on the stock runtime: its states are fed back from step to step."""

    def __init__(self, graph: Graph, roles: Mapping[str, object]) -> None:
        data = model_bytes(graph, {}, "", {})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # it warns of each state that has a first value
        self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.pairs: Mapping[str, str] = roles["states"]  # type: ignore[assignment]
        self.loss = str(roles["loss"])
        self.batch: list[str] = roles["batch"]  # type: ignore[assignment]
        self.states = {name: np.array(graph.initializers[name].numpy()) for name in self.pairs}

    def __call__(self, *batch: np.ndarray) -> float:
        """One step; returns its loss."""
        feeds = {**self.states, "learning_rate": np.array([RATE], np.float32), **dict(zip(self.batch, batch))}
        names = [self.loss, *self.pairs.values()]
        loss, *new = self.session.run(names, feeds)
        self.states = dict(zip(self.pairs, new))
        return float(loss)


def moved(found: np.ndarray, wanted: np.ndarray, before: np.ndarray) -> float:
    """How far a state is from the recorded one, in tolerances of contract section 7 for float32."""
    change = np.linalg.norm(wanted.astype(np.float64) - before)
    allowed = 1e-4 * (change + 1e-3 * np.linalg.norm(wanted))
    return (
        float(np.linalg.norm(found.astype(np.float64) - wanted) / allowed)
        if allowed
        else float((found != wanted).any())
    )


def largest_opset(graph: Graph) -> int:
    return max(each.version for each in graph.header.opset_import if each.domain in ("", "ai.onnx"))


def known_to_onnx(graph: Graph) -> list[str]:
    """Operators of a graph that are not standard ones."""
    found = []
    for node in graph.nodes:
        try:
            onnx.defs.get_schema(node.op_type, largest_opset(graph), node.domain)
        except onnx.defs.SchemaError:
            found.append(f"{node.domain}.{node.op_type}")
    return found
