"""Updates in another layout than their parameter's are brought into it, and nothing else is moved."""

from __future__ import annotations

import onnx
import pytest
from helpers import FIXTURES, NAMES, Builder, perceptron
from onnx import helper

import gopt
from gopt.analysis.reshapes import in_parameter_shape
from gopt.ir.load import load
from gopt.offline.merge import merge
from gopt.verification.verify import Verifier


def shape(b: Builder, *dims: int) -> str:
    return b.const(dims, "int64")


def clipped(b: Builder, flat: list[str]) -> list[str]:
    """Flat gradients under one norm, over their own norms."""
    norms = [b.op("Reshape", b.op("ReduceL2", g, keepdims=0), shape(b, 1)) for g in flat]
    total = b.op("ReduceL2", b.op("Concat", *norms, axis=0), keepdims=0)
    factor = b.op("Min", b.const(1.0), b.op("Div", b.const(0.05), total))
    return [b.op("Mul", g, factor) for g in flat]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("partition", ["flat", "rows"])
def test_a_clip_over_flat_gradients_is_split(ranks, partition, tmp_path):
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    flat = clipped(b, [b.op("Reshape", g, shape(b, -1)) for g in net.gradients.values()])
    b.output("loss", net.loss, ())
    for (name, dims), gradient in zip(net.params.items(), flat):
        back = b.op("Reshape", gradient, shape(b, *dims))
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", back, b.const(0.1))), dims)
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == net.gradients
    report = gopt.shard(source, ranks, partition=partition).write(tmp_path / "out").to_json()
    shard = next(each for each in report["pipeline"] if each["name"] == "shard")
    assert shard["facts"]["parameters"] == {"split": 4}
    assert Verifier(tmp_path / "out").run(steps=2).equal
    known = {node.label for node in load(tmp_path / "step.onnx").nodes}
    assert {name for each in report["removed_ops"] for row in each["rows"] for name in row["names"]} <= known


def test_a_gradient_that_is_clipped_before_it_has_its_shape(tmp_path):
    """A parameter of two rows is used flat, and its gradient clipped before it gets two rows again."""
    b = Builder()
    x, w = b.input("x", (3, 4)), b.parameter("w", (2, 2))
    rest = b.op("Sub", b.op("Reshape", w, shape(b, 4)), x)
    b.output("loss", b.op("ReduceMean", b.op("Mul", rest, rest), keepdims=0), ())
    flat = b.op("ReduceSum", b.op("Mul", rest, b.const(2 / 12)), shape(b, 0), keepdims=0)
    back = b.op("Reshape", b.op("Clip", flat, b.const(-0.1), b.const(0.1)), shape(b, 2, 2))
    b.output("w_out", b.op("Sub", "w", b.op("Mul", back, b.const(0.1))), (2, 2))
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == {"w": f"gopt.load.{flat}"}
    gopt.shard(source, 3).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).exit_code == 0
    merge(tmp_path / "out", tmp_path / "merged.onnx")
    assert gopt.load(tmp_path / "merged.onnx").training.gradients == source.training.gradients


@pytest.mark.parametrize("made", ["summed", "clipped", "decayed"])
def test_a_flat_moment_leaves_its_gradient_in_the_shape_of_the_parameter(made, tmp_path):
    """Two layers read a weight, so that its gradient is a sum; behind the moment stands the parameter of its shape."""
    b = Builder()
    fed, weight = [b.input(name, (4, 3)) for name in ("x", "z")], b.parameter("w", (3, 5))
    out = b.op("Add", *(b.op("MatMul", each, weight) for each in fed))
    back = b.op("Mul", out, b.const(2 / 20))
    gradient = b.op("Add", *(b.op("MatMul", b.op("Transpose", each, perm=[1, 0]), back) for each in fed))
    way = gradient
    if made == "clipped":
        way = b.op("Clip", gradient, b.const(-0.1), b.const(0.1))
    elif made == "decayed":
        way = b.op("Add", gradient, b.op("Mul", weight, b.const(0.01)))
    b.parameter("moment", (15,))
    moment = b.op("Add", b.op("Mul", "moment", b.const(0.9)), b.op("Reshape", way, shape(b, -1)))
    b.output("loss", b.op("ReduceMean", b.op("Mul", out, out), keepdims=0), ())
    b.output("moment_out", moment, (15,))
    b.output("w_out", b.op("Sub", weight, b.op("Reshape", moment, shape(b, 3, 5))), (3, 5))
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == {weight: gradient}
    gopt.shard(source, 3).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).exit_code == 0


def branch(value: float) -> onnx.GraphProto:
    constant = helper.make_node("Constant", [], ["chosen"], value_float=value)
    return helper.make_graph([constant], "branch", [], [helper.make_tensor_value_info("chosen", 1, ())])


