"""Updates and backwards in bodies of control flow and functions of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from whole_gen.forwards import parameter
from whole_gen.odd import net, odd, rest
from whole_gen.updates import small
from whole_gen.writer import Value, Writer


@odd
def newton_loop(w: Writer) -> None:
    """Newton and Schulz in a Loop of three turns."""
    p, g = net(w, 4, 4, 4)
    for name in ("w0", "w1"):
        m = small(w, name + ".m", p[name].shape)
        new = m * 0.9 + g[name]
        w.becomes(m, new)
        start = new / (w.op("ReduceL2", new, keepdims=0) + 0.1)
        w.becomes(p[name], p[name] - looped(w, start) * 0.1)
    rest(w, p, g, "b0")


def looped(w: Writer, start: Value) -> Value:
    code = helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype))
    tag = f"l{w.count}"
    half, three = (numpy_helper.from_array(np.array(each, w.dtype)) for each in (0.5, 1.5))
    nodes = [
        helper.make_node("Identity", [f"{tag}.c"], [f"{tag}.c2"]),
        helper.make_node("Constant", [], [f"{tag}.half"], value=half),
        helper.make_node("Constant", [], [f"{tag}.three"], value=three),
        helper.make_node("Transpose", [f"{tag}.x"], [f"{tag}.t"], perm=[1, 0]),
        helper.make_node("MatMul", [f"{tag}.x", f"{tag}.t"], [f"{tag}.s"]),
        helper.make_node("MatMul", [f"{tag}.s", f"{tag}.x"], [f"{tag}.q"]),
        helper.make_node("Mul", [f"{tag}.q", f"{tag}.half"], [f"{tag}.h"]),
        helper.make_node("Mul", [f"{tag}.x", f"{tag}.three"], [f"{tag}.u"]),
        helper.make_node("Sub", [f"{tag}.u", f"{tag}.h"], [f"{tag}.y"]),
    ]
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes, "body",
        [info(f"{tag}.i", 7, []), info(f"{tag}.c", 9, []), info(f"{tag}.x", code, start.shape)],
        [info(f"{tag}.c2", 9, []), info(f"{tag}.y", code, start.shape)],
    )  # fmt: skip
    return w.captured("Loop", [w.const(np.array(3), "stored"), w.const(np.array(True), "stored"), start], [], body=body)


@odd
def chosen_update(w: Writer) -> None:
    """An If on a counter: SGD in its first steps, then momentum; both branches give parameter and momentum."""
    p, g = net(w)
    count = w.state("count", np.array(0, np.int64))
    more = count + 1
    w.becomes(count, more)
    late = w.op("Greater", more, w.const(np.array(1)))
    for name in p:
        m = small(w, name + ".m", p[name].shape)
        new_p, new_m = chosen(w, late, p[name], g[name], m)
        w.becomes(p[name], new_p)
        w.becomes(m, new_m)


def chosen(w: Writer, flag: Value, p: Value, g: Value, m: Value) -> list[Value]:
    code = helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype))
    info = helper.make_tensor_value_info

    def branch(tag: str, late: bool) -> Any:
        tag = f"{tag}{w.count}"
        rate = numpy_helper.from_array(np.array(0.1, w.dtype))
        nodes = [helper.make_node("Constant", [], [f"{tag}.rate"], value=rate)]
        if late:
            nodes += [helper.make_node("Mul", [m.name, f"{tag}.rate"], [f"{tag}.k"]),
                      helper.make_node("Add", [f"{tag}.k", g.name], [f"{tag}.m"])]  # fmt: skip
        else:
            nodes += [helper.make_node("Identity", [g.name], [f"{tag}.m"])]
        nodes += [helper.make_node("Mul", [f"{tag}.m", f"{tag}.rate"], [f"{tag}.s"]),
                  helper.make_node("Sub", [p.name, f"{tag}.s"], [f"{tag}.p"])]  # fmt: skip
        return helper.make_graph(nodes, tag, [], [info(f"{tag}.p", code, p.shape), info(f"{tag}.m", code, p.shape)])

    return w.captured(
        "If", [flag], [p, g, m], out=2, then_branch=branch("then", True), else_branch=branch("else", False)
    )


@odd
def gradient_in_scan(w: Writer) -> None:
    """The backward of a weight is a Scan over samples that carries its sum."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    a = parameter(w, "a", 3, 2)
    d = x @ a - y
    n = float(np.prod(y.shape))
    loss = (d * d).sum() / n
    w.out("loss", loss)
    e = d * (2.0 / n)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype))
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Constant", [], ["s.axis0"], value_ints=[0]),
        helper.make_node("Constant", [], ["s.axis1"], value_ints=[1]),
        helper.make_node("Unsqueeze", ["s.x", "s.axis1"], ["s.xc"]),
        helper.make_node("Unsqueeze", ["s.e", "s.axis0"], ["s.er"]),
        helper.make_node("Mul", ["s.xc", "s.er"], ["s.g"]),
        helper.make_node("Add", ["s.sum", "s.g"], ["s.more"]),
    ]
    inputs = [info("s.sum", code, [3, 2]), info("s.x", code, [3]), info("s.e", code, [2])]
    body = helper.make_graph(nodes, "body", inputs, [info("s.more", code, [3, 2])])
    g = w.captured("Scan", [w.const(np.zeros((3, 2), w.dtype)), x, e], [], body=body, num_scan_inputs=2)
    m = small(w, "a.m", (3, 2))
    new = m * 0.9 + g
    w.becomes(m, new)
    w.becomes(a, a - new * 0.1)


@odd
def update_function(w: Writer) -> None:
    """Adam as one function of the model with four results, one of which is a norm."""
    p, g = net(w)
    code = np.dtype(w.dtype)

    def const(name: str, value: float) -> Any:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, code)))

    nodes = [
        const("k1", 0.9), const("k2", 0.1), const("k3", 0.99), const("k4", 0.01), const("eps", 0.01),
        helper.make_node("Mul", ["m", "k1"], ["m1"]), helper.make_node("Mul", ["g", "k2"], ["g1"]),
        helper.make_node("Add", ["m1", "g1"], ["m2"]),
        helper.make_node("Mul", ["v", "k3"], ["v1"]), helper.make_node("Mul", ["g", "g"], ["gg"]),
        helper.make_node("Mul", ["gg", "k4"], ["gg1"]), helper.make_node("Add", ["v1", "gg1"], ["v2"]),
        helper.make_node("Sqrt", ["v2"], ["r"]), helper.make_node("Add", ["r", "eps"], ["r1"]),
        helper.make_node("Div", ["m2", "r1"], ["u"]), helper.make_node("Mul", ["u", "lr"], ["u1"]),
        helper.make_node("Sub", ["p", "u1"], ["p2"]), helper.make_node("ReduceL2", ["u"], ["n"], keepdims=0),
    ]  # fmt: skip
    w.functions.append(helper.make_function("local", "Adam", ["p", "g", "m", "v", "lr"], ["p2", "m2", "v2", "n"], nodes,
                                            [helper.make_opsetid("", 20)]))  # fmt: skip
    lr = w.setting("lr", 0.05)
    norms = []
    for name in p:
        m, v = small(w, name + ".m", p[name].shape), small(w, name + ".v", p[name].shape)
        new_p, new_m, new_v, n = w.op("Adam", p[name], g[name], m, v, lr, out=4, domain="local")
        norms.append(n)
        w.becomes(p[name], new_p)
        w.becomes(m, new_m)
        w.becomes(v, new_v)
    w.out("length", w.op("Sum", *norms))
