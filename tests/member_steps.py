"""Steps of one member, written by hand: SGD of a small network with a call along ``tp`` in its forward and its dual."""

from __future__ import annotations

from pathlib import Path

import onnx
from helpers import Builder

COMM = "gopt.comm"
ROWS, WIDE, INSIDE = 4, 4, 6


def comm(b: Builder, op_type: str, value: str, **attributes: object) -> str:
    b.extra_domains.append(COMM) if COMM not in b.extra_domains else None
    return str(b.op(op_type, value, domain=COMM, group="tp", **attributes))


def calls(kind: str) -> tuple[tuple[str, dict], tuple[str, dict], tuple[int, int]]:
    """A call, its dual, and the shape of what the call makes of ``[ROWS, WIDE]``."""
    half = {"axis": 0, "sizes": [ROWS // 2] * 2}
    columns, rows = [WIDE // 2] * 2, [ROWS] * 2
    return {
        "gather": (("AllGather", {"axis": 0, "sizes": [ROWS] * 2}), ("ReduceScatter", {"axis": 0, "sizes": [ROWS] * 2}),
                   (2 * ROWS, WIDE)),
        "scatter": (("ReduceScatter", half), ("AllGather", half), (ROWS // 2, WIDE)),
        "exchange": (
            ("AllToAll", {"split_axis": 1, "concat_axis": 0, "split_sizes": columns, "concat_sizes": rows}),
            ("AllToAll", {"split_axis": 0, "concat_axis": 1, "split_sizes": rows, "concat_sizes": columns}),
            (2 * ROWS, WIDE // 2)),
    }[kind]  # fmt: skip


def backward(b: Builder, kind: str, lost: str, gradient: str) -> str:
    """The gradient of a call's operand: by the dual, or what is left of it."""
    dual = calls(kind)[1]
    if not lost:
        return comm(b, dual[0], gradient, **dual[1])
    if lost == "slice":  # that of the first member, on all
        return str(b.op("Slice", gradient, _ints(b, 0), _ints(b, ROWS), _ints(b, 0)))
    if lost == "axis":  # cut along another axis: as many elements, in another order
        other = comm(b, "ReduceScatter", gradient, axis=1, sizes=[WIDE // 2] * 2)
        return str(b.op("Reshape", other, _ints(b, ROWS, WIDE)))
    if lost == "own":  # each member's part, taken for all
        return str(b.op("Concat", gradient, gradient, axis=0))
    assert lost == "reshape"
    return str(b.op("Reshape", gradient, _ints(b, ROWS, WIDE)))


def through(kind: str, lost: str = "", *, alike: bool = False) -> onnx.ModelProto:
    """``x·A`` through a call, then ``·B``; the weighted mean of squares of what follows is the loss.

    Members have parts of what stands before a gather, or behind a scatter: there they sum gradients of weights.
    ``alike``: all rows weigh the same, so that a slice of any member is the gradient of each.
    """
    b = Builder(3)
    call, _, (rows, wide) = calls(kind)
    x = b.input("x", (ROWS, 3))
    above, below = b.parameter("A", (3, WIDE)), b.parameter("B", (wide, 5))
    h = b.op("Tanh", b.op("MatMul", x, above))
    y = comm(b, call[0], h, **call[1])
    z = b.op("Tanh", b.op("MatMul", y, below))
    weights = b.const([[1.0 if alike else 1.0 + row] for row in range(rows)])
    weighted = b.op("Mul", z, weights)
    loss = b.op("ReduceMean", b.op("Mul", z, weighted), keepdims=0)
    b.output("loss", loss if kind == "gather" else comm(b, "AllReduce", loss, reduce="mean"), ())
    dz = _tanh_backward(b, b.op("Mul", weighted, b.const(2 / (rows * 5))), z)
    dy = b.op("MatMul", dz, b.op("Transpose", below, perm=[1, 0]))
    db = b.op("MatMul", b.op("Transpose", y, perm=[1, 0]), dz)
    _sgd(b, "B", (wide, 5), db if kind == "gather" else comm(b, "AllReduce", db))
    dh = _tanh_backward(b, backward(b, kind, lost, dy), h)
    da = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), dh)
    _sgd(b, "A", (3, WIDE), da if kind == "scatter" else comm(b, "AllReduce", da))
    return b.model()


def region(*, lost: bool = False, megatron: bool = False) -> onnx.ModelProto:
    """A pair of products by columns and rows, beside the stream that they read: all-reduces in forward and backward."""
    b = Builder(5)
    x = b.input("x", (ROWS, 3))
    table, columns, rows = (
        b.parameter("T", (3, WIDE)),
        b.parameter("C", (WIDE, INSIDE)),
        b.parameter("R", (INSIDE, WIDE)),
    )
    h = b.op("Tanh", b.op("MatMul", x, table))
    copy = _microsoft(b, "MegatronF", h) if megatron else h
    g = b.op("Tanh", b.op("MatMul", copy, columns))
    part = b.op("MatMul", g, rows)
    summed = _microsoft(b, "MegatronG", part, group_type=4) if megatron else comm(b, "AllReduce", part)
    z = b.op("Add", h, summed)
    b.output("loss", b.op("ReduceMean", b.op("Mul", z, z), keepdims=0), ())
    dz = b.op("Mul", z, b.const(2 / (ROWS * WIDE)))
    _sgd(b, "R", (INSIDE, WIDE), b.op("MatMul", b.op("Transpose", g, perm=[1, 0]), dz))
    dg = _tanh_backward(b, b.op("MatMul", dz, b.op("Transpose", rows, perm=[1, 0])), g)
    _sgd(b, "C", (WIDE, INSIDE), b.op("MatMul", b.op("Transpose", copy, perm=[1, 0]), dg))
    inner = b.op("MatMul", dg, b.op("Transpose", columns, perm=[1, 0]))
    if not lost:
        inner = _microsoft(b, "NcclAllReduce", inner, group_type=4) if megatron else comm(b, "AllReduce", inner)
    dh = _tanh_backward(b, b.op("Add", dz, inner), h)
    _sgd(b, "T", (3, WIDE), b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), dh))
    return b.model()


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "member.onnx"
    onnx.save(model, path)
    return path


def _microsoft(b: Builder, op_type: str, value: str, **attributes: object) -> str:
    b.extra_domains.append("com.microsoft") if "com.microsoft" not in b.extra_domains else None
    return str(b.op(op_type, value, domain="com.microsoft", **attributes))


def _ints(b: Builder, *values: int) -> str:
    return b.const(list(values), "int64")


def _tanh_backward(b: Builder, gradient: str, value: str) -> str:
    return str(b.op("Mul", gradient, b.op("Sub", b.const(1.0), b.op("Mul", value, value))))


def _sgd(b: Builder, name: str, shape: tuple[int, ...], gradient: str) -> None:
    b.output(f"{name}.new", b.op("Sub", name, b.op("Mul", gradient, b.const(0.1))), shape)


def of_rank(model: onnx.ModelProto) -> onnx.ModelProto:
    """What gopt wrote for a rank, as if somebody else had: without names and marks of gopt."""

    def renamed(name: str) -> str:
        return "m." + name.removeprefix("gopt.") if name.startswith("gopt.") else name

    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = map(renamed, names)
        del node.metadata_props[:]
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = renamed(value.name)
    del model.metadata_props[:]
    return model
