"""Delay compensation: corrects a gradient for the updates the parameter got since the trainer pulled it.

First order in the distance, with the square of the gradient for the curvature: ``g' = g + strength * (w - pulled) * g *
g``. It replaces the gradient before clip and decay.
"""

from __future__ import annotations

from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code, scalar_of
from gopt.records.placements import Sharding


def compensate(
    rewriter: GraphRewriter, gradient: str, pushed: str, parameter: str, pulled: str, strength: float, where: Sharding
) -> None:  # fmt: skip
    """Add the nodes making ``gradient`` of what was ``pushed``, the ``parameter`` as it is, and what was ``pulled``.

    Half precision is computed in float32 and rounded once. Where an element of the parameter has not changed, its
    gradient keeps its bits, also if it is not finite.
    """
    types = rewriter.graph.types
    gradient_type, stored_type = types[pushed], types[parameter]
    wide = "float64" if "float64" in (gradient_type.dtype, stored_type.dtype) else "float32"

    def add(op_type: str, role: str, dtype: str, *inputs: str, **attributes: object) -> str:
        result = role if role == gradient else f"{gradient}.{role}"
        type = TensorType(dtype, gradient_type.dims)
        rewriter.add(op_type, inputs, {result: type}, attributes=attributes, sharding=where)
        return result

    def widened(name: str, type: TensorType, role: str) -> str:
        return name if type.dtype == wide else add("Cast", role, wide, name, to=dtype_code(wide))

    g, now = widened(pushed, gradient_type, "wide"), widened(parameter, stored_type, "now")
    before = widened(pulled, stored_type, "before")
    factor = rewriter.constant(f"{gradient}.strength", scalar_of(strength, wide), sharding=where)
    # The way back is subtracted: g - 0 is g also for zeros of either sign, and Where does not keep the sign of a zero.
    term = add("Mul", "scaled", wide, factor, add("Sub", "back", wide, before, now))
    for power in (1, 2):
        term = add("Mul", f"term{power}", wide, term, g)
    nothing = rewriter.constant(f"{gradient}.zero", scalar_of(0.0, wide), sharding=where)
    equal = add("Equal", "same", "bool", parameter, pulled)
    term = add("Where", "term", wide, equal, nothing, term)
    corrected = add("Sub", gradient if gradient_type.dtype == wide else "sum", wide, g, term)
    if gradient_type.dtype != wide:
        add("Cast", gradient, gradient_type.dtype, corrected, to=dtype_code(gradient_type.dtype))
