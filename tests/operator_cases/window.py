"""Convolutions, pools and images."""

from __future__ import annotations

import numpy as np

from operator_cases.case import RUNTIME, SINGLE, Draw, add, floats

add("Conv", "y = Conv<pads=[1, 0, 0, 1], strides=[2, 1]>(x, w, b)", "x w b", x=(2, 3, 5, 6), w=(4, 3, 3, 2), b=(4,))
add("Conv", "y = Conv<group=2>(x, w)", "x w", "groups", how=RUNTIME, x=(2, 4, 5), w=(6, 2, 3))
add("Conv", 'y = Conv<auto_pad="SAME_UPPER", strides=[2]>(x, w)', "x w", "auto_pad", x=(2, 2, 5), w=(3, 2, 2))
add(
    "ConvTranspose", "y = ConvTranspose<strides=[2, 1], output_padding=[1, 0]>(x, w, b)", "x w b", x=(2, 3, 3, 3),
    w=(3, 2, 3, 2), b=(2,),
)  # fmt: skip
add("ConvTranspose", "y = ConvTranspose<group=2>(x, w)", "x w", "groups", x=(2, 4, 3), w=(4, 2, 3), how=RUNTIME)
add(
    "DeformConv", "y = DeformConv<pads=[1, 1, 1, 1]>(x, w, o, b, m)", "x w o b m", how=RUNTIME, x=(1, 2, 4, 4),
    w=(3, 2, 2, 2), o=Draw((1, 8, 5, 5), 0.1, 0.9), b=(3,), m=Draw((1, 4, 5, 5), 0.2, 1),
)  # fmt: skip
add(
    "DeformConv", "y = DeformConv<group=2, strides=[2, 1]>(x, w, o)", "x w o", "groups", how=RUNTIME, x=(2, 2, 4, 4),
    w=(2, 1, 2, 2), o=Draw((2, 8, 2, 3), 0.1, 0.9),
)  # fmt: skip
add("CausalConvWithState", "y, n = CausalConvWithState(x, w, b)", "x w b", x=(2, 3, 5), w=(3, 1, 2), b=(3,))
add(
    "CausalConvWithState", 'y, n = CausalConvWithState<activation="silu">(x, w, b, p)', "x w b p", "state", how=SINGLE,
    x=(2, 3, 5), w=(3, 1, 3), b=(3,), p=(2, 3, 2),
)  # fmt: skip
POOLS = (
    ("plain", "kernel_shape=[2, 2]"),
    ("strides", "kernel_shape=[3, 2], strides=[2, 1]"),
    ("overlap", "kernel_shape=[3, 3]"),
    ("pads", "kernel_shape=[3, 3], pads=[1, 1, 0, 1], strides=[2, 2]"),
    ("dilations", "kernel_shape=[2, 2], dilations=[2, 1]"),
    ("same", 'kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 2]'),
    ("same lower", 'kernel_shape=[2, 3], auto_pad="SAME_LOWER", strides=[2, 1]'),
    ("valid", 'kernel_shape=[2, 3], auto_pad="VALID", strides=[2, 1]'),
    ("ceil", "kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1"),
)
for name in ("MaxPool", "AveragePool", "LpPool"):
    for kind, attributes in POOLS:
        if name == "LpPool" and kind == "ceil":
            continue
        add(name, f"y = {name}<{attributes}>(x)", "x", kind, x=(2, 2, 5, 6), how=RUNTIME)
    add(name, f"y = {name}<kernel_shape=[2]>(x)", "x", "line", x=(2, 2, 5), how=RUNTIME)
    add(name, f"y = {name}<kernel_shape=[2, 2, 2]>(x)", "x", "volume", x=(1, 2, 3, 4, 3), how=RUNTIME)
add(
    "AveragePool", "y = AveragePool<kernel_shape=[3, 3], pads=[1, 1, 0, 1], count_include_pad=1>(x)", "x",
    "counts pads", x=(2, 2, 5, 6), how=RUNTIME,
)  # fmt: skip
add(
    "AveragePool", "y = AveragePool<kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1, count_include_pad=1>(x)", "x",
    "ceil, counts pads", x=(2, 2, 5, 6), refused="AveragePool",
)  # fmt: skip
add("LpPool", "y = LpPool<kernel_shape=[2, 2], p=3>(x)", "x", "p 3", x=(2, 2, 5, 6), how=RUNTIME)
add(
    "MaxPool", "y, i = MaxPool<kernel_shape=[2, 2], storage_order=1>(x)", "x", "column major", how=RUNTIME,
    x=(2, 2, 4, 4),
)  # fmt: skip
add("MaxPool", "y, i = MaxPool<kernel_shape=[2, 2]>(x)", "x", "indices", x=(2, 2, 4, 4), how=RUNTIME)
for name in ("GlobalAveragePool", "GlobalMaxPool"):
    for shape in ((2, 3, 4), (2, 3, 4, 2)):
        add(name, f"y = {name}(x)", "x", f"rank {len(shape)}", how=RUNTIME, x=shape)
