"""What all front ends write: a functional step, its names, and its roles as metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import onnx

from gopt.api import ROLES

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
