"""Operators without a derivative, casts and quantisation."""

from __future__ import annotations

import numpy as np

from operator_cases.case import RUNTIME, SINGLE, Draw, add

for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
    add(name, f"c = {name}(x, z) f = Cast<to=11>(c) y = Add(f, x)", "x z", "zero", x=(3, 4), z=(4,))
for name in ("And", "Or", "Xor"):
    add(
        name, f"p = Greater(x, z) q = Less(x, z) c = {name}(p, q) f = Cast<to=11>(c) y = Add(f, x)", "x z", "zero",
        x=(3, 4), z=(4,),
    )  # fmt: skip
add("Not", "p = Greater(x, z) c = Not(p) f = Cast<to=11>(c) y = Add(f, x)", "x z", "zero", x=(3, 4), z=(4,))
for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
    add(
        name, f"p = Cast<to=7>(x) q = Cast<to=7>(z) c = {name}(p, q) f = Cast<to=11>(c) y = Add(f, x)", "x z", "zero",
        x=Draw((3, 4), 1.2, 5), z=Draw((4,), 1.2, 5),
    )  # fmt: skip
add("BitwiseNot", "p = Cast<to=7>(x) c = BitwiseNot(p) f = Cast<to=11>(c) y = Add(f, x)", "x", "zero", x=(3, 4))
add(
    "BitShift", 'p = Cast<to=12>(x) c = BitShift<direction="LEFT">(p, p) f = Cast<to=11>(c) y = Add(f, x)', "x", "zero",
    x=Draw((3, 4), 1.1, 4),
)  # fmt: skip
for name in ("ArgMax", "ArgMin"):
    add(name, f"i = {name}<axis=1>(x) f = Cast<to=11>(i) y = Add(f, x)", "x", "zero", x=(4, 4))
for name in ("IsNaN", "IsInf"):
    add(name, f"c = {name}(x) f = Cast<to=11>(c) y = Add(f, x)", "x", "zero", x=(3, 4), since=20)
add("Shape", "s = Shape(x) e = Expand(b, s) y = Add(e, x)", "x b", "zero", x=(3, 4), b=(4,))
add("Size", "s = Size(x) f = Cast<to=11>(s) y = Mul(f, x)", "x", "zero", x=(3, 4))
add("NonZero", "i = NonZero(x) f = Cast<to=11>(i) t = ReduceSum<keepdims=0>(f) y = Mul(t, x)", "x", "zero", x=(3, 4))
add(
    "ConstantOfShape", "s = Shape(x) c = ConstantOfShape<value = double[1] {3}>(s) y = Mul(c, x)", "x", "zero", x=(3, 4)
)
add("EyeLike", "e = EyeLike(x) y = Mul(e, x)", "x", "zero", x=(3, 4))
add("Hardmax", "h = Hardmax<axis=1>(x) y = Add(h, x)", "x", "zero", x=(3, 4))
add(
    "OneHot",
    "d = Constant<value = int64 {5}>() v = Constant<value = double[2] {0, 1}>() i = ArgMax<keepdims=0>(x) "
    "h = OneHot(i, d, v) y = MatMul(h, w)",
    "x w",
    "fixed values",
    x=(3, 4),
    w=(5, 2),
)
add(
    "OneHot", "d = Constant<value = int64 {5}>() h = OneHot(i, d, v) y = Mul(h, w)", "v w", "values", refused="OneHot",
    i=[1, 3, 0], v=(2,), w=(5,),
)  # fmt: skip
add(
    "NonMaxSuppression",
    "n = Constant<value = int64 {2}>() s = NonMaxSuppression(b, p, n) f = Cast<to=11>(s) "
    "t = ReduceSum<keepdims=0>(f) y = Mul(t, p)",
    "p",
    "zero",
    how=RUNTIME,
    b=Draw((1, 4, 4), 0, 1),
    p=Draw((1, 1, 4), 0, 1),
)
for name in ("RandomNormalLike", "RandomUniformLike"):
    add(name, f"r = {name}<seed=3.0>(x) f = Floor(r) z = Sub(f, f) y = Add(z, x)", "x", "zero", x=(3, 4))
for name in ("RandomNormal", "RandomUniform"):
    add(name, f"r = {name}<shape=[4], seed=3.0, dtype=11>() z = Sub(r, r) y = Add(z, x)", "x", "no operand", x=(3, 4))
for name in ("BlackmanWindow", "HammingWindow", "HannWindow"):
    add(
        name, f"n = Constant<value = int64 {{4}}>() r = {name}<output_datatype=11>(n) y = Mul(r, x)", "x", "no operand",
        x=(3, 4),
    )  # fmt: skip
