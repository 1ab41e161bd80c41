"""Statistics beside numbers of samples: cumulative means, counted sums, centred counts, means behind functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Value, Writer


def _number(w: Writer, x: Value, times: float = 1.0) -> tuple[Value, bool]:
    """How many samples there are, times a constant; and whether a shape says it."""
    way = w.pick("literal", "literal", "shape", "slice", "gather", "size", "ones", "expand")
    many = x.shape[0]
    if way == "literal":
        return w.const(np.array(many * times, w.dtype)), False
    if way == "shape":
        found = w.op("Shape", x, start=0, end=1).to(w.dtype).reshape()
    elif way == "slice":
        shape = w.op("Shape", x)
        found = w.op("Slice", shape, w.const(np.array([0])), w.const(np.array([1]))).to(w.dtype).reshape()
    elif way == "gather":
        found = w.op("Gather", w.op("Shape", x), w.const(np.array(0)), axis=0).to(w.dtype)
    elif way == "size":
        found = w.op("Size", x).to(w.dtype) / float(np.prod(x.shape[1:]))
    elif way == "ones":
        one = w.op(
            "ConstantOfShape", w.op("Shape", x, start=0, end=1), value=onnx.numpy_helper.from_array(np.ones(1, w.dtype))
        )
        found = one.sum(0)
    else:
        found = w.op("Expand", w.const(np.ones(1, w.dtype), "stored"), w.op("Shape", x, start=0, end=1)).sum(0)
    return (found if times == 1.0 else found * times), True


LITERAL = "number of samples|size of a batch|divide by their number|counts no share of the"


@kind
def counted_statistic(w: Writer) -> None:
    """A statistic takes a sum or a mean over samples, and the number of samples beside it."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    s = w.state("s", w.draw("s", (3,), 0.5, 1.5))
    out = (x / ((s * s) + 0.7)) @ w0
    d = out - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    how = w.pick("cumulative", "sum and count", "log", "centred", "power", "root", "unbiased", "average", "shift")
    positive = w.op("Greater", x, w.const(np.array(0, w.dtype))).to(w.dtype)
    sure = True
    if how in ("cumulative", "sum and count"):
        many, sure = _number(w, x)
        count = w.state("seen", w.draw("seen", (), 3.0, 9.0))
        total = count + many
        if not sure and w.pick(True, False):
            w.stated["seen"] = "sum"
            sure = how == "sum and count"
        w.becomes(count, total)
        w.told = True
        new = s + ((x.mean(0) - s) * (many / total) if how == "cumulative" else x.sum(0) * 0.1)
    elif how == "log":
        many, sure = _number(w, x)
        new = s * 0.9 + (w.op("Log", w.op("Exp", x).sum(0)) - w.op("Log", many)) * 0.1
    elif how == "centred":
        many, sure = _number(w, x, w.pick(0.5, 0.3, 1.0))
        new = s * 0.9 + (positive.sum(0) - many) * 0.1
    elif how == "power":
        many, sure = _number(w, x)
        total = x.sum(0)
        new = s * 0.9 + total * total / (many * many) * 0.1
    elif how == "root":
        many, sure = _number(w, x)
        new = s * 0.9 + ((x * x).sum(0) / many).sqrt() * 0.1
    elif how == "unbiased":
        many, sure = _number(w, x)
        new = s * 0.9 + (x * x).sum(0) / (many - 1.0) * 0.1
    elif how == "average":
        many, sure = _number(w, x)
        new = s * 0.9 + x.sum(0) / many * 0.1
        sure = True
    else:
        new = s + w.op("Sign", positive.mean(0) - 0.47) * 0.01
    if not sure:
        w.refusal = LITERAL
    w.becomes(s, new)


@kind
def counted_samples(w: Writer) -> None:
    """A state counts samples, another one steps; forward, update or nothing reads them."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    shape = w.pick((), (1,), (3,))
    seen, step = w.state("seen", w.draw("seen", shape, 3.0, 9.0)), w.state("step", w.draw("step", (), 1.0, 2.0))
    use = w.pick("forward", "update", "nothing", "late")
    w.options["accumulate"] = 1
    w.told = True
    many, sure = _number(w, x)
    scale = w.reduced("ReduceMean", 1.0 / (seen * 0.1 + 1.0), [], False) if shape else 1.0 / (seen * 0.1 + 1.0)
    out = ((x * scale) if use == "forward" else x) @ w0
    d = out - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    new = seen + many
    rate = 0.1
    if use == "late":
        w.refusal = "counts samples|its own batch|one rank's own batch"
        rate = 0.1 / w.reduced("ReduceMean", new, [], False)
    elif use == "update":
        rate = 0.1 * scale
    if not sure:
        if w.pick(True, False):
            w.stated["seen"] = "sum"
        else:
            w.refusal = LITERAL
    w.becomes(w0, w0 - g * rate)
    w.becomes(seen, new)
    w.becomes(step, step + 1.0)


@kind
def average_of_loss(w: Writer) -> None:
    """A running average of the loss, of a term of it or of a multiple, that the next forward reads."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    b = w.state("b", w.draw("b", (), 0.5, 1.5))
    out = (x / (b * b + 1.0)) @ w0
    d = out - y
    loss = (d * d).mean()
    more = w.pick("none", "term", "multiple")
    term = loss
    if more == "term":
        loss = loss + (w0 * w0).sum() * 0.01
    elif more == "multiple":
        loss = loss * 0.5
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    shown = w.pick(True, False)
    w.becomes(w0, w0 - g * 0.1)
    w.becomes(b, b * 0.9 + (loss if shown else term) * 0.1)


