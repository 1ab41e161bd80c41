"""Recurrence and control flow."""

from __future__ import annotations

import numpy as np

from operator_cases.case import RUNTIME, Draw, add

for name, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
    for kind, attributes, directions in (
        ("plain", "hidden_size=3", 1),
        ("reverse", 'hidden_size=3, direction="reverse"', 1),
        ("both ways", 'hidden_size=3, direction="bidirectional"', 2),
    ):
        add(
            name, f"y = {name}<{attributes}>(x, w, r, b)", "x w r b", kind, x=(4, 2, 2), w=(directions, gates * 3, 2),
            r=(directions, gates * 3, 3), b=(directions, 2 * gates * 3),
        )  # fmt: skip
    state = ", c" if name == "LSTM" else ""
    add(
        name, f"z, y = {name}<hidden_size=3>(x, w, r, , , h{state})", "x w r h c" if state else "x w r h", "states",
        x=(4, 2, 2), w=(1, gates * 3, 2), r=(1, gates * 3, 3), h=(1, 2, 3), **{"c": (1, 2, 3)} if state else {},
    )  # fmt: skip
    add(
        name, f"y = {name}<hidden_size=3, layout=1>(x, w, r)", "x w r", "batch first", x=(2, 4, 2), w=(1, gates * 3, 2),
        r=(1, gates * 3, 3),
    )  # fmt: skip
    add(
        name, f"y = {name}<hidden_size=3>(x, w, r, , n)", "x w r", "lengths", x=(4, 2, 2), w=(1, gates * 3, 2),
        r=(1, gates * 3, 3), n=np.array([4, 2], np.int32), refused="sequence_lens",
    )  # fmt: skip
    add(
        name, f"y = {name}<hidden_size=3, clip=0.4>(x, w, r)", "x w r", "clip", refused="clip", x=(4, 2, 2),
        w=(1, gates * 3, 2), r=(1, gates * 3, 3),
    )  # fmt: skip
add(
    "GRU", "y = GRU<hidden_size=3, linear_before_reset=1>(x, w, r)", "x w r", "linear before reset, no bias",
    x=(4, 2, 2), w=(1, 9, 2), r=(1, 9, 3),
)  # fmt: skip
add(
    "GRU", "y = GRU<hidden_size=3, linear_before_reset=1>(x, w, r, b)", "x w r b", "linear before reset", x=(4, 2, 2),
    w=(1, 9, 2), r=(1, 9, 3), b=(1, 18),
)  # fmt: skip
add(
    "LSTM", "y = LSTM<hidden_size=3>(x, w, r, b, , , , p)", "x w r b p", "peepholes", x=(4, 2, 2), w=(1, 12, 2),
    r=(1, 12, 3), b=(1, 24), p=(1, 9),
)  # fmt: skip
add(
    "LSTM", 'y = LSTM<hidden_size=3, activations=["HardSigmoid", "Relu", "Softsign"]>(x, w, r)', "x w r", "activations",
    how=RUNTIME, x=(4, 2, 2), w=(1, 12, 2), r=(1, 12, 3),
)  # fmt: skip
for side in (1, 0):
    add(
        "If",
        f"c = Constant<value = bool {{{side}}}>() y = If (c) <then_branch = t () => (double[3] p) {{ p = "
        f"Mul(x, w) }}, "
        "else_branch = e () => (double[3] q) { q = Tanh(w) }>",
        "x w",
        f"fixed {side}",
        x=(3,),
        w=(3,),
    )
add(
    "If",
    "z = Constant<value = double {0}>() t = ReduceSum<keepdims=0>(x) c = Less(t, z) "
    "y = If (c) <then_branch = t () => (double[3] p) { p = Mul(x, w) }, "
    "else_branch = e () => (double[3] q) { q = Tanh(w) }>",
    "x w",
    "computed",
    x=(3,),
    w=(3,),
)
add(
    "Loop",
    "n = Constant<value = int64 {3}>() c = Constant<value = bool {1}>() "
    "f, y = Loop (n, c, x) <body = b (int64 i, bool k, double[3] s) => (bool o, double[3] t, double[3] u) "
    "{ o = Identity(k) m = Mul(s, w) t = Tanh(m) u = Add(t, w) }>",
    "x w",
    "carried and stacked",
    x=(3,),
    w=(3,),
)
add(
    "Loop",
    "n = Constant<value = int64 {10}>() c = Constant<value = bool {1}>() z = Constant<value = double {2}>() "
    "y = Loop (n, c, x) <body = b (int64 i, bool k, double[3] s) => (bool o, double[3] t) "
    "{ t = Mul(s, w) q = ReduceL1<keepdims=0>(t) o = Greater(q, z) }>",
    "x w",
    "stops early",
    x=Draw((3,), 2, 4),
    w=Draw((3,), 0.5, 0.9),
)
add(
    "Scan",
    "f, y = Scan <num_scan_inputs = 1, body = b (double[3] s, double[3] u) => (double[3] t, double[3] v) "
    "{ m = Mul(s, w) t = Add(m, u) v = Tanh(t) }> (x, z)",
    "x z w",
    "state and slices",
    x=(3,),
    z=(4, 3),
    w=(3,),
)
