"""Training steps whose update is done by opaque operators: the perceptron of ``helpers`` with every optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import onnx
from helpers import CODES, Builder, Network, perceptron
from onnx import helper

MICROSOFT, PREVIEW = "com.microsoft", "ai.onnx.preview.training"
WIDTHS = (3, 5, 4, 2)


def start(domain: str, seed: int = 0, **options: Any) -> tuple[Builder, Network]:
    b = Builder(seed)
    b.extra_domains.append(domain)
    net = perceptron(b, options.pop("widths", WIDTHS), **options)
    b.output("loss", net.loss, ())
    return b, net


def node(b: Builder, domain: str, op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
    """A node whose outputs have names of the caller's choice."""
    b.nodes.append(helper.make_node(op_type, inputs, outputs, name=f"n{len(b.nodes)}", domain=domain, **attributes))


def shown(b: Builder, name: str, shape: Any, dtype: str = "float32") -> str:
    """A graph output that a node makes under its own name."""
    b.outputs.append(helper.make_tensor_value_info(name, CODES[dtype], shape))
    return name


def rate(b: Builder) -> str:
    return b.input("lr", (1,))


def counter(b: Builder, name: str = "step") -> str:
    return b.state(name, np.array([3], np.int64))


def counted(b: Builder, count: str) -> None:
    b.output(f"{count}_out", b.op("Add", count, b.const([1], "int64")), (1,), "int64")


def moments(b: Builder, name: str, shape: Any, slots: int) -> list[str]:
    return [b.small(f"{name}.m{slot}", shape) for slot in range(slots)]


# --- one weight a node ----------------------------------------------------------------------------------------------


def sgd(b: Builder, net: Network, **attributes: Any) -> None:
    lr = rate(b)
    for name, shape in net.params.items():
        node(b, MICROSOFT, "SGDOptimizer", [lr, name, net.gradients[name]], [shown(b, f"{name}_out", shape)])


def adam(b: Builder, net: Network, signal: str = "", norm: str = "", **attributes: Any) -> None:
    lr = rate(b)
    for name, shape in net.params.items():
        count = counter(b, f"count.{name}")
        first, second = moments(b, name, shape, 2)
        inputs = [lr, count, name, net.gradients[name], first, second, "", "", norm, signal]
        while not inputs[-1]:
            inputs.pop()
        outputs = [
            shown(b, f"{count}_out", (1,), "int64"), shown(b, f"{first}_out", shape), shown(b, f"{second}_out", shape),
            shown(b, f"{name}_out", shape),
        ]  # fmt: skip
        node(b, MICROSOFT, "AdamOptimizer", inputs, outputs, **attributes)


# --- all weights in one node ----------------------------------------------------------------------------------------


def lamb(b: Builder, net: Network, signal: str = "", norm: str = "", **attributes: Any) -> None:
    lr, count = rate(b), counter(b)
    inputs, outputs = [signal, "", norm, lr, count], [shown(b, "step_out", (1,), "int64")]
    for name, shape in net.params.items():
        first, second = moments(b, name, shape, 2)
        inputs += [name, net.gradients[name], first, second, ""]
        outputs += [
            shown(b, f"{name}_out", shape),
            "",
            shown(b, f"{first}_out", shape),
            shown(b, f"{second}_out", shape),
            "",
        ]
    node(b, MICROSOFT, "LambOptimizer", inputs, outputs, **attributes)


def _sequences(
    b: Builder, net: Network, op_type: str, scalars: list[str], slots: int, signal: str, flag: str,
    **attributes: Any,
) -> None:  # fmt: skip
    names = list(net.params)
    states = [moments(b, name, shape, slots) for name, shape in net.params.items()]
    lists = [
        names,
        [net.gradients[name] for name in names],
        *([each[slot] for each in states] for slot in range(slots)),
    ]
    inputs = [*scalars, *(b.op("SequenceConstruct", *each) for each in lists), *([signal] if signal else [])]
    outputs = [flag, *(f"new.{op_type}.{slot}" for slot in range(1 + slots))]
    node(b, MICROSOFT, op_type, inputs, outputs, **attributes)
    for place, name in enumerate(names):
        for slot in range(1 + slots):
            state = name if slot == 0 else states[place][slot - 1]
            got = b.op("SequenceAt", outputs[1 + slot], b.const(place, "int64"))
            b.output(f"{state}_out", got, net.params[name])


def adamw(b: Builder, net: Network, signal: str = "", **attributes: Any) -> None:
    count = counter(b)
    flag = shown(b, "updated", (1,), "bool") if signal else "updated"
    _sequences(b, net, "AdamWOptimizer", [rate(b), count], 2, signal, flag, **attributes)
    counted(b, count)


def sgd_v2(b: Builder, net: Network, signal: str = "", **attributes: Any) -> None:
    _sequences(b, net, "SGDOptimizerV2", [rate(b)], 0, signal, "updated", **attributes)


