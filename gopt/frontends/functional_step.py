"""Names and role metadata of a functional step, which all front ends share."""

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
    """Write the loss, states, batch and gradients as metadata, which gopt reads first; data flow finds the other
    roles."""
    record = {"loss": loss, "states": dict(states), "params": dict(gradients), "batch": list(batch)}
    entry = model.metadata_props.add()
    entry.key, entry.value = ROLES, json.dumps(record, ensure_ascii=False)
