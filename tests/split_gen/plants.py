"""Errors to plant in a written split: each makes another step of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper
from rank_files import attributes

from split_gen.judge import Setting

Edit = Callable[[Path], None]
KEY = Setting(2, 3, minimum=16, pull="end")


def on(pattern: str, edit: Callable[[ModelProto], None]) -> Edit:
    """Edit the files that match a pattern."""

    def run(folder: Path) -> None:
        for path in sorted(folder.glob(pattern)):
            model = onnx.load(path)
            edit(model)
            onnx.save(model, path)

    return run


def manifest(edit: Callable[[dict[str, Any]], None]) -> Edit:
    def run(folder: Path) -> None:
        path = folder / "manifest.json"
        found = json.loads(path.read_text())
        edit(found)
        path.write_text(json.dumps(found))

    return run


def states(model: ModelProto) -> list[str]:
    """Inputs of a server that are pieces, the largest first."""
    sizes = {each.name: len(each.raw_data) for each in model.graph.initializer}
    held = [each.name for each in model.graph.input if each.name in sizes]
    return sorted(held, key=lambda name: (-sizes[name], name))


def maker(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def message(model: ModelProto, op_type: str) -> NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def set_attribute(node: NodeProto, name: str, value: Any) -> None:
    (old,) = (each for each in node.attribute if each.name == name)
    old.CopyFrom(helper.make_attribute(name, value))


# --- what is planted ------------------------------------------------------------------------------------------------


def update_dropped(model: ModelProto) -> None:
    """A new value is the old one."""
    name = next(each for each in states(model) if each.endswith("parameter"))
    node = maker(model, f"{name}_out")
    node.CopyFrom(helper.make_node("Identity", [name], [f"{name}_out"]))


def states_swapped(model: ModelProto) -> None:
    """Both moments of a key in each other's place in the graph."""
    one, other = (next(n for n in states(model) if n.endswith(f"state{place}")) for place in (1, 2))
    other = other if other.startswith(one[:-1]) else f"{one[:-1]}2"
    swap = {one: other, other: one}
    for node in model.graph.node:
        node.input[:] = [swap.get(name, name) for name in node.input]


def start_values_swapped(model: ModelProto) -> None:
    one, other = [name for name in states(model) if name.endswith("parameter")][:1] * 2
    other = f"{one.removesuffix('parameter')}state1"
    found = {each.name: each for each in model.graph.initializer}
    found[one].name, found[other].name = other, one


def summed_instead_of_mean(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Aggregate":
            set_attribute(node, "reduce", "sum")


def a_little_less(model: ModelProto) -> None:
    """A constant of the update off by one part in 10^6."""
    used = [node for node in model.graph.node if node.op_type == "Mul" and "gradient" in node.input[0]]
    (old,) = (each for each in model.graph.initializer if each.name == used[0].input[1])
    value = numpy_helper.to_array(old)
    old.CopyFrom(numpy_helper.from_array(np.asarray(value * np.float32(1.000001)), old.name))


def gradient_of_another_key(model: ModelProto) -> None:
    """Two pieces of equal size of one push in each other's place."""
    node = message(model, "Push")
    one, other = _alike(model, list(node.input[2:]))
    swap = {one: other, other: one}
    node.input[2:] = [swap.get(name, name) for name in node.input[2:]]


def slice_of_other_rows(model: ModelProto) -> None:
    """A piece from the row above."""
    node = next(node for node in model.graph.node if node.op_type == "Slice" and node.output[0].startswith("gopt."))
    first = next(other for other in model.graph.node if other.op_type == "Slice" and other.input[0] == node.input[0])
    node.input[1:3] = first.input[1:3]
    if node is first:
        node.op_type = "Slice"
        second = [o for o in model.graph.node if o.op_type == "Slice" and o.input[0] == node.input[0]][1]
        second.input[1:3] = node.input[1:3]


def stale_parameters(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Pull":
            set_attribute(node, "version", "before")


def pieces_joined_in_another_order(model: ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Concat" and len(node.input) > 1)
    node.input[:] = list(node.input)[::-1]


def pushed_to_another_server(model: ModelProto) -> None:
    node = message(model, "Push")
    set_attribute(node, "server", (attributes(node)["server"] + 1) % 3)


def pushed_twice(model: ModelProto) -> None:
    node = message(model, "Push")
    second = NodeProto.FromString(node.SerializeToString())
    second.output[:] = ["again"]
    model.graph.node.insert(list(model.graph.node).index(node) + 1, second)


def never_pushed(model: ModelProto) -> None:
    node = message(model, "Push")
    node.CopyFrom(helper.make_node("Identity", [node.input[0]], list(node.output)))


def counter_stands(model: ModelProto) -> None:
    node = maker(model, "step_out")
    node.CopyFrom(helper.make_node("Identity", ["step"], ["step_out"]))


def reduction_dropped(model: ModelProto) -> None:
    """Each server takes its own part of the norm for the whole."""
    node = message(model, "AllReduce")
    place = list(model.graph.node).index(node)
    own = [helper.make_node("Identity", [a], [b]) for a, b in zip(node.input, node.output)]
    nodes = [*list(model.graph.node)[:place], *own, *list(model.graph.node)[place + 1 :]]
    kept = [NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _alike(model: ModelProto, names: list[str]) -> tuple[str, str]:
    rows: dict[tuple[str, ...], str] = {}
    for name in names:
        node = maker(model, name)
        if node.op_type != "Slice":
            continue
        kind = (node.input[1], node.input[2])
        if kind in rows:
            return rows[kind], name
        rows[kind] = name
    # none of one kind: what follows is then refused for its sizes
    return names[0], names[1]


def shifted(found: dict[str, Any]) -> None:
    """A piece of a server said to lie one element further."""
    state = next(each for rank in found["ranks"] for each in rank["state"] if len(each["pieces"][0]) and
                 each["pieces"][0]["stop"] > 1 and not each.get("copy"))  # fmt: skip
    state["pieces"][0]["start"] += 1
    state["pieces"][0]["stop"] += 1


def owners_swapped(found: dict[str, Any]) -> None:
    """Keys of two servers named in each other's place."""
    keys = found["parameter_server"]["keys"]
    one, other = keys[0], next(key for key in keys if key["server"] != keys[0]["server"])
    one["server"], other["server"] = other["server"], one["server"]


PLANTS: dict[str, Edit] = {
    "an update is dropped": on("server_0000.onnx", update_dropped),
    "states are swapped": on("server_0000.onnx", states_swapped),
    "start values are swapped": on("server_0000.onnx", start_values_swapped),
    "sum for mean": on("server_*.onnx", summed_instead_of_mean),
    "sum for mean on one server": on("server_0001.onnx", summed_instead_of_mean),
    "a constant is a little off": on("server_0002.onnx", a_little_less),
    "gradients are swapped": on("trainer.onnx", gradient_of_another_key),
    "a slice of other rows": on("trainer.onnx", slice_of_other_rows),
    "parameters are stale": on("trainer.onnx", stale_parameters),
    "pieces in another order": on("trainer.onnx", pieces_joined_in_another_order),
    "another server": on("trainer.onnx", pushed_to_another_server),
    "pushed twice": on("trainer.onnx", pushed_twice),
    "never pushed": on("trainer.onnx", never_pushed),
    "a counter stands on one server": on("server_0001.onnx", counter_stands),
    "a counter stands on all": on("server_*.onnx", counter_stands),
    "a piece is shifted": manifest(shifted),
    "owners are swapped": manifest(owners_swapped),
}
