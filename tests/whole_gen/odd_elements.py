"""Updates that know places, shapes, and other elements; states that change places."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from whole_gen.odd import float_, net, odd, rest
from whole_gen.updates import small
from whole_gen.writer import Writer


@odd
def size_of_gradient(w: Writer) -> None:
    """The mean square divides by Size of the gradient."""
    p, g = net(w)
    for name in p:
        n = w.op("Size", g[name]).to(w.dtype)
        rms = ((g[name] * g[name]).sum() / n).sqrt()
        w.becomes(p[name], p[name] - g[name] / (rms + 0.1) * 0.1)


@odd
def shape_of_gradient(w: Writer) -> None:
    """Zeros and rates expanded to Shape of the gradient, noise from a table of that shape."""
    p, g = net(w)
    for name in p:
        shape = w.op("Shape", g[name])
        zero = w.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.zeros(1, w.dtype)))
        rate = w.op("Expand", float_(w, 0.1), shape)
        w.becomes(p[name], p[name] - w.op("Max", g[name], zero) * rate)


@odd
def shape_of_state(w: Writer) -> None:
    """The momentum starts as zeros like the parameter; a product of its dimensions scales it."""
    p, g = net(w)
    for name in p:
        m = small(w, name + ".m", p[name].shape)
        count = w.op("ReduceProd", w.op("Shape", m), keepdims=0).to(w.dtype)
        new = m * 0.9 + g[name] / count
        w.becomes(m, new)
        w.becomes(p[name], p[name] - new)


@odd
def element_masks(w: Writer) -> None:
    """Constants by element: rates, a mask of booleans, a mask that nodes make of a Range, a row and a column."""
    p, g = net(w)
    for name in p:
        shape, size = p[name].shape, p[name].held.size
        rate = w.const(np.linspace(0.01, 0.2, size).reshape(shape).astype(w.dtype))
        mask = w.const(np.arange(size).reshape(shape) % 3 != 0)
        steps = w.op("Range", w.const(np.array(0)), w.const(np.array(size)), w.const(np.array(1)))
        odd = w.op("Mod", steps, w.const(np.array(2))).to(w.dtype).reshape(*shape)
        row = w.const(np.linspace(0.5, 1, shape[-1]).astype(w.dtype))
        column = w.const(np.linspace(0.5, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1)).astype(w.dtype))
        step = w.op("Where", mask, g[name] * rate, g[name] * 0.01) * row * column + g[name] * odd * 0.01
        w.becomes(p[name], p[name] - step)


@odd
def running_sum(w: Writer) -> None:
    """CumSum over a dimension, a flip by Gather, a roll by Slice and Concat."""
    p, g = net(w)
    a = w.op("CumSum", g["w0"], w.const(np.array(1)))
    w.becomes(p["w0"], p["w0"] - a * 0.1)
    b = w.op("Gather", g["w1"], w.const(np.arange(p["w1"].shape[0])[::-1].copy()), axis=0)
    w.becomes(p["w1"], p["w1"] - b * 0.1)
    first, last = w.op("Split", g["b0"], w.const(np.array([1, 3])), out=2, axis=0)
    w.becomes(p["b0"], p["b0"] - w.op("Concat", last, first, axis=0) * 0.1)


@odd
def largest(w: Writer) -> None:
    """Only the largest elements of a gradient are applied; what remains is kept for later."""
    p, g = net(w)
    for name in ("w0", "w1"):
        left = small(w, name + ".left", p[name].shape)
        total = g[name] + left
        flat = w.op("Abs", total).reshape(-1)
        top, _ = w.op("TopK", flat, w.const(np.array([3])), out=2, axis=0)
        least = w.op("ReduceMin", top, keepdims=0)
        mask = w.op("GreaterOrEqual", w.op("Abs", total), least).to(w.dtype)
        sent = total * mask
        w.becomes(left, total - sent)
        w.becomes(p[name], p[name] - sent * 0.1)
    rest(w, p, g, "b0")


@odd
def on_the_simplex(w: Writer) -> None:
    """Exponentiated gradient: rows stay on the simplex; another weight is normalised by columns."""
    p, g = net(w)
    z = p["w0"] - g["w0"] * 0.5
    w.becomes(p["w0"], w.op("Softmax", z, axis=1))
    z = p["w1"] - g["w1"] * 0.5
    w.becomes(p["w1"], z / w.op("ReduceL2", z, w.const(np.array([0])), keepdims=1))
    z = p["b0"] - g["b0"]
    w.becomes(p["b0"], w.op("LpNormalization", z, axis=0, p=1))


@odd
def log_sum(w: Writer) -> None:
    """A rate by a soft maximum of all gradients, and by a product over norms."""
    p, g = net(w)
    tops = [w.op("ReduceLogSumExp", each, keepdims=0) for each in g.values()]
    norms = [w.op("ReduceL1", each, keepdims=0) for each in g.values()]
    rate = w.op("Sum", *tops) * 0.01 + norms[0] * norms[1] * 0.1
    for name in p:
        w.becomes(p[name], p[name] - g[name] * rate)


@odd
def history(w: Writer) -> None:
    """The last three gradients in one state that is rolled; the step follows their mean."""
    p, g = net(w)
    for name in ("w0", "w1"):
        shape = p[name].shape
        past = small(w, name + ".past", (3, *shape))
        kept = w.op("Slice", past, w.const(np.array([1])), w.const(np.array([3])), w.const(np.array([0])))
        new = w.op("Concat", kept, g[name].reshape(1, *shape), axis=0)
        w.becomes(past, new)
        w.becomes(p[name], p[name] - new.mean(0) * 0.1)
    rest(w, p, g, "b0")


@odd
def ring(w: Writer) -> None:
    """A ring of past gradients: the place is a counter's remainder."""
    p, g = net(w)
    t = w.state("t", np.array(0, np.int64))
    new_t = t + 1
    w.becomes(t, new_t)
    place = w.op("Mod", new_t, w.const(np.array(3))).reshape(1, 1)
    for name in ("w0", "w1"):
        shape = p[name].shape
        past = small(w, name + ".past", (3, *shape))
        new = w.op("ScatterND", past, place, g[name].reshape(1, *shape))
        w.becomes(past, new)
        w.becomes(p[name], p[name] - new.mean(0) * 0.1)
    rest(w, p, g, "b0")


