"""What the nodes of one rank make of values, by onnx's own reference."""

from __future__ import annotations

import numpy as np
from node_models import evaluated

from gopt.lower.layout_operators import Lowered


def run(lowered: Lowered, values: dict[str, np.ndarray]) -> np.ndarray:
    """What the nodes make, or the constant or operand that stands for it."""
    known = values | lowered.constants
    nodes = [each.to_proto() for each in lowered.nodes()]
    if not nodes:
        return known[lowered.alias or "out"]
    return evaluated(nodes, known, ["out"])[0]
