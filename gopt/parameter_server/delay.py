"""Delay compensation: corrects a gradient for the updates that the parameter got since the trainer pulled it.

First order in the distance, with the square of the gradient for the curvature: ``g' = g + strength * (w - backup) * g *
g``. It replaces the gradient before clip and decay.
"""

from __future__ import annotations

from dataclasses import replace

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType, dtype_code
from gopt.passes.shard.loss_weights import constant_value

PUSHED, BACKUP = "gopt.delay.pushed", "gopt.delay.backup"
PASS = "delay-compensation"


def compensated(graph: Graph, gradient: str, parameter: str, strength: float) -> tuple[Graph, str, str]:
    """Return a block with a compensated gradient, the name of its input for the pushed value, and that for the backup.

    Half precision is computed in float32 and rounded once. Where an element of the parameter has not changed, its
    gradient keeps its bits, also if it is not finite.
    """
    own, held = graph.types[gradient], graph.types[parameter]
    wide = "float64" if "float64" in (own.dtype, held.dtype) else "float32"
    types: dict[str, TensorType] = {}
    nodes: list[Node] = []

    def add(op_type: str, result: str, dtype: str, *inputs: str, **attributes: object) -> str:
        types[result] = TensorType(dtype, () if not inputs else own.shape)
        nodes.append(Node(op_type, inputs, [result], attributes=dict(attributes), made_by=PASS))
        return result

    def widened(name: str, type: TensorType, result: str) -> str:
        return name if type.dtype == wide else add("Cast", result, wide, name, to=dtype_code(wide))

    g = widened(PUSHED, own, "gopt.delay.wide_gradient")
    now = widened(parameter, held, "gopt.delay.wide_parameter")
    before = widened(BACKUP, held, "gopt.delay.wide_backup")
    factor = add("Constant", "gopt.delay.strength", wide, value=constant_value(strength, wide))
    # The way back is subtracted: g - 0 is g also for zeros of either sign, and Where does not keep the sign of a zero.
    term = add("Mul", "gopt.delay.scaled", wide, factor, add("Sub", "gopt.delay.back", wide, before, now))
    for place in (1, 2):
        term = add("Mul", f"gopt.delay.term{place}", wide, term, g)
    nothing = add("Constant", "gopt.delay.zero", wide, value=constant_value(0.0, wide))
    same = add("Equal", "gopt.delay.same", "bool", parameter, BACKUP)
    term = add("Where", "gopt.delay.term", wide, same, nothing, term)
    found = add("Sub", gradient if own.dtype == wide else "gopt.delay.sum", wide, g, term)
    if own.dtype != wide:
        add("Cast", gradient, own.dtype, found, to=dtype_code(own.dtype))
    inputs = {PUSHED: own, BACKUP: held} | {name: type for name, type in graph.inputs.items() if name != gradient}
    all_types = {**graph.types, **types, PUSHED: own, BACKUP: held}
    return replace(graph, nodes=[*nodes, *graph.nodes], inputs=inputs, types=all_types), PUSHED, BACKUP