add(
    "MelWeightMatrix",
    "n = Constant<value = int64 {4}>() r = MelWeightMatrix<output_datatype=11>(n, d, s, l, h) y = Mul(r, x)", "x",
    "no operand", x=(4,), d=np.array(16), s=np.array(8192), l=np.array(0.0), h=np.array(4096.0),
)  # fmt: skip
add(
    "MelWeightMatrix", "n = Constant<value = int64 {4}>() y = MelWeightMatrix<output_datatype=11>(n, d, s, l, h)", "h",
    "edges", refused="MelWeightMatrix", d=np.array(16), s=np.array(8192), l=np.array(0.0), h=np.array(4096.0),
)  # fmt: skip
add("Constant", "c = Constant<value = double[4] {1, 2, 3, 4}>() y = Mul(c, x)", "x", "no operand", x=(3, 4))
add("Bernoulli", "y = Bernoulli<seed=1.0>(x)", "x", refused="Bernoulli", x=Draw((3, 4), 0.1, 0.9))
add(
    "Multinomial", "i = Multinomial<seed=1.0, dtype=7>(x) f = Cast<to=11>(i) y = Mul(f, x)", "x", refused="Multinomial",
    x=Draw((3, 1), 0.1, 0.9),
)  # fmt: skip
add("Det", "y = Det(x)", "x", refused="Det", x=(2, 3, 3))


add("Cast", "h = Cast<to=1>(x) y = Cast<to=11>(h)", "x", "float32 and back", how=SINGLE, x=(3, 4))
add("Cast", "h = Cast<to=10>(x) w = Cast<to=11>(h) z = Sub(w, w) y = Add(z, x)", "x", "float16 and back", x=(3, 4))
add("Cast", "h = Cast<to=7>(x) f = Cast<to=11>(h) y = Add(f, x)", "x", "whole numbers", x=(3, 4))
add("Cast", "h = Cast<to=17>(x) y = Cast<to=11>(h)", "x", "float8", refused="Cast", x=(3, 4))
add("CastLike", "h = CastLike(x, s) y = Cast<to=11>(h)", "x", how=SINGLE, s=np.ones(2, np.float32), x=(3, 4))
add(
    "CastLike", "e = Constant<value = float[1] {1}>() n = Cast<to=17>(e) h = CastLike(x, n) y = Cast<to=11>(h)", "x",
    "float8", refused="CastLike", x=(3, 4),
)  # fmt: skip
add("CastLike", "y = CastLike(c, x)", "x", "zero", c=np.ones((3, 4), np.float32), x=(3, 4))
add("BitCast", "i = BitCast<to=7>(x) y = BitCast<to=11>(i)", "x", refused="BitCast", x=(3, 4))
add(
    "QuantizeLinear", "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)", "x", "data",
    refused="QuantizeLinear", x=np.float32([1, 2, 3]), s=np.float32(0.5), z=np.uint8(3),
)  # fmt: skip
add(
    "DynamicQuantizeLinear", "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)", "x", "data",
    refused="DynamicQuantizeLinear", x=np.float32([1, 2, 3]),
)  # fmt: skip
add(
    "DequantizeLinear", "y = DequantizeLinear(q, s, z)", "s", "scale", q=np.array([[1, 7, 3], [9, 4, 6]], np.uint8),
    s=np.float32(0.5), z=np.uint8(3),
)  # fmt: skip
add(
    "DequantizeLinear", "y = DequantizeLinear<axis=0>(q, s, z)", "s", "scale by axis",
    q=np.array([[1, 7, 3], [9, 4, 6]], np.uint8), s=np.float32([0.5, 0.7]), z=np.uint8([3, 1]),
)  # fmt: skip
add(
    "DequantizeLinear", "y = DequantizeLinear<axis=1, block_size=2>(q, s, z)", "s", "scale by block", since=21,
    refused="block_size", q=np.array([[1, 7, 3, 5], [9, 4, 6, 2]], np.uint8), s=np.float32([[0.5, 0.7], [0.2, 0.3]]),
    z=np.uint8([[3, 1], [2, 4]]),
)  # fmt: skip
add(
    "QLinearMatMul", "q = QLinearMatMul(a, s, z, a, s, z, s, z) f = Cast<to=1>(q) y = Mul(f, s)", "s", "scale",
    refused="QLinearMatMul", a=np.array([[1, 7], [9, 4]], np.uint8), s=np.float32(0.5), z=np.uint8(3),
)  # fmt: skip
add(
    "QLinearConv", "q = QLinearConv(a, s, z, w, s, z, s, z) f = Cast<to=1>(q) y = Mul(f, s)", "s", "scale",
    refused="QLinearConv", a=np.ones((1, 1, 3, 3), np.uint8), w=np.ones((1, 1, 2, 2), np.uint8), s=np.float32(0.5),
    z=np.uint8(0),
)  # fmt: skip
add(
    "MatMulInteger", "q = MatMulInteger(a, a) f = Cast<to=11>(q) y = Mul(f, x)", "x", "no float operand",
    a=np.array([[1, 7], [9, 4]], np.uint8), x=(2, 2),
)  # fmt: skip
add(
    "ConvInteger", "q = ConvInteger(a, w) f = Cast<to=11>(q) y = Mul(f, x)", "x", "no float operand",
    a=np.ones((1, 1, 3, 3), np.uint8), w=np.ones((1, 1, 2, 2), np.uint8), x=(2, 2),
)  # fmt: skip