def preview(op_type: str, slots: int) -> Callable[..., None]:
    def write(b: Builder, net: Network, **attributes: Any) -> None:
        lr, count = rate(b), counter(b)
        states = [moments(b, name, shape, slots) for name, shape in net.params.items()]
        names = list(net.params)
        lists = [names, [net.gradients[n] for n in names], *([each[slot] for each in states] for slot in range(slots))]
        new = [[f"{x}_out" for x in names], *([f"{each[slot]}_out" for each in states] for slot in range(slots))]
        for each in new:
            for name, output in zip(names, each):
                shown(b, output, net.params[name])
        node(b, PREVIEW, op_type, [lr, count, *chain(*lists)], list(chain(*new)), **attributes)
        counted(b, count)

    return write


MOMENTA = {"alpha": 0.9, "beta": 0.8, "norm_coefficient": 0.01}
STEPS: Mapping[str, tuple[str, Callable[..., None], dict[str, Any]]] = {
    "SGDOptimizer": (MICROSOFT, sgd, {}),
    "AdamOptimizer": (MICROSOFT, adam, {"lambda": 0.1}),
    "AdamOptimizer1": (MICROSOFT, adam, {"lambda": 0.1, "weight_decay_mode": 1}),
    "LambOptimizer": (MICROSOFT, lamb, {"lambda": [0.1, 0.1, 0.1, 0.0, 0.0, 0.0]}),
    "AdamWOptimizer": (MICROSOFT, adamw, {}),
    "AdamWOptimizer1": (MICROSOFT, adamw, {"adam_mode": 1}),
    "SGDOptimizerV2": (MICROSOFT, sgd_v2, {}),
    "Adam": (PREVIEW, preview("Adam", 2), {"norm_coefficient": 0.01, "norm_coefficient_post": 0.001}),
    "Momentum": (PREVIEW, preview("Momentum", 1), {**MOMENTA, "mode": "standard"}),
    "Nesterov": (PREVIEW, preview("Momentum", 1), {**MOMENTA, "mode": "nesterov"}),
    "Adagrad": (PREVIEW, preview("Adagrad", 1), {"decay_factor": 0.1}),
}  # fmt: skip


def build(name: str, **options: Any) -> Builder:
    domain, write, attributes = STEPS[name]
    b, net = start(domain, **options)
    write(b, net, **attributes)
    return b


# --- harder ones ----------------------------------------------------------------------------------------------------


def finite(b: Builder, values: list[str]) -> str:
    """A signal: no element of the values is infinite or no number."""
    total = ""
    for value in values:
        part = b.op("ReduceSum", b.op("Mul", value, b.const(0.0)), keepdims=0)
        total = b.op("Add", total, part) if total else part
    return b.op("Not", b.op("IsNaN", total))


def norm(b: Builder, values: list[str]) -> str:
    squares = [b.op("ReduceSumSquare", value, keepdims=0) for value in values]
    return b.op("Sqrt", b.op("Sum", *squares))


def guarded(name: str) -> Builder:
    """A norm for the operator's own clip where it has one, and a signal that is off when a gradient is infinite."""
    domain, write, attributes = STEPS[name]
    b, net = start(domain)
    values = list(net.gradients.values())
    options: dict[str, Any] = {"signal": finite(b, values)}
    if name.startswith(("AdamO", "Lamb")):
        options["norm"] = norm(b, values)
        attributes = {**attributes, "max_norm_clip": [0.1] * 6 if name.startswith("Lamb") else 0.1}
    write(b, net, **options, **attributes)
    return b


def clipped(name: str) -> Builder:
    """A clip by the norm of all gradients, in standard operators in front of the optimizer."""
    domain, write, attributes = STEPS[name]
    b, net = start(domain)
    factor = b.op("Div", b.const(0.1), b.op("Max", norm(b, list(net.gradients.values())), b.const(0.1)))
    net.gradients.update({key: b.op("Mul", value, factor) for key, value in net.gradients.items()})
    write(b, net, **attributes)
    return b


def narrow() -> Builder:
    """Forward and backward read a float16 copy, which AdamOptimizer writes beside its float32 weight."""
    b = Builder()
    b.extra_domains.append(MICROSOFT)
    rows, columns = 6, 4
    x, y = b.input("x", (4, rows)), b.input("y", (4, columns))
    master = b.parameter("w", (rows, columns))
    half = b.state("w16", np.asarray(onnx.numpy_helper.to_array(b.stored[-1])).astype(np.float16))
    lr, count, scale = rate(b), counter(b), b.const([8.0])
    h, t = b.op("Cast", x, to=10), b.op("Cast", y, to=10)
    difference = b.op("Sub", b.op("MatMul", h, half), t)
    wide = b.op("Cast", difference, to=1)
    b.output("loss", b.op("ReduceMean", b.op("Mul", wide, wide), keepdims=0), ())
    delta = b.op("Mul", difference, b.const(8 * 2.0 / (4 * columns), "float16"))
    gradient = b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), delta)
    first, second = moments(b, "w", (rows, columns), 2)
    shape = (rows, columns)
    outputs = [
        shown(b, "step_out", (1,), "int64"), shown(b, "m0_out", shape), shown(b, "m1_out", shape),
        shown(b, "w_out", shape), "", shown(b, "w16_out", shape, "float16"),
    ]  # fmt: skip
    inputs = [lr, count, master, gradient, first, second, half, scale]
    node(b, MICROSOFT, "AdamOptimizer", inputs, outputs)
    return b