def test_the_kept_source_has_the_types_of_its_own_nodes(tmp_path):
    """A step with an If keeps all types: of what is moved here those of the file, or no reader takes it."""
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    flat = clipped(b, [b.op("Reshape", g, shape(b, -1)) for g in net.gradients.values()])
    b.output("loss", net.loss, ())
    rate = b.op(
        "If", b.op("Greater", b.input("lr", ()), b.const(0.5)), then_branch=branch(0.1), else_branch=branch(0.2)
    )
    for (name, dims), gradient in zip(net.params.items(), flat):
        back = b.op("Reshape", gradient, shape(b, *dims))
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", back, rate)), dims)
    gopt.shard(b.save(tmp_path / "step.onnx"), 2).write(tmp_path / "out")
    onnx.checker.check_model(onnx.load(tmp_path / "out" / "source.onnx"), full_check=True)
    assert Verifier(tmp_path / "out").run(steps=2).exit_code == 0
    merge(tmp_path / "out", tmp_path / "merged.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "merged.onnx"), full_check=True)


def with_flat_update(b: Builder, beside: str) -> None:
    """An update whose last product is flat; ``beside``: what else is done with it."""
    net = perceptron(b, (3, 5), bias=False)
    flat = b.op("Reshape", net.gradients["w0"], shape(b, -1))
    scaled = b.op("Mul", flat, b.const(0.1))
    b.output("loss", net.loss, ())
    if beside == "an output":
        b.output("shown", scaled, (15,))
    elif beside == "a sum over rows":
        b.output("shown", b.op("ReduceSum", scaled, shape(b, 0), keepdims=1), (1,))
    elif beside == "a flat state":
        scaled = b.op("Add", scaled, b.input("m", (15,)))
        b.output("m_out", scaled, (15,))
    elif beside == "a factor of more dimensions":
        scaled = b.op("Reshape", b.op("Mul", scaled, b.op("Reshape", b.const(0.5), shape(b, 1, 1, 1))), shape(b, 15))
    elif beside == "another order":
        scaled = b.op("Mul", b.op("CumSum", scaled, b.const(0, "int64")), b.const(2.0))
    b.output("w0_out", b.op("Sub", "w0", b.op("Reshape", scaled, shape(b, 3, 5))), (3, 5))


@pytest.mark.parametrize(
    "beside", ["an output", "a sum over rows", "a flat state", "a factor of more dimensions", "another order"]
)
def test_what_is_read_flat_stays_flat(beside, tmp_path):
    b = Builder()
    with_flat_update(b, beside)
    graph = load(b.save(tmp_path / "step.onnx"))
    moved = in_parameter_shape(graph)
    if beside in ("an output", "a flat state", "another order"):
        flat = [name for name, type in graph.types.items() if type.shape == (15,)]
        assert all(moved.types[name] == graph.types[name] for name in flat if name in graph.outputs)
    source = gopt.load(tmp_path / "step.onnx")
    gopt.shard(source, 3).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


def test_an_update_that_reads_a_flat_input_stays_flat(tmp_path):
    """The file holds the input flat: to move it would cost a Reshape of its own."""
    b = Builder()
    net = perceptron(b, (3, 5), bias=False)
    flat = b.op("Mul", b.op("Reshape", net.gradients["w0"], shape(b, -1)), b.input("factors", (15,)))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Reshape", flat, shape(b, 3, 5))), (3, 5))
    graph = load(b.save(tmp_path / "step.onnx"))
    assert in_parameter_shape(graph) is graph


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("reads", ["turned", "summed"])
def test_what_a_function_reads_keeps_its_shape(reads, stage, tmp_path):
    """The call is written as the file has it: it would turn what was turned before it."""
    b = Builder()
    net = perceptron(b, (6, 1), bias=False)
    row = b.op("Mul", b.op("Transpose", net.gradients["w0"], perm=[1, 0]), b.const(0.5))
    body = [helper.make_node("Transpose", ["g"], ["turned"], perm=[1, 0])]
    if reads == "summed":
        body.append(helper.make_node("ReduceL2", ["g"], ["norm"], keepdims=0))
        body.append(helper.make_node("Div", ["turned", "norm"], ["step"]))
    body.append(helper.make_node("Sub", ["w", body[-1].output[0]], ["out"]))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Update", "w0", row, domain="own"), (6, 1))
    model = b.model()
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.append(helper.make_function("own", "Update", ["w", "g"], ["out"], body, model.opset_import[:1]))
    onnx.save(model, tmp_path / "step.onnx")
    gopt.shard(gopt.load(tmp_path / "step.onnx"), 2, stage=stage).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


@pytest.mark.parametrize("name", NAMES)
def test_fixtures_in_their_own_layout_are_left_alone(name):
    graph = load(FIXTURES / f"{name}.onnx")
    assert in_parameter_shape(graph) is graph


def test_a_squeeze_behind_the_move_is_an_identity(tmp_path):
    """A bias's gradient of one row, scaled and squeezed; what the squeeze makes feeds a norm as well."""
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    b.output("loss", net.loss, ())
    for name, dims in net.params.items():
        gradient = net.gradients[name]
        if len(dims) == 1:
            row = b.op("Unsqueeze", gradient, shape(b, 0))
            transposed = b.op("Transpose", b.op("Mul", row, b.const(0.5)), perm=[1, 0])
            gradient = b.op("Squeeze", transposed, shape(b, 1))
            b.output(f"{name}_norm", b.op("ReduceL2", gradient, keepdims=0), ())
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, b.const(0.1))), dims)
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    report = gopt.shard(source, 3).write(tmp_path / "out").to_json()
    assert next(e for e in report["pipeline"] if e["name"] == "shard")["facts"]["parameters"] == {"split": 4}
    assert Verifier(tmp_path / "out").run(steps=2).exit_code == 0
