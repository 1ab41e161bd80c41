"""Training steps whose update is done by opaque operators: the perceptron of ``helpers`` with every optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
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
        node(b, PREVIEW, op_type, [lr, count, *sum(lists, [])], sum(new, []), **attributes)
        counted(b, count)

    return write


STEPS: Mapping[str, tuple[str, Callable[..., None], dict[str, Any]]] = {
    "SGDOptimizer": (MICROSOFT, sgd, {}),
    "AdamOptimizer": (MICROSOFT, adam, {"lambda": 0.1}),
    "AdamOptimizer1": (MICROSOFT, adam, {"lambda": 0.1, "weight_decay_mode": 1}),
    "LambOptimizer": (MICROSOFT, lamb, {"lambda": [0.1, 0.1, 0.1, 0.0, 0.0, 0.0]}),
    "AdamWOptimizer": (MICROSOFT, adamw, {}),
    "AdamWOptimizer1": (MICROSOFT, adamw, {"adam_mode": 1}),
    "SGDOptimizerV2": (MICROSOFT, sgd_v2, {}),
    "Adam": (PREVIEW, preview("Adam", 2), {"norm_coefficient": 0.01, "norm_coefficient_post": 0.001}),
    "Momentum": (PREVIEW, preview("Momentum", 1), {"alpha": 0.9, "beta": 0.8, "mode": "standard", "norm_coefficient": 0.01}),
    "Nesterov": (PREVIEW, preview("Momentum", 1), {"alpha": 0.9, "beta": 0.8, "mode": "nesterov", "norm_coefficient": 0.0}),
    "Adagrad": (PREVIEW, preview("Adagrad", 1), {"decay_factor": 0.1}),
}  # fmt: skip


def build(name: str, **options: Any) -> Builder:
    domain, write, attributes = STEPS[name]
    b, net = start(domain, **options)
    write(b, net, **attributes)
    return b