@kind
def counted_integers(w: Writer) -> None:
    """Integers that follow the batch: counts of events, of tokens of each kind, largest tokens."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    ids = w.fed("ids", [], lambda generator, size: generator.integers(0, 5, size))
    w0 = parameter(w, "w0", 3, 2)
    how = w.pick("events", "kinds", "largest", "smallest")
    shape = (5,) if how == "kinds" else ()
    n = w.state("n", np.full(shape, 0 if how == "largest" else 3, np.int64))
    w.told = True
    scale = w.op("Sqrt", n.to(w.dtype) + 1.0).mean() if how == "kinds" else w.op("Sqrt", n.to(w.dtype) + 1.0)
    out = (x / scale) @ w0
    d = out - y * (ids.to(w.dtype) + 1.0).reshape(-1, 1)
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    if how == "events":
        new = n + w.op("Greater", x, w.const(np.array(0, w.dtype))).to(np.int64).sum()
    elif how == "kinds":
        hit = w.op("Equal", ids.reshape(-1, 1), w.const(np.arange(5)[None]))
        new = n + hit.to(np.int64).sum(0)
    elif how == "largest":
        new = w.op("Max", n, w.reduced("ReduceMax", ids, [0], False))
    else:
        new = w.op("Min", n, w.reduced("ReduceMin", ids, [0], False))
    w.becomes(n, new)


@kind
def divided_sum(w: Writer) -> None:
    """A sum over samples that constants may divide by their number: in front of it, behind it, in vectors, by choice;
    or that constants of the model weight."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    s = w.state("s", w.draw("s", (3,), 0.5, 1.5))
    d = (x / ((s * s) + 0.7)) @ w0 - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    many = x.shape[0]
    share = w.const(np.array(1.0 / many, w.dtype))
    zero = w.const(np.array(0, w.dtype))
    positive = w.op("Greater", x, zero)
    how = w.pick("chosen", "vector", "diagonal", "folded", "root", "rate", "times", "weights", "bounded", "cast")
    rate = w.pick(0.1, 0.02)
    w.refusal = f"{LITERAL}|is a rate|rate, or one over"
    old = s - s * rate if w.pick(True, False) else s * (1 - rate)
    if how == "chosen":
        seen = w.op("Where", positive, share, zero).sum(0) * rate
    elif how == "vector":
        seen = x.sum(0) * w.const(np.full(3, 1.0 / many, w.dtype), "stored") * rate
    elif how == "diagonal":
        seen = (x.sum(0, keep=True) @ w.const(np.eye(3, dtype=w.dtype) / many, "stored")).reshape(3) * rate
    elif how == "folded":
        seen = x.sum(0) * (rate / many)
    elif how == "root":
        seen = x.sum(0) / float(np.sqrt(many)) * rate
    elif how == "rate":
        seen = x.sum(0) / float(many) * rate
    elif how == "times":
        seen = x.mean(0) * float(many) * rate
    elif how == "weights":
        seen = x.sum(0) * w.const(w.draw("k", (3,), 0.31, 0.87), "stored") * rate
        w.refusal = ""
    elif how == "bounded":
        seen = w.op("Clip", x, zero, share).sum(0) * rate
    else:
        seen = x.sum(0).to(np.int64).to(w.dtype) * rate
        w.refusal = ""
    w.becomes(s, old + seen)


