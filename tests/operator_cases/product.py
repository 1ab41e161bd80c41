"""Products, reductions, sums along an axis."""

from __future__ import annotations

import numpy as np

from operator_cases.case import Draw, add

for kind, one, two in (
    ("matrices", (3, 4), (4, 5)),
    ("batches", (2, 3, 4), (2, 4, 5)),
    ("shared right", (2, 3, 4), (4, 5)),
    ("shared left", (3, 4), (2, 4, 5)),
    ("broadcast", (2, 1, 3, 4), (3, 4, 5)),
    ("vectors", (4,), (4,)),
    ("vector left", (4,), (4, 5)),
    ("vector right", (3, 4), (4,)),
    ("vector and batch", (4,), (2, 4, 5)),
    ("batch and vector", (2, 3, 4), (4,)),
    ("ones", (1, 1), (1, 1)),
):
    add("MatMul", "y = MatMul(a, b)", "a b", kind, a=one, b=two)
add("MatMul", "t = Transpose(a) y = MatMul(a, t)", "a", "with itself", a=(3, 4))
for kind, attributes, one, two, third in (
    ("plain", "", (3, 4), (4, 5), (3, 5)),
    ("row", "", (3, 4), (4, 5), (5,)),
    ("column", "", (3, 4), (4, 5), (3, 1)),
    ("scalar", "", (3, 4), (4, 5), ()),
    ("transA", "<transA=1>", (4, 3), (4, 5), (5,)),
    ("transB", "<transB=1>", (3, 4), (5, 4), (5,)),
    ("all", "<transA=1, transB=1, alpha=0.3, beta=1.7>", (4, 3), (5, 4), (1, 5)),
    ("beta 0", "<beta=0.0>", (3, 4), (4, 5), (5,)),
):
    add("Gemm", f"y = Gemm{attributes}(a, b, c)", "a b c", kind, a=one, b=two, c=third)
add("Gemm", "y = Gemm(a, b)", "a b", "without c", a=(3, 4), b=(4, 5))
for kind, equation, shapes in (
    ("product", "ij,jk->ik", ((3, 4), (4, 5))),
    ("implicit", "ij,jk", ((3, 4), (4, 5))),
    ("batch", "bij,bjk->bik", ((2, 3, 4), (2, 4, 5))),
    ("transpose", "ij->ji", ((3, 4),)),
    ("sum", "ij->i", ((3, 4),)),
    ("total", "ij->", ((3, 4),)),
    ("outer", "i,j->ij", ((3,), (4,))),
    ("ellipsis", "...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5))),
    ("three", "ij,jk,kl->il", ((3, 4), (4, 5), (5, 2))),
    ("lonely", "ij,k->k", ((3, 4), (5,))),
    ("broadcast ellipsis", "...ij,...jk->...ik", ((3, 4), (2, 4, 5))),
):
    names = "abc"[: len(shapes)]
    add(
        "Einsum", f'y = Einsum<equation="{equation}">({", ".join(names)})', " ".join(names), kind,
        refused="Einsum" if kind == "broadcast ellipsis" else "", **dict(zip(names, shapes)),
    )  # fmt: skip
add("Einsum", 'y = Einsum<equation="ii->i">(a)', "a", "diagonal", refused="Einsum", a=(3, 3))


REDUCTIONS = (
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
)
for name in REDUCTIONS:
    data = Draw((2, 3, 4), 0.4, 3.0) if name == "ReduceLogSum" else Draw((2, 3, 4), -2.1, 2.0)
    for kind, attributes, axes in (
        ("one axis", "", [1]),
        ("axes", "<keepdims=0>", [0, -1]),
        ("all", "", None),
        ("all, no dims", "<keepdims=0>", None),
        ("empty list", "", []),
        ("empty list, no dims", "<keepdims=0>", []),
    ):
        add(
            name, f"y = {name}{attributes}(x{'' if axes is None else ', a'})", "x", kind, x=data,
            **{} if axes is None else {"a": axes},
        )  # fmt: skip
    own = name in ("ReduceL1", "ReduceL2", "ReduceSumSquare")
    for kind, axes in (("no-op", None), ("no-op, empty list", [])):
        add(
            name, f"y = {name}<noop_with_empty_axes=1>(x{'' if axes is None else ', a'})", "x", kind, x=data,
            refused=name if own else "", **{} if axes is None else {"a": axes},
        )  # fmt: skip
add(
    "ReduceProd", "a = Constant<value_ints=[1]>() y = ReduceProd(x, a)", "x", "zeros",
    x=np.array([[0.0, 2, 3], [0, 0, 1], [1, 2, 3]]),
)  # fmt: skip
add("ReduceL2", "a = Constant<value_ints=[1]>() y = ReduceL2(x, a)", "x", "one element", x=(3, 1))
for name in ("CumSum", "CumProd"):
    for attributes in ("", "<exclusive=1>", "<reverse=1>", "<exclusive=1, reverse=1>"):
        add(
            name, f"a = Constant<value = int64 {{1}}>() y = {name}{attributes}(x, a)", "x", attributes.strip("<>"),
            x=(2, 4),
        )  # fmt: skip
    add(name, f"a = Constant<value = int64 {{-2}}>() y = {name}(x, a)", "x", "negative axis", x=(2, 4))
add("CumProd", "a = Constant<value = int64 {0}>() y = CumProd(x, a)", "x", "zeros", x=np.array([2.0, 0, 3, 0, 1]))
