"""Operators that move elements."""

from __future__ import annotations

import numpy as np

from operator_cases.case import EXACT, RUNTIME, add, floats

add("Reshape", "s = Constant<value_ints=[2, -1]>() y = Reshape(x, s)", "x", x=(3, 4))
add("Reshape", "s = Constant<value_ints=[0, 2, -1]>() y = Reshape(x, s)", "x", "zero copies", x=(3, 4))
add("Reshape", "s = Shape(b) y = Reshape(x, s)", "x", "computed", x=(3, 4), b=(2, 6))
add("Flatten", "y = Flatten<axis=2>(x)", "x", x=(2, 3, 4))
add("Flatten", "y = Flatten<axis=-1>(x)", "x", "negative axis", x=(2, 3, 4))
add("Flatten", "y = Flatten<axis=0>(x)", "x", "axis 0", x=(2, 3, 4))
add("Transpose", "y = Transpose(x)", "x", x=(2, 3, 4))
add("Transpose", "y = Transpose<perm=[1, 2, 0]>(x)", "x", "perm", x=(2, 3, 4))
for name, shape, axes in (("Unsqueeze", (3, 4), "[0, 2]"), ("Squeeze", (1, 3, 1, 4), "[0, 2]")):
    add(name, f"a = Constant<value_ints={axes}>() y = {name}(x, a)", "x", x=shape)
    add(name, f"a = Constant<value_ints=[-2]>() y = {name}(x, a)", "x", "negative axis", x=shape)
add("Squeeze", "y = Squeeze(x)", "x", "all ones", x=(1, 3, 1, 4))
add("Expand", "s = Constant<value_ints=[2, 3, 4]>() y = Expand(x, s)", "x", x=(3, 1))
add("Expand", "s = Constant<value_ints=[1, 4]>() y = Expand(x, s)", "x", "wider than the shape", x=(3, 1))
add("Concat", "y = Concat<axis=1>(a, b, c)", "a b c", a=(3, 2), b=(3, 1), c=(3, 4))
add("Concat", "y = Concat<axis=-2>(a, b)", "a b", "negative axis", a=(3, 2), b=(1, 2))
add("Concat", "y = Concat<axis=0>(a, a)", "a", "twice", a=(3, 2))
add("Split", "s = Constant<value_ints=[1, 3]>() p, q = Split<axis=1>(x, s) y = Mul(p, q)", "x", "sizes", x=(3, 4))
add("Split", "p, q = Split<axis=-1, num_outputs=2>(x) y = Mul(p, q)", "x", "num_outputs", x=(3, 4))
add("Split", "p, q = Split<axis=-1, num_outputs=2>(x) y = Mul(p, p)", "x", "one part unread", x=(3, 4))
add("Split", "p, q = Split<axis=1, num_outputs=2>(x) t = ReduceSum(q) y = Mul(p, t)", "x", "uneven", x=(3, 5))
for kind, numbers in (
    ("plain", "1 3 0 1"),
    ("negative", "-3 -1 -1 1"),
    ("clamped", "-99 99 1 1"),
    ("steps", "0 9 1 2"),
    ("backwards", "-1 -99 1 -1"),
    ("backwards by 3", "4 0 1 -3"),
    ("empty", "2 2 1 1"),
):
    start, end, axis, step = (int(each) for each in numbers.split())
    add("Slice", "y = Slice(x, s, e, a, t)", "x", kind, x=(3, 5), s=[start], e=[end], a=[axis], t=[step])
add("Slice", "y = Slice(x, s, e)", "x", "leading axes", x=(3, 5), s=[1, 2], e=[3, 4])
for kind, pads, more in (
    ("constant", [1, 0, 0, 2], ""),
    ("crops", [-1, 0, 0, 2], ""),
    ("value", [1, 0, 0, 2], "v"),
):
    add(
        "Pad", f"y = Pad(x, p, {more})" if more else "y = Pad(x, p)", "x", kind, x=(3, 4), p=pads,
        how=RUNTIME if kind == "crops" else EXACT, **{"v": floats(3.0).reshape(())} if more else {},
    )  # fmt: skip
add(
    "Pad", "y = Pad(x, p, v)", "x v", "value is trained", refused="Pad", x=(3, 4), p=[1, 0, 0, 2],
    v=floats(3.0).reshape(()),
)  # fmt: skip
add("Pad", "y = Pad(x, p, , a)", "x", "axes", x=(3, 4), p=[2, 1], a=[-1])
for mode in ("edge", "reflect", "wrap"):
    add("Pad", f'y = Pad<mode="{mode}">(x, p)', "x", mode, x=(3, 4), p=[1, 2, 0, 3])
    add("Pad", f'y = Pad<mode="{mode}">(x, p)', "x", f"{mode}, crops", refused="Pad", x=(4, 4), p=[1, -1, 0, 2])
add("Tile", "y = Tile(x, r)", "x", x=(3, 4), r=[2, 3])
add("Tile", "y = Tile(x, r)", "x", "once", x=(3, 4), r=[1, 1])
for text in ("", "<upper=0>"):
    add("Trilu", f"y = Trilu{text}(x)", "x", text.strip("<>") or "plain", x=(2, 3, 4))
    add("Trilu", f"y = Trilu{text}(x, k)", "x", f"k {text.strip('<>')}", x=(3, 4), k=np.array(1))
add("CenterCropPad", "y = CenterCropPad(x, s)", "x", "crops", x=(5, 4), s=[3, 2])
add("CenterCropPad", "y = CenterCropPad(x, s)", "x", "crops and pads", x=(5, 4), s=[3, 7])
add("CenterCropPad", "y = CenterCropPad<axes=[1]>(x, s)", "x", "axes", x=(5, 4), s=[7])
for name, shape in (("DepthToSpace", (2, 8, 3, 2)), ("SpaceToDepth", (2, 2, 4, 6))):
    add(name, f"y = {name}<blocksize=2>(x)", "x", x=shape)
add("DepthToSpace", 'y = DepthToSpace<blocksize=2, mode="CRD">(x)', "x", "CRD", x=(2, 8, 3, 2))
add("SpaceToDepth", 'y = SpaceToDepth<blocksize=2, mode="CRD">(x)', "x", "CRD", since=28, x=(2, 2, 4, 6))
add("ReverseSequence", "y = ReverseSequence<batch_axis=0, time_axis=1>(x, n)", "x", x=(3, 4, 2), n=[1, 4, 3])
add("ReverseSequence", "y = ReverseSequence(x, n)", "x", "time first", x=(4, 3, 2), n=[1, 4, 3])