for power in (1, 2, 3):
    add("GlobalLpPool", f"y = GlobalLpPool<p={power}>(x)", "x", f"p {power}", until=20, how=RUNTIME, x=(2, 3, 4, 2))
add(
    "MaxUnpool", "y = MaxUnpool<kernel_shape=[2, 2], strides=[2, 2]>(x, i)", "x", x=(1, 1, 2, 2),
    i=[[[[5, 7], [8, 10]]]],
)  # fmt: skip
add(
    "MaxUnpool", "y = MaxUnpool<kernel_shape=[2, 2], strides=[2, 2]>(x, i, s)", "x", "output_shape", x=(1, 1, 2, 2),
    i=[[[[5, 7], [8, 10]]]], s=[1, 1, 5, 5], refused="MaxUnpool",
)  # fmt: skip
add(
    "MaxRoiPool", "y = MaxRoiPool<pooled_shape=[2, 2]>(x, r)", "x", refused="MaxRoiPool", x=(1, 2, 4, 4),
    r=floats(0, 0, 0, 3, 3).reshape(1, 5),
)  # fmt: skip
for mode in ("avg", "max"):
    add(
        "RoiAlign", f'y = RoiAlign<mode="{mode}", output_height=2, output_width=2, sampling_ratio=2>(x, r, i)', "x",
        mode, refused="RoiAlign" if mode == "max" else "", x=(2, 2, 5, 5),
        r=floats(0.3, 0.4, 3.2, 3.7, 1.1, 0.2, 4.1, 3.3).reshape(2, 4), i=[0, 1],
    )  # fmt: skip
    add(
        "RoiAlign", f'y = RoiAlign<mode="{mode}", output_height=2, output_width=2, sampling_ratio=2>(x, r, i)', "r",
        f"{mode}, boxes", x=(2, 2, 5, 5), r=floats(0.3, 0.4, 3.2, 3.7, 1.1, 0.2, 4.1, 3.3).reshape(2, 4), i=[0, 1],
        refused="RoiAlign",
    )  # fmt: skip
add("Col2Im", "y = Col2Im(x, i, k)", "x", x=(1, 4, 12), i=[4, 5], k=[2, 2])
add(
    "Col2Im", "y = Col2Im<strides=[2, 1], pads=[1, 0, 0, 1]>(x, i, k)", "x", "strides, pads", x=(1, 4, 10), i=[4, 5],
    k=[2, 2],
)  # fmt: skip


for mode in ("nearest", "linear", "cubic"):
    for kind in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"):
        given = f'mode="{mode}", coordinate_transformation_mode="{kind}"'
        add(
            "Resize", f"y = Resize<{given}>(x, , s)", "x", f"{mode}, {kind}", x=(1, 2, 3, 4),
            s=floats(1, 1, 1.7, 2).astype(np.float32),
        )  # fmt: skip
    add("Resize", f'y = Resize<mode="{mode}">(x, , , n)', "x", f"{mode}, sizes", x=(1, 2, 5, 4), n=[1, 2, 3, 3])
    add("Resize", f'y = Resize<mode="{mode}", axes=[2, 3]>(x, , , n)', "x", f"{mode}, axes", x=(1, 2, 5, 4), n=[3, 3])
add("Resize", 'y = Resize<mode="linear", antialias=1>(x, , , n)', "x", "antialias", x=(1, 1, 6, 6), n=[1, 1, 3, 4])
add(
    "Resize", 'y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(x, r, , n)', "x", "roi",
    x=(1, 1, 6, 6), r=floats(0, 0, 0.2, 0.3, 1, 1, 0.8, 0.7), n=[1, 1, 3, 4],
)  # fmt: skip
add(
    "Resize", 'y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(x, r, , n)', "r",
    "roi is trained", x=(1, 1, 6, 6), r=floats(0, 0, 0.2, 0.3, 1, 1, 0.8, 0.7), n=[1, 1, 3, 4], refused="Resize",
)  # fmt: skip
for mode in ("linear", "nearest", "cubic"):
    for padding in ("zeros", "border", "reflection"):
        for align in (0, 1):
            text = f'y = GridSample<mode="{mode}", padding_mode="{padding}", align_corners={align}>(x, g)'
            add(
                "GridSample", text, "x" if mode == "nearest" else "x g", f"{mode}, {padding}, {align}", how=RUNTIME,
                x=(1, 2, 4, 5), g=Draw((1, 3, 2, 2), -1.3, 1.3),
            )  # fmt: skip
add("AffineGrid", "y = AffineGrid(x, s)", "x", how=RUNTIME, x=(2, 2, 3), s=[2, 1, 3, 4])
add("AffineGrid", "y = AffineGrid(x, s)", "x", "batch of one", refused="AffineGrid", x=(1, 2, 3), s=[1, 1, 3, 4])
add("AffineGrid", "y = AffineGrid<align_corners=1>(x, s)", "x", "volume", how=RUNTIME, x=(1, 3, 4), s=[1, 1, 2, 3, 4])
