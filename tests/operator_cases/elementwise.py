"""Operators that compute element by element, of one operand and of several."""

from __future__ import annotations

import numpy as np

from operator_cases.case import EXACT, RUNTIME, Draw, add, floats

UNARY = {
    **dict.fromkeys(
        (
            "Abs",
            "Atan",
            "Asinh",
            "Celu",
            "Cos",
            "Cosh",
            "Elu",
            "Erf",
            "Exp",
            "Gelu",
            "HardSigmoid",
            "HardSwish",
            "Identity",
            "LeakyRelu",
            "Mish",
            "Neg",
            "Relu",
            "Selu",
            "Shrink",
            "Sigmoid",
            "Sin",
            "Sinh",
            "Softplus",
            "Softsign",
            "Swish",
            "Tanh",
            "ThresholdedRelu",
        ),
        (-3.0, 3.0),
    ),
    **dict.fromkeys(("Acos", "Asin", "Atanh"), (-0.9, 0.9)),
    "Acosh": (1.1, 4.0),
    "Log": (0.2, 4.0),
    "Sqrt": (0.2, 4.0),
    "Reciprocal": (0.3, 3.0),
    "Tan": (-1.2, 1.2),
}
"""Operator -> the numbers that it takes."""

for name, bounds in UNARY.items():
    how = RUNTIME if name in ("Celu", "Erf", "Gelu") else EXACT
    add(name, f"y = {name}(x)", "x", how=how, x=Draw((3, 4), *bounds))
    if name != "Softsign":  # onnx's evaluator fails for scalars
        add(name, f"y = {name}(x)", "x", "scalar", how=how, x=Draw((), *bounds))
for name, attributes in {
    "Celu": "alpha=0.7",
    "Elu": "alpha=0.7",
    "Gelu": 'approximate="tanh"',
    "HardSigmoid": "alpha=0.3, beta=0.4",
    "LeakyRelu": "alpha=0.3",
    "Selu": "alpha=1.5, gamma=1.2",
    "Shrink": "lambd=0.8, bias=0.3",
    "Swish": "alpha=1.7",
    "ThresholdedRelu": "alpha=0.6",
}.items():
    add(
        name, f"y = {name}<{attributes}>(x)", "x", attributes.replace('"', ""), x=Draw((3, 4), -3, 3),
        how=RUNTIME if name in ("Celu", "Gelu") else EXACT,
    )  # fmt: skip

FLAT = ("Ceil", "Floor", "Round", "Sign")
"""Steps: derivative zero."""
for name in FLAT:
    add(name, f"f = {name}(x) y = Add(f, x)", "x", "zero", x=Draw((3, 4), -3, 3))


BROADCAST = {
    "same": ((3, 4), (3, 4)),
    "row": ((3, 4), (4,)),
    "column": ((3, 1), (3, 4)),
    "scalar": ((), (3, 4)),
    "both": ((3, 1), (1, 4)),
    "rank": ((2, 1, 4), (3, 1)),
    "ones": ((1,), (1, 1)),
}
for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Pow", "Mod", "PRelu", "SwiGLU"):
    for kind, (one, two) in BROADCAST.items():
        low = {"Div": 0.5, "Pow": 0.4, "Mod": 0.7}.get(name, -2.0)
        first = Draw(one, 0.4 if name == "Pow" else -3.1, 3.0)
        if name == "PRelu" and (kind not in ("same", "row") or len(one) < len(two)):
            continue
        if name == "SwiGLU" and kind != "same":
            continue
        call = "Mod<fmod=1>" if name == "Mod" else name
        add(
            name, f"y = {call}(a, b)", "a b", kind, a=first, b=Draw(two, low, 2.5),
            how=RUNTIME if name == "Mean" else EXACT,
        )  # fmt: skip
for name in ("Max", "Min", "Sum", "Mean"):
    add(name, f"y = {name}(a)", "a", "one", a=(3, 4))
    add(
        name, f"y = {name}(a, b, c)", "a b c", "three", a=(3, 4), b=(4,), c=(2, 1, 1),
        how=RUNTIME if name == "Mean" else EXACT,
    )  # fmt: skip
add("Mul", "y = Mul(a, a)", "a", "square", a=(3, 4))
add("Div", "y = Div(a, a)", "a", "itself", a=Draw((3, 4), 0.5, 2))
add("Pow", "two = Constant<value = double {2}>() y = Pow(a, two)", "a", "square of negatives", a=(3, 4))
add("Pow", "three = Constant<value = int64 {3}>() y = Pow(a, three)", "a", "whole exponent", a=(3, 4))
add("Pow", "two = Constant<value = double {2}>() y = Pow(a, two)", "a", "square of zero", a=np.zeros(3))
add("PRelu", "y = PRelu(x, s)", "x s", "by channel", x=(2, 3, 2), s=(3, 1))
add("SwiGLU", "y = SwiGLU<alpha=1.3>(a, b)", "a b", "alpha", a=(3, 4), b=(3, 4))
for kind, (one, two) in BROADCAST.items():
    add(
        "Where", "zero = Constant<value = double {0}>() c = Greater(m, zero) y = Where(c, a, b)", "a b", kind, a=one,
        b=two, m=Draw((3, 4), -1, 1),
    )  # fmt: skip
add(
    "Where", "zero = Constant<value = double {0}>() c = Greater(m, zero) y = Where(c, a, b)", "a b",
    "condition is wide", a=(), b=(1,), m=Draw((3, 4), -1, 1),
)  # fmt: skip
add(
    "Where", "zero = Constant<value = double {0}>() c = Greater(a, zero) y = Where(c, a, b)", "a b",
    "its own condition", a=(3, 4), b=(3, 4),
)  # fmt: skip
for kind, text, by in (
    ("both bounds", "Clip(x, low, high)", "x low high"),
    ("low", "Clip(x, low)", "x low"),
    ("high", "Clip(x, , high)", "x high"),
    ("none", "Clip(x)", "x"),
):
    add(
        "Clip", f"y = {text}", by, kind, x=Draw((3, 4), -3, 3),
        **{name: floats(value).reshape(()) for name, value in (("low", -1.0), ("high", 1.5)) if name in by},
    )  # fmt: skip