@odd
def look_back(w: Writer) -> None:
    """Lookahead with its own counter; slow weights are states, both are replaced."""
    p, g = net(w)
    count = w.state("count", np.array(0, np.int32))
    more = count + 1
    due = w.op("GreaterOrEqual", more, w.const(np.array(2, np.int32)))
    w.becomes(count, w.op("Where", due, w.const(np.array(0, np.int32)), more))
    for name in p:
        slow = w.state(name + ".slow", p[name].held.copy())
        fast = p[name] - g[name] * 0.1
        mid = slow + (fast - slow) * 0.5
        w.becomes(slow, w.op("Where", due, mid, slow))
        w.becomes(p[name], w.op("Where", due, mid, fast))


@odd
def accumulates(w: Writer) -> None:
    """The source sums gradients itself and applies them every second step, by numbers and not by a choice."""
    p, g = net(w)
    count = w.state("count", np.array(0, np.int64))
    more = count + 1
    w.becomes(count, more)
    due = w.op("Equal", w.op("Mod", more, w.const(np.array(2))), w.const(np.array(0))).to(w.dtype)
    for name in p:
        held = w.state(name + ".sum", np.zeros(p[name].shape, w.dtype))
        total = held + g[name]
        w.becomes(p[name], p[name] - total * (due * 0.05))
        w.becomes(held, total * (1.0 - due))


@odd
def alternating(w: Writer) -> None:
    """Even steps update one weight, odd steps the others."""
    p, g = net(w)
    even = w.state("even", np.array(True))
    w.becomes(even, w.op("Not", even))
    w.becomes(p["w0"], w.op("Where", even, p["w0"] - g["w0"] * 0.1, p["w0"]))
    flag = w.op("Not", even)
    for name in ("b0", "w1"):
        w.becomes(p[name], w.op("Where", flag, p[name] - g[name] * 0.1, p[name]))


