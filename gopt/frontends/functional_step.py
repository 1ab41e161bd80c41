"""Names and role metadata of a functional step, which all front ends share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from gopt.api import ROLES
from gopt.documents.draws import Draw
from gopt.documents.roles import RolesRecord

LOSS = "loss"
UPDATED = "_out"
"""``W_out`` replaces the state ``W``."""


def add_roles(
    model: onnx.ModelProto, loss: str, states: Mapping[str, str], batch: Sequence[str],
    gradients: Mapping[str, str] = {}, draws: Mapping[str, Draw] = {},
) -> None:  # fmt: skip
    """Write the loss, states, batch, gradients and draws as metadata, which gopt reads first; data flow finds the other
    roles."""
    record = RolesRecord(loss=loss, states=states, params=gradients, batch=tuple(batch), draws=dict(draws) or None)
    model.metadata_props.add(key=ROLES, value=record.text())
