"""Phase of a node in a training step."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """Set on the nodes of a source when its roles are recovered; nodes that passes add have none."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
