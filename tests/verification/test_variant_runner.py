"""Outputs that replace no state: metrics of a batch, and of the update, are compared like losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, Builder, calls, edit_rank, edit_ranks, perceptron, sgd
from onnx import ModelProto, NodeProto, helper
from plants import replace
from products import part
from verification.proof.test_proof_prove import NAMES, SETS

import gopt
from gopt.analysis.training import Phase
from gopt.verification.result import Outcome, Verification
from gopt.verification.verify import Verifier

Edit = Callable[[ModelProto], None]


def step(folder: Path, *arguments: str) -> Path:
    """A perceptron that shows a norm of its gradients, the product of norm and loss, and how many results are large."""
    b = Builder()
    net = perceptron(b)
    sgd(b, net)
    squares = [b.op("ReduceSumSquare", name, keepdims=0) for name in net.gradients.values()]
    norm = b.op("Sqrt", b.op("Sum", *squares))
    b.output("norm", norm, ())
    if "--accumulate" not in arguments:
        b.output("product", b.op("Mul", norm, net.loss), ())
    large = b.op("Cast", b.op("Greater", net.loss, b.const(0.5)), to=onnx.TensorProto.INT64)
    b.output("large", large, (), "int64")
    b.save(folder / "step.onnx")
    assert main(["shard", str(folder / "step.onnx"), *arguments, "-o", str(folder / "out"), "-q"]) == 0
    return folder / "out"


def run(out: Path) -> Verification:
    return Verifier(out).run(confirm=False)


def failing(result: Verification) -> set[tuple[str, str]]:
    return {(failure.worst.kind, failure.worst.name) for failure in result.failing()}


@pytest.mark.parametrize("kind", SETS)
def test_metrics_of_right_ranks_are_equal(kind, tmp_path):
    result = run(step(tmp_path, *SETS[kind]))
    assert not failing(result), result.failing()
    assert result.outcome is Outcome.EQUAL, list(result.open())


def _shares(model: ModelProto) -> None:
    for node in calls(model, "AllReduce"):
        if any("share" in name for name in node.input):
            replace(model, node, [helper.make_node("Identity", [a], [b]) for a, b in zip(node.input, node.output)])


def _moved(output: str, op_type: str, *operands: float) -> Edit:
    """An edit of the node that makes an output: an operator behind it."""

    def edit(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if output in node.output)
        before, type = f"{output}.before", next(value.type for value in model.graph.output if value.name == output)
        more = [f"{output}.{place}" for place, _ in enumerate(operands)]
        for name, value in zip(more, operands):
            dtype = helper.tensor_dtype_to_np_dtype(type.tensor_type.elem_type)
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, dtype), name))
        new = NodeProto()
        new.CopyFrom(node)
        new.output[list(new.output).index(output)] = before
        model.graph.value_info.add(name=before).type.CopyFrom(type)
        replace(model, node, [new, helper.make_node(op_type, [before, *more], [output])])

    return edit


PLANTS: dict[str, tuple[list[str], Edit, str]] = {
    "a norm of a rank's shares": (["--ranks", "2"], _shares, "norm"),
    "a factor of a norm": (["--ranks", "2", "--stage", "1"], _moved("norm", "Mul", 1.01), "norm"),
    "a term of a count": (["--mesh", "dp=2,shard=2"], _moved("large", "Add", 1), "large"),
    "a sign of a product": (["--ranks", "2", "--stage", "0"], _moved("product", "Neg"), "product"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_wrong_metric_is_different(plant, tmp_path):
    arguments, edit, name = PLANTS[plant]
    out = step(tmp_path, *arguments)
    edit_ranks(out, edit)
    assert ("metric", name) in failing(run(out))


def test_a_metric_is_compared_on_every_rank(tmp_path):
    out = step(tmp_path, "--ranks", "3")
    edit_rank(out, 2, _moved("large", "Add", 1))
    result = run(out)
    assert failing(result) == {("metric", "large")} and result.failing()[0].worst.rank == 2


def test_a_metric_that_is_never_a_number_is_not_confirmed(tmp_path):
    b = Builder()
    net = perceptron(b)
    sgd(b, net)
    b.output("root", b.op("Sqrt", b.op("Sub", b.const(-1.0), b.op("Abs", net.loss))), ())
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2).write(tmp_path / "out")
    result = run(tmp_path / "out")
    assert [doubt.name for doubt in result.open()] == ["root"]
    assert result.outcome is Outcome.UNCONFIRMED
    edit_rank(tmp_path / "out", 1, _moved("root", "Pow", 0.0))
    assert failing(run(tmp_path / "out")) == {("metric", "root")}


# --- fixtures ---------------------------------------------------------------------------------------------------------


def with_metrics(name: str, alone: bool) -> ModelProto:
    """A fixture that shows the norm of its gradients, a count of positive elements of one, its loss squared, a share of
    positive elements of a product of the forward and, if a step has one batch ``alone``, norm times loss."""
    path = FIXTURES / f"{name}.onnx"
    training, model = gopt.load(path).training, onnx.load(path)
    graph, outputs = model.graph, {name for node in model.graph.node for name in node.output}

    def op(op_type: str, *inputs: str, **attributes: object) -> str:
        graph.node.append(helper.make_node(op_type, inputs, [f"shown.{len(graph.node)}"], **attributes))
        return str(graph.node[-1].output[0])

    def show(value: str, type: int = onnx.TensorProto.FLOAT) -> None:
        graph.output.append(helper.make_tensor_value_info(value, type, []))

    def wide(value: str) -> str:
        return op("Cast", value, to=onnx.TensorProto.FLOAT)

    def positive(value: str, to: int) -> str:
        return op("Cast", op("Greater", value, op("Constant", value_float=0.0)), to=to)

    gradients = [wide(value) for value in dict.fromkeys(training.gradients.values())]
    norm = op("Sqrt", op("Sum", *(op("ReduceSumSquare", value, keepdims=0) for value in gradients)))
    loss = op("Reshape", wide(training.loss), op("Constant", value=onnx.numpy_helper.from_array(np.zeros(0, np.int64))))
    show(norm)
    show(op("ReduceSum", positive(gradients[0], onnx.TensorProto.INT64), keepdims=0), onnx.TensorProto.INT64)
    show(op("Mul", loss, loss))
    for node in training.graph.nodes:
        if node.phase is Phase.FORWARD and node.op_type in ("MatMul", "Gemm", "Conv") and node.outputs[0] in outputs:
            show(op("ReduceMean", positive(wide(node.outputs[0]), onnx.TensorProto.FLOAT), keepdims=0))
            break
    if alone:
        show(op("Mul", loss, norm))
    return model


@pytest.mark.parametrize(("name", "kind"), part([(n, k) for n in NAMES for k in SETS], 20))
def test_metrics_of_a_fixture_are_equal(name, kind, tmp_path, capsys):
    try:
        model = with_metrics(name, "--accumulate" not in SETS[kind])
    except gopt.GoptError:
        pytest.skip("no step")
    onnx.save(model, tmp_path / "step.onnx")
    if main(["shard", str(tmp_path / "step.onnx"), *SETS[kind], "-o", str(tmp_path / "out"), "-q"]):
        pytest.skip("gopt shard refuses it")
    result = run(tmp_path / "out")
    assert not any(kind == "metric" for kind, _ in failing(result)), result.failing()
