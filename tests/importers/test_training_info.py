"""Steps in ``training_info``: flattened, differentiated, sharded, verified; broken bindings are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from onnx import ModelProto, TensorProto, helper, numpy_helper

import gopt
from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.runtime.reference_eval import evaluate

PREVIEW = "ai.onnx.preview.training"
RANDOM = np.random.default_rng(7)
W = RANDOM.standard_normal((4, 3)).astype(np.float32)
B = RANDOM.standard_normal(3).astype(np.float32)


def model_of(optimizer: str = "sgd") -> ModelProto:
    """An inference graph x w + b; its algorithm has a loss, a Gradient and the update."""
    inference = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["y"])],
        "inference",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 3])],
        [numpy_helper.from_array(W, "w"), numpy_helper.from_array(B, "b")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(PREVIEW, 1)]
    model = helper.make_model(inference, opset_imports=opsets, ir_version=10)
    info = model.training_info.add()
    nodes = [
        helper.make_node("Sub", ["y", "target"], ["apart"]),
        helper.make_node("Mul", ["apart", "apart"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0),
        helper.make_node("Gradient", ["w", "b", "x", "target"], ["dw", "db"], domain=PREVIEW, xs=["w", "b"],
                         zs=["x", "target"], y="loss"),
    ]  # fmt: skip
    stored = []
    if optimizer == "sgd":
        for name in "wb":
            nodes += [
                helper.make_node("Mul", ["lr", f"d{name}"], [f"m{name}"]),
                helper.make_node("Sub", [name, f"m{name}"], [f"{name}_new"]),
            ]
    else:
        states = ["v_w", "v_b", "h_w", "h_b"]
        made = ["w_new", "b_new", *(f"{each}_new" for each in states)]
        nodes.append(
            helper.make_node("Adam", ["lr", "count", "w", "b", "dw", "db", *states], made, domain=PREVIEW, alpha=0.9,
                             beta=0.99, epsilon=1e-6)
        )  # fmt: skip
        nodes.append(helper.make_node("Add", ["count", "one"], ["count_new"]))
        shapes = {"v_w": W, "v_b": B, "h_w": W, "h_b": B}
        stored = [numpy_helper.from_array(np.zeros_like(each), name) for name, each in shapes.items()]
        stored += [numpy_helper.from_array(np.array(1, np.int64), name) for name in ("count", "one")]
        for name in ("count", *states):
            info.update_binding.add(key=name, value=f"{name}_new")
    for name in "wb":
        info.update_binding.add(key=name, value=f"{name}_new")
    info.algorithm.CopyFrom(
        helper.make_graph(
            nodes, "algorithm",
            [helper.make_tensor_value_info("target", TensorProto.FLOAT, [6, 3]),
             helper.make_tensor_value_info("lr", TensorProto.FLOAT, [])],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])], stored,
        )
    )  # fmt: skip
    return model


def saved(model: ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_a_step_is_flattened_and_differentiated(tmp_path: Path):
    training = gopt.load(saved(model_of(), tmp_path)).training
    assert training.loss == "loss"
    assert set(training.gradients) == {"w", "b"}
    assert sorted(training.batch) == ["target", "x"]
    assert any("training_info" in note for note in training.notes)
    x, target = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (6, 3)))
    found = evaluate(training.graph, {"x": x, "target": target, "lr": np.float32(0.5)})
    apart = 2 * (x @ W + B - target) / 18
    np.testing.assert_allclose(found["w_new"], W - 0.5 * x.T @ apart, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["b_new"], B - 0.5 * apart.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["y"], x @ W + B, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_shards_and_verifies(tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]):
    path, ranks = saved(model_of(optimizer), tmp_path), tmp_path / "ranks"
    assert main(["shard", str(path), "--ranks", "2", "-o", str(ranks)]) == 0
    assert "read from training_info" in "".join(capsys.readouterr())
    assert gopt.verify(ranks).equal
    states = {state.tensor for state in gopt.load(path).training.states}
    assert states == {"w", "b"} if optimizer == "sgd" else states == {"w", "b", "v_w", "v_b", "h_w", "h_b", "count"}


def _binding(key: str, value: str, place: int = 0) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        entry = model.training_info[0].update_binding[place]
        entry.key, entry.value = key, value

    return edit


def _gradient(**changes: list[str] | str) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        node = next(each for each in model.training_info[0].algorithm.node if each.op_type == "Gradient")
        for name, value in changes.items():
            if name == "inputs":
                node.input[:] = value
                continue
            kept = [each for each in node.attribute if each.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return edit


def _initializes(key: str, value: str) -> Callable[[ModelProto], None]:
    return lambda model: model.training_info[0].initialization_binding.extend(
        [onnx.StringStringEntryProto(key=key, value=value)]
    )


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (_binding("v", "w_new"), InputError, "update_binding replaces 'v', which is no initializer"),
        (_binding("w", "v_new"), InputError, "replaces 'w' by 'v_new', which nothing makes"),
        (_binding("b", "w_new"), InputError, "replaces 'b' twice"),
        (_initializes("v", "first"), InputError, "initialization_binding sets 'v', which is no initializer"),
        (_initializes("w", "first"), InputError, "sets 'w' to 'first', which is no output of its graph"),
        (lambda model: model.training_info.add(), UnsupportedError, "training_info holds 2 training steps"),
        (lambda model: model.training_info[0].ClearField("update_binding"), UnsupportedError, "binding is empty"),
        (_gradient(y="los"), InputError, "names 'los' as y, which no node makes"),
        (_gradient(inputs=["b", "w", "x", "target"]), UnsupportedError, "a gradient at other values"),
        (_gradient(xs=["w", "xw"], inputs=["w", "xw", "x", "target"]), UnsupportedError, "by 'xw', which is computed"),
        (_gradient(xs=["w", "lr"], inputs=["w", "lr", "x", "target"]), UnsupportedError, "by 'lr', on which it does"),
    ],
)
def test_broken_steps_are_refused_by_name(
    tmp_path: Path, edit: Callable[[ModelProto], None], kind: type[GoptError], message: str
):
    model = model_of()
    edit(model)
    with pytest.raises(kind) as caught:
        gopt.load(saved(model, tmp_path))
    assert message in caught.value.message
    assert caught.value.hints


def test_a_value_for_two_initializers_and_an_initialization(tmp_path: Path):
    """The bias starts anew from a graph of its own, which is noted; one result replaces two initializers."""
    model = model_of()
    info = model.training_info[0]
    info.algorithm.initializer.append(numpy_helper.from_array(W, "kept"))
    info.update_binding.add(key="kept", value="w_new")
    info.initialization.CopyFrom(
        helper.make_graph(
            [helper.make_node("ConstantOfShape", ["n"], ["first"])], "initialization", [],
            [helper.make_tensor_value_info("first", TensorProto.FLOAT, [3])],
            [numpy_helper.from_array(np.array([3], np.int64), "n")],
        )
    )  # fmt: skip
    info.initialization_binding.add(key="b", value="first")
    from gopt.autodiff.backward import expand_gradient
    from gopt.importers.training_info import flatten

    flattened = flatten(model, expand_gradient)
    assert flattened.states == {"w": "w_new", "b": "b_new", "kept": "kept_out"}
    assert any("1 values by a graph of its own, which is not run" in note for note in flattened.notes)
    onnx.checker.check_model(flattened.model, full_check=True)