def deltas() -> Builder:
    """The operator gives the change alone; the graph adds it."""
    b, net = start(MICROSOFT)
    lr = rate(b)
    for name, shape in net.params.items():
        change = f"{name}.delta"
        node(b, MICROSOFT, "SGDOptimizer", [lr, name, net.gradients[name]], ["", change])
        b.output(f"{name}_out", b.op("Add", name, change), shape)
    return b


def groups() -> Builder:
    """Two AdamWOptimizer nodes: weights with decay and offsets without."""
    b, net = start(MICROSOFT)
    count, lr = counter(b), rate(b)
    for number, keys in enumerate((["w0", "w1", "w2"], ["b0", "b1", "b2"])):
        part = Network(b, {key: net.params[key] for key in keys}, net.gradients)
        tag = f"group{number}"
        names = list(part.params)
        states = [moments(b, name, shape, 2) for name, shape in part.params.items()]
        lists = [names, [net.gradients[n] for n in names], [s[0] for s in states], [s[1] for s in states]]
        new = [f"{tag}.{slot}" for slot in ("flag", "w", "m", "v")]
        inputs = [lr, count, *(b.op("SequenceConstruct", *each) for each in lists)]
        node(b, MICROSOFT, "AdamWOptimizer", inputs, new, weight_decay=0.1 * number)
        for place, name in enumerate(names):
            for slot, state in enumerate([name, *states[place]]):
                got = b.op("SequenceAt", new[1 + slot], b.const(place, "int64"))
                b.output(f"{state}_out", got, part.params[name])
    counted(b, count)
    return b


# --- functions of the model -----------------------------------------------------------------------------------------

MOMENTUM = """<domain: "own", opset_import: ["" : 20]>
step <share: float = 0.9>(w, g, m, lr, t) => (w1, m1, t1) {
  k = Constant <value_float: float = @share> ()
  km = Mul(k, m)
  m1 = Add(km, g)
  d = own.scaled(m1, lr)
  w1 = Sub(w, d)
  o = Constant <value_int: int = 1> ()
  t1 = Add(t, o)
}"""
SCALED = """<domain: "own", opset_import: ["" : 20]>
scaled (v, s) => (r) { q = Squeeze(s) r = Mul(v, q) }"""
ORTHOGONAL = """<domain: "own", opset_import: ["" : 20]>
step (w, g, m, lr, t) => (w1, m1, t1) {
  k = Constant <value_float: float = 0.9> ()
  km = Mul(k, m)
  m1 = Add(km, g)
  x = Transpose(m1)
  s = MatMul(m1, x)
  n = ReduceSumSquare <keepdims: int = 0>(m1)
  z = Div(s, n)
  y = MatMul(z, m1)
  q = Squeeze(lr)
  d = Mul(y, q)
  w1 = Sub(w, d)
  o = Constant <value_int: int = 1> ()
  t1 = Add(t, o)
}"""


def function(
    text: str = MOMENTUM, attributes: Mapping[str, Any] | None = None, *, counters: bool = True
) -> onnx.ModelProto:
    """The update of every weight is a call of a function that the file itself holds."""
    b, net = start("own", bias=text == MOMENTUM)
    lr = rate(b)
    for name, shape in net.params.items():
        (first,) = moments(b, name, shape, 1)
        count = counter(b, f"count.{name}")
        outputs = [
            shown(b, f"{name}_out", shape),
            shown(b, f"{first}_out", shape),
            shown(b, f"{count}_out", (1,), "int64"),
        ]
        node(b, "own", "step", [name, net.gradients[name], first, lr, count], outputs, **(attributes or {}))
    model = b.model()
    model.functions.append(onnx.parser.parse_function(text))
    model.functions.append(onnx.parser.parse_function(SCALED))
    for each in model.functions:
        each.opset_import.add(domain="own", version=1)
    return model


def models() -> dict[str, onnx.ModelProto]:
    """Every step of this file."""
    found = {name: build(name).model() for name in STEPS}
    signalled = ("AdamO", "AdamW", "Lamb", "SGDOptimizerV2")
    found |= {f"{name} guarded": guarded(name).model() for name in STEPS if name.startswith(signalled)}
    in_front = ("SGDOptimizer", "AdamWOptimizer", "Adam", "LambOptimizer")
    found |= {f"{name} clipped": clipped(name).model() for name in in_front}
    found |= {"narrow": narrow().model(), "deltas": deltas().model(), "groups": groups().model()}
    found |= {"function": function(), "function share": function(attributes={"share": 0.5})}
    return found | {"orthogonal": function(ORTHOGONAL)}


def sgd_plain(b: Builder, net: Network) -> None:
    """The same update in standard operators."""
    lr = b.op("Squeeze", rate(b))
    for name, shape in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", lr, net.gradients[name])), shape)
