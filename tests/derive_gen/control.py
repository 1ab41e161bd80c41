"""Draws of bodies of control flow and of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from .elementwise import operand
from .sketch import Rejected, Sketch

N = helper.make_node


def body(
    s: Sketch,
    nodes: list[NodeProto],
    inputs: list[tuple[str, int, tuple[int, ...]]],
    outputs: list[tuple[str, int, tuple[int, ...]]],
    stored: Sequence[TensorProto] = (),
) -> GraphProto:
    border = [[helper.make_tensor_value_info(*each) for each in side] for side in (inputs, outputs)]
    return helper.make_graph(nodes, s.name("body"), border[0], border[1], list(stored))


def branch(s: Sketch) -> str:
    """An If whose bodies read values and weights from outside."""
    x = s.pick()
    shape, one, two = s.shape(x), operand(s, s.shape(x)), operand(s, s.shape(x))
    if np.broadcast_shapes(shape, s.shape(one), s.shape(two)) != shape:
        raise Rejected
    total = s.op("ReduceSum", [x], keepdims=0)
    s.apart(s.values[total], np.array(0.3))
    test = s.op("Greater", [total, s.scalar(0.3)])
    names = [s.name("b") for _ in range(4)]
    yes = body(s, [N("Mul", [x, one], [names[0]]), N("Tanh", [names[0]], [names[1]])], [], [(names[1], 1, shape)])
    no = body(s, [N("Sub", [x, two], [names[2]]), N("Mul", [names[2], two], [names[3]])], [], [(names[3], 1, shape)])
    return s.op("If", [test], then_branch=yes, else_branch=no)


def loop(s: Sketch) -> str:
    """A Loop that carries a value and reads a weight; sometimes it stacks what it makes."""
    x = s.pick(1, 2)
    shape, weight = s.shape(x), s.weight(*s.shape(x))
    step, go, carried, still, mixed, new, kept = (s.name("b") for _ in range(7))
    nodes = [
        N("Identity", [go], [still]), N("Mul", [carried, weight], [mixed]), N("Tanh", [mixed], [new]),
        N("Add", [new, weight], [kept]),
    ]  # fmt: skip
    inputs = [(step, TensorProto.INT64, ()), (go, TensorProto.BOOL, ()), (carried, 1, shape)]
    outputs = [(still, TensorProto.BOOL, ()), (new, 1, shape), (kept, 1, shape)]
    graph = body(s, nodes, inputs, outputs)
    true = s.op("Cast", [s.ints(1)], to=TensorProto.BOOL)
    made = s.ops("Loop", [s.ints(s.below(4, 1)), true, x], 2, body=graph)
    if s.chance(0.5):
        s.use(made[1])
    return made[0]


def scan(s: Sketch) -> str:
    x = s.pick(2, 3)
    row = s.shape(x)[1:]
    first, weight = s.weight(*row), s.weight(*row)
    held, part, mixed, new, shown = (s.name("b") for _ in range(5))
    nodes = [N("Mul", [held, weight], [mixed]), N("Add", [mixed, part], [new]), N("Sin", [new], [shown])]
    graph = body(s, nodes, [(held, 1, row), (part, 1, row)], [(new, 1, row), (shown, 1, row)])
    made = s.ops("Scan", [first, x], 2, body=graph, num_scan_inputs=1)
    if s.chance(0.5):
        s.use(made[0])
    return made[1]


def constant_body(s: Sketch) -> str:
    """A constant inside a body, which is not trained."""
    x = s.pick(1, 2)
    shape = s.shape(x)
    total = s.op("ReduceMean", [x], keepdims=0)
    s.apart(s.values[total], np.array(0.1))
    inner, made, other = (s.name("b") for _ in range(3))
    fixed = numpy_helper.from_array(s.numbers(shape).astype(np.float32), inner)
    yes = body(s, [N("Mul", [x, inner], [made])], [], [(made, 1, shape)], [fixed])
    no = body(s, [N("Sin", [x], [other])], [], [(other, 1, shape)])
    return s.op("If", [s.op("Less", [total, s.scalar(0.1)])], then_branch=yes, else_branch=no)


DRAWS: dict[Callable[[Sketch], str], float] = {branch: 1, loop: 1, scan: 1, constant_body: 0.3}
"""Draw -> how often."""