@kind
def counted_otherwise(w: Writer) -> None:
    """A state counts samples in another form than a sum of it and their number."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    seen = w.state("seen", w.draw("seen", (), 3.0, 9.0))
    w.told = True
    d = (x / (seen * 0.1 + 1.0)) @ w0 - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    many, sure = _number(w, x)
    one = w.const(np.array(1, w.dtype))
    how = w.pick(
        "decay behind", "backwards", "bounded", "while", "twice", "parts", "one less", "less one", "share", "reversed"
    )
    if how == "decay behind":
        new = (seen + many) * 0.9
    elif how == "backwards":
        new = seen - many
    elif how == "bounded":
        new = w.op("Min", seen + many, w.const(np.array(5000, w.dtype), "stored"))
    elif how == "while":
        new = w.op("Where", w.op("Less", seen, w.const(np.array(5000, w.dtype), "stored")), seen + many, seen)
    elif how == "parts":
        new = seen + one + (many - 1.0 if sure else w.const(np.array(x.shape[0] - 1, w.dtype)))
    elif how == "one less":
        new = seen + (many - 1.0)
    elif how == "less one":
        new = seen - 1.0 + many
    elif how == "share":
        new = seen + (many * 0.001 if sure else w.const(np.array(x.shape[0] / 1000, w.dtype)))
    elif how == "reversed":
        new = (seen / many + 1.0) * many
    else:
        new = seen + many + many
    w.refusal = "" if sure and how not in ("parts", "one less", "less one", "reversed") else LITERAL
    w.becomes(seen, new)


@kind
def chosen_divisor(w: Writer) -> None:
    """A sum over samples is divided or multiplied by a factor that control flow chooses: one, or one that counts."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    s, step = w.state("s", w.draw("s", (3,), 0.5, 1.5)), w.state("step", np.array(7.0, w.dtype))
    d = (x / ((s * s) + 0.7)) @ w0 - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    w.becomes(step, step + 1.0)
    by = w.pick("divide", "multiply")
    many = float(x.shape[0]) if by == "divide" else 1.0 / x.shape[0]
    limit = w.pick(5.0, 8.0)
    which = w.pick("step", "constant")
    flag = w.op("Less", step, w.const(np.array(limit, w.dtype))) if which == "step" else w.const(np.array(False))
    factor = _chosen(w, flag, many, w.pick("inside", "outside", "made"))
    seen = x.sum(0) / factor if by == "divide" else x.sum(0) * factor
    w.refusal = f"{LITERAL}|chosen by"
    w.becomes(s, s * 0.9 + seen * 0.1)


def _chosen(w: Writer, flag: Value, many: float, where: str) -> Value:
    """One where a flag is set, else a number: a constant of the body or of the outer graph, or computed in the body."""
    info = [helper.make_tensor_value_info("chosen", helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype)), [])]

    def node(op: str, *inputs: str, out: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, list(inputs), [out], **attributes)

    def fixed(number: float, out: str) -> onnx.NodeProto:
        return node("Constant", out=out, value=numpy_helper.from_array(np.array(number, w.dtype)))

    then = helper.make_graph([fixed(1.0, "chosen")], "then", [], info)
    outer: list[Value] = []
    if where == "inside":
        nodes = [fixed(many, "chosen")]
    elif where == "outside":
        outer = [w.const(np.array(many, w.dtype), "stored")]
        nodes = [node("Identity", outer[0].name, out="chosen")]
    else:
        nodes = [fixed(many / 2, "half"), node("Add", "half", "half", out="chosen")]
    info = [helper.make_tensor_value_info("chosen", helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype)), [])]
    other = helper.make_graph(nodes, "other", [], info)
    found: Value = w.captured("If", [flag], outer, then_branch=then, else_branch=other)
    return found


@kind
def kept_divisor(w: Writer) -> None:
    """A sum over samples is divided or multiplied by a state that no step changes, and that holds a count."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    many = float(x.shape[0])
    by = w.pick("divide", "multiply", "root", "times mean")
    held = {"divide": many, "multiply": 1.0 / many, "root": many**0.5, "times mean": many}[by]
    shape = w.pick((), (1,), (3,))
    s, n = w.state("s", w.draw("s", (3,), 0.5, 1.5)), w.state("n", np.full(shape, held, w.dtype))
    w.told = True
    d = (x / ((s * s) + 0.7)) @ w0 - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    if by == "times mean":
        seen = x.mean(0) * n
    elif by == "multiply":
        seen = x.sum(0) * n
    else:
        seen = x.sum(0) / n
    w.refusal = LITERAL
    w.becomes(s, s * 0.9 + seen * 0.1)
    w.becomes(n, w.op("Identity", n))


@kind
def stated_for_all(w: Writer) -> None:
    """One rule for all statistics, where data flow says another for a count of samples and a sum."""
    w.options |= {"accumulate": 1, "statistics": w.pick("mean", "root", "local")}
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    seen, s = w.state("seen", w.draw("seen", (), 3.0, 9.0)), w.state("s", w.draw("s", (3,), 0.5, 1.5))
    w.told = True
    d = (x / (seen * 0.1 + 1.0) / ((s * s) + 0.7)) @ w0 - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    many, sure = _number(w, x)
    if not sure:
        many = w.op("Shape", x, start=0, end=1).to(w.dtype).reshape()
    how = w.pick("count", "sum", "both")
    w.becomes(seen, seen + many if how != "sum" else seen + 1.0)
    w.becomes(s, s * 0.9 + (x.sum(0) if how != "count" else x.mean(0)) * 0.1)
