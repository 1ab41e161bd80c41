"""Draws of operators that work element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .sketch import Rejected, Sketch

SMOOTH = {
    "Tanh": 13, "Sigmoid": 13, "Softplus": 13, "Sin": 13, "Cos": 13, "Erf": 13, "Softsign": 13, "Identity": 13,
    "Neg": 13, "Gelu": 20, "Mish": 18, "Atan": 13, "Asinh": 13, "Swish": 24, "Sinh": 13, "Exp": 13,
}  # fmt: skip
KINKED = {
    "Relu": (0.0,), "Abs": (0.0,), "LeakyRelu": (0.0,), "Elu": (0.0,), "Selu": (0.0,), "Celu": (0.0,),
    "HardSwish": (-3.0, 3.0), "HardSigmoid": (-2.5, 2.5), "ThresholdedRelu": (1.0,), "Shrink": (-0.5, 0.5),
}  # fmt: skip
"""Operator -> where it has no derivative."""


def smooth(s: Sketch) -> str:
    name = str(s.one_of(*[each for each, since in SMOOTH.items() if since <= s.opset]))
    return s.op(name, [s.pick()], **({"approximate": "tanh"} if name == "Gelu" and s.chance(0.5) else {}))


def kinked(s: Sketch) -> str:
    name, x = str(s.one_of(*KINKED)), s.pick()
    for kink in KINKED[name]:
        s.apart(s.values[x], np.full(s.shape(x), kink))
    alpha = {"alpha": 0.3} if name in ("LeakyRelu", "Elu", "Celu") and s.chance(0.5) else {}
    return s.op(name, [x], **alpha)


def positive(s: Sketch) -> str:
    """Operators of positive operands, behind 0.3 + x²."""
    x = s.pick()
    above = s.op("Add", [s.op("Mul", [x, x]), s.scalar(0.3)])
    name = s.one_of("Sqrt", "Log", "Reciprocal", "Pow", "Log")
    if name != "Pow":
        return s.op(name, [above])
    exponent = s.one_of(s.scalar(float(s.one_of(0.5, 2.0, -1.0, 1.7))), operand(s, s.shape(above)))
    return s.op("Pow", [above, exponent])


def operand(s: Sketch, shape: tuple[int, ...]) -> str:
    """A weight, or another value, that broadcasts with a shape."""
    other = [1 if s.chance(0.3) else size for size in shape]
    other = other[s.below(len(other) + 1) :] if other and s.chance(0.4) else other
    fitting = [name for name in s.floats if broadcasts(s.shape(name), shape)]
    if fitting and s.chance(0.5):
        return str(s.one_of(*fitting))
    if not other:
        return s.scalar(0.7)
    if s.chance(0.1):
        other = [s.below(4, 1), *other] if len(other) < 4 else other
    return s.weight(*other)


def broadcasts(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(one, two)
    except ValueError:
        return False
    return True


def binary(s: Sketch) -> str:
    x, name = s.pick(), s.one_of("Add", "Sub", "Mul", "Max", "Min", "Div", "Add", "Mul")
    y = operand(s, s.shape(x))
    if name in ("Max", "Min"):
        s.apart(*np.broadcast_arrays(s.values[x], s.values[y]))
    if name == "Div":
        y = s.op("Add", [s.op("Mul", [y, y]), s.scalar(0.5)])
    return s.op(name, [x, y] if s.chance(0.6) else [y, x])


def variadic(s: Sketch) -> str:
    x, name = s.pick(), s.one_of("Sum", "Mean", "Max", "Min")
    given = [x, *(operand(s, s.shape(x)) for _ in range(s.below(3)))]
    if name in ("Max", "Min"):
        arrays = np.broadcast_arrays(*(s.values[each] for each in given))
        for place, first in enumerate(arrays):
            for second in arrays[place + 1 :]:
                s.apart(first, second)
    return s.op(name, given)


def where(s: Sketch) -> str:
    x = s.pick()
    y, compared = operand(s, s.shape(x)), operand(s, s.shape(x))
    s.apart(*np.broadcast_arrays(s.values[x], s.values[compared]))
    test = s.op(s.one_of("Greater", "Less", "GreaterOrEqual", "LessOrEqual"), [x, compared])
    if s.chance(0.3):
        test = s.op("Not", [test])
    return s.op("Where", [test, x, y] if s.chance(0.5) else [test, y, x])


def clip(s: Sketch) -> str:
    x, low, high = s.pick(), -0.6, 0.9
    for bound in (low, high):
        s.apart(s.values[x], np.full(s.shape(x), np.float32(bound)))
    given = s.one_of([s.scalar(low), s.scalar(high)], [s.scalar(low)], ["", s.scalar(high)])
    return s.op("Clip", [x, *given])


def prelu(s: Sketch) -> str:
    x = s.pick(2, 3, 4)
    s.apart(s.values[x], np.zeros(s.shape(x)))
    size = s.shape(x)
    return s.op("PRelu", [x, s.weight(*s.one_of(size, size[-1:], (size[1], *[1] * (len(size) - 2)), (1,)))])


def mod(s: Sketch) -> str:
    x = s.pick()
    y = s.op("Add", [s.op("Abs", [s.weight(*s.shape(x))]), s.scalar(1.0)])
    share = s.values[x] / s.values[y]
    if (np.abs(share - np.round(share)) < 1e-2).any():
        raise Rejected
    return s.op("Mod", [x, y], fmod=1)


def casts(s: Sketch) -> str:
    """Through another type and back."""
    return s.op("Cast", [s.op("Cast", [s.pick()], to=11)], to=1)


def mask(s: Sketch) -> str:
    """A product with what a comparison makes of a value."""
    x = s.pick()
    s.apart(s.values[x], np.zeros(s.shape(x)))
    test = s.op("Cast", [s.op("Greater", [x, s.scalar(0.0)])], to=1)
    return s.op("Mul", [x, s.op("Add", [test, s.scalar(0.2)])])


def rounded(s: Sketch) -> str:
    """A step beside a smooth path."""
    x, name = s.pick(), s.one_of("Floor", "Ceil", "Round", "Sign")
    nearest = np.abs(s.values[x] * 2 - np.round(s.values[x] * 2))
    if (nearest < 1e-2).any():
        raise Rejected
    return s.op("Add", [x, s.op(name, [x])])


DRAWS: dict[Callable[[Sketch], str], float] = {
    smooth: 6, kinked: 4, positive: 3, binary: 8, variadic: 2, where: 3, clip: 2, prelu: 1, mod: 0.5, casts: 0.7,
    mask: 0.7, rounded: 0.5,
}  # fmt: skip
"""Draw -> how often."""