@odd
def exchanged_states(w: Writer) -> None:
    """Two states of one shape change places in each step."""
    p, g = net(w)
    for name in p:
        a, b = small(w, name + ".a", p[name].shape), small(w, name + ".b", p[name].shape, -0.01, 0.02)
        w.becomes(a, b * 0.9 + g[name])
        w.becomes(b, a * 0.5)
        w.becomes(p[name], p[name] - (a + b) * 0.1 - g[name] * 0.1)


@odd
def half_states(w: Writer) -> None:
    """Moments in float16 and bfloat16; arithmetic wide."""
    import ml_dtypes

    p, g = net(w)
    for name, kind in zip(p, (np.float16, ml_dtypes.bfloat16, np.float32)):
        m = w.state(name + ".m", np.full(p[name].shape, 0.01).astype(kind))
        new = (m.to(w.dtype) * 0.5 + w.op("Sign", g[name])).to(kind)
        w.becomes(m, new)
        w.becomes(p[name], p[name] - new.to(w.dtype) * 0.1)


@odd
def whole_numbers(w: Writer) -> None:
    """A parameter's update in fixed point: a state of int32 is the parameter times a thousand."""
    p, g = net(w)
    fixed = w.state("w0.fixed", np.round(p["w0"].held * 1000).astype(np.int32))
    new = fixed - w.op("Round", g["w0"] * 100.0).to(np.int32)
    w.becomes(fixed, new)
    w.becomes(p["w0"], new.to(w.dtype) / 1000.0)
    rest(w, p, g, "b0", "w1")


@odd
def counts_by_element(w: Writer) -> None:
    """An int64 state by element counts how often each gradient was positive."""
    p, g = net(w)
    for name in p:
        n = w.state(name + ".n", np.zeros(p[name].shape, np.int64))
        new = n + w.op("Greater", g[name], float_(w, 0.0)).to(np.int64)
        w.becomes(n, new)
        w.becomes(p[name], p[name] - g[name] / (new.to(w.dtype) + 1.0))


@odd
def median(w: Writer) -> None:
    """Each weight's rate follows the median magnitude of its gradient."""
    p, g = net(w)
    for name in p:
        flat = w.op("Abs", g[name]).reshape(-1)
        k = flat.shape[0] // 2 + 1
        top, _ = w.op("TopK", flat, w.const(np.array([k])), out=2, axis=0)
        mid = w.op("Gather", top, w.const(np.array(k - 1)), axis=0)
        w.becomes(p[name], p[name] - g[name] / (mid + 0.1) * 0.1)


@odd
def triangle(w: Writer) -> None:
    """A square parameter whose gradient is made symmetric; another keeps its upper triangle alone."""
    p, g = net(w, 4, 4, 4)
    w.becomes(p["w0"], p["w0"] - (g["w0"] + g["w0"].turn(1, 0)) * 0.05)
    w.becomes(p["w1"], w.op("Trilu", p["w1"] - g["w1"] * 0.1, upper=1))
    rest(w, p, g, "b0")


@odd
def projected(w: Writer) -> None:
    """Gradients less their part along the weight; the weight keeps its length."""
    p, g = net(w)
    for name in p:
        dot = (g[name] * p[name]).sum() / ((p[name] * p[name]).sum() + 1e-6)
        new = p[name] - (g[name] - p[name] * dot) * 0.1
        length = w.op("ReduceL2", p[name], keepdims=0) / w.op("ReduceL2", new, keepdims=0)
        w.becomes(p[name], new * length)


@odd
def kept_gradients(w: Writer) -> None:
    """A state is the gradient itself; another is what that one was."""
    p, g = net(w)
    for name in ("w0", "b0"):
        last, first = small(w, name + ".last", p[name].shape), small(w, name + ".first", p[name].shape)
        w.becomes(first, last)
        w.becomes(last, g[name])
        w.becomes(p[name], p[name] - (g[name] + last * 0.5 + first * 0.2) * 0.1)
    rest(w, p, g, "w1")
