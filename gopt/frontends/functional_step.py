"""What all front ends write: a functional step, its names, and its roles as metadata."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from gopt.api import ROLES
from gopt.ir.graph import Graph
from gopt.ir.load import load

LOSS = "loss"
UPDATED = "_out"
"""``W_out`` replaces the state ``W``."""


def add_roles(
    model: onnx.ModelProto, loss: str, states: Mapping[str, str], batch: Sequence[str],
    gradients: Mapping[str, str] = {},
) -> None:  # fmt: skip
    """What is the loss, a state, the batch and a gradient, as metadata that ``gopt`` reads first; data flow finds the
    rest."""
    record = {"loss": loss, "states": dict(states), "params": dict(gradients), "batch": list(batch)}
    entry = model.metadata_props.add()
    entry.key, entry.value = ROLES, json.dumps(record, ensure_ascii=False)


def as_graph(model: onnx.ModelProto) -> Graph:
    """A model in memory, checked as a file is."""
    with tempfile.TemporaryDirectory(prefix="gopt-step-") as folder:
        file = Path(folder) / "step.onnx"
        file.write_bytes(model.SerializeToString(deterministic=True))
        return load(file)
