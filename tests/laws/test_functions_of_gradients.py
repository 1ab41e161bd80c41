"""A step that hands a gradient through one use of one operator before the update: ranks equal the source by numbers.

The function is that of the mean over ranks, whatever gopt takes the operator for; two ranks have different batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper
from operator_forms import Case, forms
from products import part
from written_steps import NET, Written, hold_ranks, sgd

from gopt.operators.operator import Slope
from gopt.operators.table import OPERATORS, operator

WRITTEN = Written(
    NET + "  z = Identity(gw0)\n" + sgd(("b0", "w1", "b1")) + "  s_w0 = Mul(z, lr)\n  w0_out = Sub(w0, s_w0)"
)
SIZE = 15
"""Elements of the gradient of ``w0``."""


def uses(op_type: str) -> Iterator[tuple[Case, int]]:
    """Uses that onnxruntime runs and onnx's checker takes, each with an operand of floats that its result follows."""
    since = {"GroupNormalization": 21, "Dropout": 99}.get(op_type, 13)  # 18 is withdrawn; a drawn update is refused
    slope = operator(op_type).slope
    for each in forms(op_type):
        unwritten = op_type == "MeanVarianceNormalization" and not each.attributes  # the checker forgets its axes
        for place, value in enumerate(each.inputs) if each.runtime and each.opset >= since and not unwritten else ():
            if slope(place) and value is not None and value.dtype == np.float32 and value.size:
                yield each, place


def through(op_type: str, use: Case, place: int) -> ModelProto:
    """The written step, with the use of an operator between the gradient of ``w0`` and its update."""
    model, made = WRITTEN.model(), []
    graph = model.graph
    model.opset_import[0].version = max(use.opset, 13)

    def const(name: str, value: object) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), f"u_{name}"))
        return f"u_{name}"

    def node(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        made.append(helper.make_node(kind, inputs, [f"u_{output}"], name=f"u_{output}", **attributes))
        return f"u_{output}"

    value = use.inputs[place]
    flat = node("Reshape", ["gw0", const("all", np.array([-1]))], "flat")
    some = node("Gather", [flat, const("some", np.arange(value.size) % SIZE)], "chosen")
    at = node("Reshape", [some, const("shape", np.array(value.shape, np.int64))], "shaped")
    if operator(op_type).slope(place) is not Slope.LINEAR:  # near numbers at which the function is defined
        at = node("Add", [node("Mul", [at, const("small", np.float32(0.02))], "moved"), const("base", value)], "near")
    names = [
        at if n == place else const(f"x{n}", each) if each is not None else "" for n, each in enumerate(use.inputs)
    ]
    outputs = ["u_y", *(f"u_y{n}" for n in range(1, use.results))]
    made.append(helper.make_node(op_type, names, outputs, name="u_node", **use.attributes))
    result = node("Cast", ["u_y"], "floats", to=onnx.TensorProto.FLOAT)
    result = node("Reshape", [result, "u_all"], "result")
    count = node("Size", [result], "count")
    index = node("Mod", [const("places", np.arange(SIZE)), count], "index")
    taken = node("Gather", [result, index], "taken")
    at = next(n for n, each in enumerate(graph.node) if each.output[0] == "z")
    part = node("Reshape", [taken, const("back", np.array([3, 5]))], "part")
    made.append(helper.make_node("Add", ["gw0", part], ["z"], name="z"))
    nodes = [*graph.node[:at], *made, *graph.node[at + 1 :]]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


@dataclass(frozen=True)
class Through(Written):
    """The written step with a use of an operator in it, as ``made``."""

    made: ModelProto = field(default_factory=ModelProto)

    def model(self) -> ModelProto:
        return self.made


def hold(op_type: str, use: Case, place: int, folder: Path, stage: int) -> None:
    folder.mkdir()
    hold_ranks(Through(WRITTEN.body, made=through(op_type, use, place)), folder, 2, stage)


USED = sorted(each for each in OPERATORS if any(True for _ in uses(each)))


@pytest.mark.parametrize("op_type", part(USED, 50))
def test_a_function_of_a_gradient_is_that_of_the_mean(op_type: str, tmp_path: Path) -> None:
    hold(op_type, *next(uses(op_type)), tmp_path / "step", 2)


@pytest.mark.slow
@pytest.mark.parametrize("op_type", USED)
def test_every_use_of_an_operator_is_that_of_the_mean(op_type: str, tmp_path: Path) -> None:
    for number, (use, place) in enumerate(uses(op_type)):
        hold(op_type, use, place, tmp_path / str(number), (2, 0, 3)[number % 3])


def test_all_operators_of_numbers_are_tried():
    of_numbers = {each for each, record in OPERATORS.items() if record.slope(0)}
    assert len(USED) > 100 and len(of_numbers - set(USED)) < 12, of_numbers - set(USED)
