"""Operators with indices; sequences and optionals."""

from __future__ import annotations

import numpy as np

from operator_cases.case import RUNTIME, add

for kind, axis, index in (
    ("rows", 0, [2, 0, 2]),
    ("columns", 1, [[1, -1], [0, 0]]),
    ("scalar", 0, 1),
    ("negative axis", -1, [-2]),
):
    add("Gather", f"y = Gather<axis={axis}>(x, i)", "x", kind, x=(3, 4), i=np.array(index))
    if np.ndim(index) == 2:
        add(
            "GatherElements", f"y = GatherElements<axis={axis}>(x, i)", "x", kind, how=RUNTIME, x=(3, 4),
            i=np.array(index),
        )  # fmt: skip
add("GatherElements", "y = GatherElements(x, i)", "x", "rows", x=(3, 4), i=[[2, 0, -1, 1], [2, 1, 0, 0]])
add("GatherND", "y = GatherND(x, i)", "x", "elements", x=(3, 4), i=[[2, 1], [0, -1], [2, 1]])
add("GatherND", "y = GatherND(x, i)", "x", "rows", x=(3, 4), i=[[2], [0], [-1]])
add("GatherND", "y = GatherND<batch_dims=1>(x, i)", "x", "batch_dims", refused="GatherND", x=(2, 3, 4), i=[[1], [-1]])
for name, index, update in (
    ("ScatterElements", [[2, 0, 1, 1], [1, 1, 0, 2]], (2, 4)),
    ("ScatterND", [[2], [0]], (2, 4)),
    ("ScatterND", [[2, 1], [0, -1]], (2,)),
):
    kind = "elements" if update == (2,) else "rows"
    add(name, f"y = {name}(x, i, u)", "x u", kind, x=(3, 4), i=index, u=update)
    add(name, f'y = {name}<reduction="add">(x, i, u)', "x u", f"{kind}, add", x=(3, 4), i=index, u=update)
    for how in ("mul", "max", "min"):
        add(
            name, f'y = {name}<reduction="{how}">(x, i, u)', "x u", f"{kind}, {how}", refused=f"{name} 'y' cannot",
            x=(3, 4), i=index, u=update,
        )  # fmt: skip
add(
    "ScatterElements", "y = ScatterElements<axis=1>(x, i, u)", "x u", "negative indices", how=RUNTIME, x=(3, 4),
    i=[[-1, 0]], u=(1, 2),
)  # fmt: skip
add(
    "ScatterElements", 'y = ScatterElements<axis=1, reduction="add">(x, i, u)', "x u", "repeated", how=RUNTIME,
    x=(3, 4), i=[[-1, 3], [0, 0]], u=(2, 2),
)  # fmt: skip
add("Compress", "c = Constant<value = bool[3] {1, 0, 1}>() y = Compress<axis=0>(x, c)", "x", "axis", x=(3, 4))
add("Compress", "c = Constant<value = bool[5] {1, 0, 1, 1, 0}>() y = Compress(x, c)", "x", "flat", x=(3, 4))
add("TopK", "k = Constant<value_ints=[2]>() y, i = TopK(x, k)", "x", "largest", x=(3, 4))
add("TopK", "k = Constant<value_ints=[2]>() y, i = TopK<axis=0, largest=0, sorted=0>(x, k)", "x", "smallest", x=(3, 4))
add("Unique", "y, i, v, c = Unique(x)", "x", "sorted", x=(3, 2))
add("Unique", "y, i, v, c = Unique<sorted=0>(x)", "x", "unsorted", how=RUNTIME, x=(4,))
add("Unique", "y, i, v, c = Unique<axis=0>(x)", "x", "axis", x=(3, 2))
for mode in ("linear", "circular"):
    add(
        "TensorScatter", f'y = TensorScatter<mode="{mode}">(x, u, i)', "x u", mode, x=(2, 2, 4, 3), u=(2, 2, 2, 3),
        i=[1, 2] if mode == "linear" else [3, 2],
    )  # fmt: skip
add(
    "Range", "d = Constant<value = double {0.5}>() e = Constant<value = double {3}>() y = Range(x, e, d)", "x", "start",
    x=np.array(0.3),
)  # fmt: skip
add(
    "Range", "e = Constant<value = double {3.1}>() b = Constant<value = double {0.5}>() y = Range(b, e, x)", "x",
    "step", x=np.array(0.3),
)  # fmt: skip


for variant, sizes, shape in (("chunks", 2, (3, 5)), ("sizes", [1, 4], (3, 5)), ("negative place", 3, (3, 6))):
    for operator in ("SplitToSequence", "SequenceAt"):
        last = -1 if variant == "negative place" else 1
        text = (
            f"i = Constant<value = int64 {{0}}>() j = Constant<value = int64 {{{last}}}>() "
            "s = SplitToSequence<axis=-1>(x, n) p = SequenceAt(s, i) q = SequenceAt(s, j) "
            "t = ReduceSum<keepdims=0>(q) y = Mul(p, t)"
        )
        add(operator, text, "x", f"fixed places, {variant}", x=shape, n=np.array(sizes))

SEQUENCES = {
    "SequenceConstruct": "s = SequenceConstruct(x, x) y = ConcatFromSequence<axis=0>(s)",
    "ConcatFromSequence": "s = SequenceConstruct(x, x) y = ConcatFromSequence<axis=0, new_axis=1>(s)",
    "SequenceAt": "i = Constant<value = int64 {0}>() s = SequenceConstruct(x, x) y = SequenceAt(s, i)",
    "SequenceInsert": "i = Constant<value = int64 {0}>() e = SequenceEmpty<dtype=11>() s = SequenceInsert(e, x) "
    "y = SequenceAt(s, i)",
    "SequenceErase": "i = Constant<value = int64 {0}>() s = SequenceConstruct(x, x) e = SequenceErase(s, i) y = "
    "SequenceAt(e, i)",
    "SplitToSequence": "i = Constant<value = int64 {0}>() s = SplitToSequence(x) y = SequenceAt(s, i)",
    "SequenceMap": "i = Constant<value = int64 {0}>() s = SequenceConstruct(x, x) "
    "m = SequenceMap <body = b (double[3] p) => (double[3] q) { q = Exp(p) }> (s) y = SequenceAt(m, i)",
    "Optional": "o = Optional(x) y = OptionalGetElement(o)",
    "OptionalGetElement": "y = OptionalGetElement(x)",
}
for name, text in SEQUENCES.items():
    add(name, text, "x", refused="Sequence|Optional", x=(3,))
add(
    "SequenceLength", "s = SequenceConstruct(x, x) n = SequenceLength(s) f = Cast<to=11>(n) y = Mul(f, x)", "x", "zero",
    x=(3,),
)  # fmt: skip
add("OptionalHasElement", "n = OptionalHasElement(x) f = Cast<to=11>(n) y = Mul(f, x)", "x", "zero", x=(3,))
