"""Names and role metadata of a functional step, which all front ends share."""

from __future__ import annotations

import onnx

from gopt.documents.roles import RolesRecord
from gopt.ir.graph import ROLES

LOSS = "loss"
UPDATED = "_out"
"""``W_out`` replaces the state ``W``."""


def add_roles(model: onnx.ModelProto, record: RolesRecord) -> None:
    """Write what a front end knows as metadata, which gopt reads first; data flow finds the other roles."""
    model.metadata_props.add(key=ROLES, value=record.text())
