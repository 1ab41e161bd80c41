"""Steps in ``training_info``: flattened, differentiated, sharded, verified; broken bindings are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from onnx import ModelProto, TensorProto, helper, numpy_helper
from training_info_models import RANDOM, B, W, model_of, refusal, saved

import gopt
from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.importers.training_info.startup import startup_model
from gopt.importers.training_info.step import step_of
from gopt.ir.load import graph_of
from gopt.runtime.reference_eval import evaluate


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
    assert [each.domain for each in training.graph.header.opset_import] == [""], "no operator of the preview is left"


def test_the_scalar_of_a_gradient_is_the_loss(tmp_path: Path):
    """Also where it is no output, and data flow finds another one; values that others read keep their names."""
    model = model_of()
    algorithm = model.training_info[0].algorithm
    algorithm.node.append(helper.make_node("Abs", ["apart"], ["error"]))
    algorithm.node.append(helper.make_node("ReduceMax", ["error"], ["worst"], keepdims=0))
    del algorithm.output[:]
    algorithm.output.append(helper.make_tensor_value_info("worst", TensorProto.FLOAT, []))
    training = gopt.load(saved(model, tmp_path)).training
    assert training.loss == "loss" and {"loss", "worst"} <= training.graph.outputs.keys()
    x, target = np.ones((6, 4), np.float32), np.zeros((6, 3), np.float32)
    found = evaluate(training.graph, {"x": x, "target": target, "lr": np.float32(0.5)})
    np.testing.assert_allclose(found["worst"], np.abs(x @ W + B).max(), rtol=1e-5)


def test_a_gradient_through_a_function_and_a_stored_shape(tmp_path: Path):
    """The forward of a Gradient has the functions and the stored values that its nodes use; absent results are left."""
    model = model_of()
    model.graph.node[0].output[0] = "flat"
    model.graph.node.insert(1, helper.make_node("Reshape", ["flat", "sizes"], ["xw"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([6, 3]), "sizes"))
    body = [helper.make_node("Add", ["a", "a"], ["c"])]
    opsets = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("mine", "Twice", ["a"], ["c"], body, opsets))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    info = model.training_info[0]
    info.algorithm.node[0].input[1] = "doubled"
    info.algorithm.node.insert(0, helper.make_node("Twice", ["target"], ["doubled"], domain="mine"))
    next(each for each in info.algorithm.node if each.op_type == "Gradient").output[1] = ""
    kept = [each for each in info.algorithm.node if each.output[0] not in ("mb", "b_new")]
    del info.algorithm.node[:], info.update_binding[1:]
    info.algorithm.node.extend(kept)
    training = gopt.load(saved(model, tmp_path)).training
    assert set(training.gradients) == {"w"}
    x, target = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (6, 3)))
    found = evaluate(training.graph, {"x": x, "target": target, "lr": np.float32(0.5)})
    apart = 2 * (x @ W + B - 2 * target) / 18
    np.testing.assert_allclose(found["w_new"], W - 0.5 * x.T @ apart, rtol=1e-5, atol=1e-6)


def test_a_value_of_unknown_type_has_that_of_its_state():
    model = model_of()
    _adds(helper.make_node("Unknown", ["w_new"], ["made"], domain="mine"), bound="made", domain="mine")(model)
    made = next(each for each in step_of(model).model.graph.output if each.name == "made")
    assert made == helper.make_tensor_value_info("made", TensorProto.FLOAT, [4, 3])


def test_what_both_graphs_declare_is_one_value(tmp_path: Path):
    """Inputs and outputs of both; initializers listed as inputs, as old models do; results that are left out."""
    model = model_of()
    _feeds("x", 6, 4)(model)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3]))
    algorithm = model.training_info[0].algorithm
    algorithm.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 3]))
    for name in ("one", "two"):
        algorithm.node.append(helper.make_node("Dropout", ["y"], [name, ""]))
    model.metadata_props.add(key="author", value="me")
    model.metadata_props.add(key="gopt.roles", value="of another form")
    step = step_of(model).model
    inputs, outputs = ([each.name for each in part] for part in (step.graph.input, step.graph.output))
    assert sorted(inputs) == ["b", "lr", "target", "w", "x"]
    assert sorted(outputs) == ["b_new", "loss", "w_new", "y"]
    told = {each.key: each.value for each in step.metadata_props}
    assert told["author"] == "me" and json.loads(told["gopt.roles"])["loss"] == "loss"
    assert len(step.metadata_props) == 2
    assert set(gopt.load(saved(model, tmp_path)).training.gradients) == {"w", "b"}


def test_names_of_an_initialization_do_not_clash_with_those_that_it_sets():
    """``startup/w`` is the name that the value ``w`` gets where a tensor ``w`` is set to another value."""
    model = model_of()
    info = model.training_info[0]
    nodes = [helper.make_node("RandomNormal", [], [name], shape=[4, 3], seed=1.0) for name in ("v", "w")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 3]) for name in ("v", "w")]
    info.initialization.CopyFrom(helper.make_graph(nodes, "initialization", [], infos))
    for key, value in (("w", "v"), ("startup/w", "w")):
        info.initialization_binding.add(key=key, value=value)
    made = startup_model(model, info)
    assert made is not None and [each.name for each in made.graph.output] == ["w", "startup/w"]
    onnx.checker.check_model(made, full_check=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_shards_and_verifies(tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]):
    path, ranks = saved(model_of(optimizer), tmp_path), tmp_path / "ranks"
    assert main(["shard", str(path), "--ranks", "2", "-o", str(ranks)]) == 0
    assert "read from training_info" in "".join(capsys.readouterr())
    assert gopt.verify(ranks).equal
    states = {state.tensor for state in gopt.load(path).training.states}
    assert states == {"w", "b"} if optimizer == "sgd" else states == {"w", "b", "v_w", "v_b", "h_w", "h_b", "count"}


def test_the_commands_take_the_file_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, plain, ranks = saved(model_of("adam"), tmp_path), tmp_path / "plain.onnx", tmp_path / "ranks"
    assert main(["import", str(path), "-o", str(plain)]) == 0
    assert "2 parameters, 7 states" in capsys.readouterr().out
    assert main(["diff", str(path), str(plain)]) == 0
    assert main(["shard", str(plain), "--ranks", "2", "-o", str(ranks), "-q"]) == 0
    assert main(["verify", str(path), str(ranks), "--steps", "1", "-q"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(path), "--text"]) == 0
    assert "; new %v_w" in capsys.readouterr().out


def _binding(key: str, value: str, place: int = 0) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        entry = model.training_info[0].update_binding[place]
        entry.key, entry.value = key, value

    return edit


def _gradient(**changes: list[str] | str | None) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        node = next(each for each in model.training_info[0].algorithm.node if each.op_type == "Gradient")
        for name, value in changes.items():
            if name == "inputs":
                node.input[:] = value
                continue
            kept = [each for each in node.attribute if each.name != name]
            del node.attribute[:]
            node.attribute.extend(kept if value is None else [*kept, helper.make_attribute(name, value)])

    return edit


def _initializes(key: str, value: str) -> Callable[[ModelProto], None]:
    return lambda model: model.training_info[0].initialization_binding.extend(
        [onnx.StringStringEntryProto(key=key, value=value)]
    )


def _adds(*nodes: onnx.NodeProto, bound: str | None = None, domain: str = "") -> Callable[[ModelProto], None]:
    """The algorithm ends with more nodes; ``bound`` replaces ``w``."""

    def edit(model: ModelProto) -> None:
        model.training_info[0].algorithm.node.extend(nodes)
        if bound is not None:
            _binding("w", bound)(model)
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return edit


def _stores(name: str) -> Callable[[ModelProto], None]:
    return lambda model: model.training_info[0].algorithm.initializer.append(numpy_helper.from_array(W, name))


def _stores_sparse(model: ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "thin")
    places = numpy_helper.from_array(np.array([0]), "thin_places")
    model.training_info[0].algorithm.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3]))
    _adds(helper.make_node("Add", ["w_new", "thin"], ["thick"]), bound="thick")(model)


def _feeds(name: str, *shape: int) -> Callable[[ModelProto], None]:
    info = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    return lambda model: model.training_info[0].algorithm.input.append(info)


def _declares(name: str, *shape: int) -> Callable[[ModelProto], None]:
    info = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    return lambda model: model.training_info[0].algorithm.value_info.append(info)


def _backwards(model: ModelProto) -> None:
    nodes = model.training_info[0].algorithm.node
    turned = list(nodes)[::-1]
    del nodes[:]
    nodes.extend(turned)


def _starts(*nodes: onnx.NodeProto, fed: str = "", times: int = 1, dtype: int = 1) -> Callable[[ModelProto], None]:
    """``w`` starts, ``times`` over, as ``first``, which ``nodes`` make."""

    def edit(model: ModelProto) -> None:
        inputs = [helper.make_tensor_value_info(fed, TensorProto.FLOAT, [4, 3])] if fed else []
        outputs = [helper.make_tensor_value_info("first", dtype, [4, 3])]
        info = model.training_info[0]
        info.initialization.CopyFrom(helper.make_graph(nodes, "initialization", inputs, outputs))
        for _ in range(times):
            _initializes("w", "first")(model)

    return edit


def _draw(shape: tuple[int, ...] = (4, 3), dtype: int = 1) -> onnx.NodeProto:
    return helper.make_node("RandomNormal", [], ["first"], shape=shape, dtype=dtype, seed=1.0)


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (_binding("v", "w_new"), InputError, "update_binding replaces 'v', which is not an initializer"),
        (_binding("w", "v_new"), InputError, "replaces 'w' by 'v_new', which nothing makes"),
        (_binding("b", "w_new"), InputError, "replaces 'b' twice"),
        (_binding("w", ""), InputError, "replaces 'w' by '', which nothing makes"),
        (
            _adds(helper.make_node("Dropout", ["w_new"], ["kept", ""]), bound=""),
            InputError,
            "replaces 'w' by '', which nothing makes",
        ),
        (
            _adds(
                helper.make_node("Shape", ["w"], ["sizes"]),
                helper.make_node("Constant", [], ["order"], value_ints=[1, 0]),
                helper.make_node("Gather", ["sizes", "order"], ["turned_sizes"]),
                helper.make_node("Reshape", ["w_new", "turned_sizes"], ["turned"]),
                bound="turned",
            ),
            InputError,
            "replaces 'w', float32[4,3], by 'turned', which is float32[3,4]",
        ),
        (_binding("w", "target"), InputError, "replaces 'w', float32[4,3], by 'target', which is float32[6,3]"),
        (
            _adds(helper.make_node("Transpose", ["w_new"], ["turned"]), bound="turned"),
            InputError,
            "replaces 'w', float32[4,3], by 'turned', which is float32[3,4]",
        ),
        (
            _adds(helper.make_node("Cast", ["w_new"], ["wide"], to=11), bound="wide"),
            InputError,
            "replaces 'w', float32[4,3], by 'wide', which is float64[4,3]",
        ),
        (
            _adds(helper.make_node("Identity", ["x"], ["xw"])),
            InputError,
            "'xw' names two values: the inference graph makes it, and the algorithm makes it again",
        ),
        (
            _adds(helper.make_node("Identity", ["w"], ["x"])),
            InputError,
            "'x' names two values: an input of the inference graph, and the algorithm makes it",
        ),
        (
            _adds(helper.make_node("Identity", ["w"], ["lr"])),
            InputError,
            "'lr' names two values: an input of the algorithm, which makes it too",
        ),
        (_stores("w"), InputError, "the inference graph stores it, and the algorithm stores it again"),
        (_stores("x"), InputError, "an input of the inference graph, and the algorithm stores it"),
        (_feeds("x", 5, 5), InputError, "input 'x' of the algorithm is float32[5,5], in the inference graph it is"),
        (_feeds("w", 3, 4), InputError, "input 'w' of the algorithm is float32[3,4], in the inference graph it is"),
        (_feeds("y", 6, 3), InputError, "'y' is an input of the algorithm, and the inference graph makes it"),
        (_declares("apart", 9, 9), InputError, "is not a valid ONNX model"),
        (_backwards, InputError, "Sub 'b_new' of the step reads 'mb' before a node makes it"),
        (
            _adds(helper.make_node("Neg", ["no"], ["neg"])),
            InputError,
            "Neg 'neg' of the step reads 'no', which nothing",
        ),
        (_initializes("v", "first"), InputError, "initialization_binding sets 'v', which is not an initializer"),
        (_starts(_draw((3, 4))), InputError, "sets 'w', float32[4,3], to 'first', which is float32[3,4]"),
        (_starts(_draw(dtype=11), dtype=11), InputError, "sets 'w', float32[4,3], to 'first', which is float64[4,3]"),
        (_starts(_draw(), times=2), InputError, "initialization_binding sets 'w' twice"),
        (_starts(), InputError, "initialization has the output 'first', which nothing makes"),
        (
            _starts(helper.make_node("Neg", ["no"], ["first"])),
            InputError,
            "Neg 'first' of initialization reads 'no', which nothing makes",
        ),
        (
            _starts(helper.make_node("Neg", ["no"], ["first"]), fed="no"),
            InputError,
            "initialization has an input, 'no'",
        ),
        (_initializes("w", "first"), InputError, "sets 'w' to 'first', which is not an output of its graph"),
        (lambda model: model.training_info.add(), UnsupportedError, "training_info holds 2 training steps"),
        (lambda model: model.training_info[0].ClearField("update_binding"), UnsupportedError, "binding is empty"),
        (_gradient(y=""), InputError, "Gradient 'dw' names no y or no xs"),
        (_gradient(xs=None), InputError, "Gradient 'dw' names no y or no xs"),
        (_stores_sparse, InputError, "has unsupported type: sparse_tensor(float)"),
        (_gradient(y="los"), InputError, "names 'los' as y, which no node makes"),
        (_gradient(inputs=["b", "w", "x", "target"]), UnsupportedError, "a gradient at other values"),
        (_gradient(xs=["w", "xw"], inputs=["w", "xw", "x", "target"]), UnsupportedError, "by 'xw', which is computed"),
        (_gradient(xs=["w", "lr"], inputs=["w", "lr", "x", "target"]), UnsupportedError, "by 'lr', on which it does"),
    ],
)
def test_broken_steps_are_refused_by_name(
    tmp_path: Path, edit: Callable[[ModelProto], None], kind: type[GoptError], message: str
):
    error = refusal(edit, kind, tmp_path)
    assert message in error.message
    assert error.hints


def test_a_backward_that_is_written_out_needs_no_gradient_operator(tmp_path: Path):
    """No ``y`` names the loss: data flow finds it, or a model that gopt wrote says it."""
    model = model_of()
    info = model.training_info[0]
    kept = [node for node in info.algorithm.node if node.op_type != "Gradient"]
    place = next(k for k, node in enumerate(kept) if node.op_type == "ReduceMean") + 1
    kept[place:place] = [
        helper.make_node("Mul", ["apart", "ninth"], ["adjoint"]),
        helper.make_node("Transpose", ["x"], ["turned"]),
        helper.make_node("MatMul", ["turned", "adjoint"], ["dw"]),
        helper.make_node("ReduceSum", ["adjoint", "rows"], ["db"], keepdims=0),
    ]
    del info.algorithm.node[:]
    info.algorithm.node.extend(kept)
    values = {"ninth": np.array(1 / 9, np.float32), "rows": np.array([0], np.int64)}
    info.algorithm.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    training = gopt.load(saved(model, tmp_path)).training
    assert training.loss == "loss" and training.gradients == {"w": "dw", "b": "db"}
    told = {"loss": "loss", "states": {}, "params": {"w": "dw"}, "batch": ["x"]}
    model.metadata_props.add(key="gopt.training_info", value=json.dumps(told))
    assert gopt.load(saved(model, tmp_path)).training.gradients == {"w": "dw", "b": "db"}
    info.algorithm.node.append(helper.make_node("ReduceMax", ["square"], ["worst"], keepdims=0))
    del info.algorithm.output[:]
    info.algorithm.output.append(helper.make_tensor_value_info("worst", TensorProto.FLOAT, []))
    info.algorithm.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    assert gopt.load(saved(model, tmp_path)).training.loss == "loss"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("no JSON", "gopt.training_info is not JSON"),
        ('{"loss": "loss"}', "gopt.training_info: "),
        ('{"loss": "no", "states": {}, "params": {}, "batch": []}', "'no', which is not a value of the step"),
        ('{"loss": "", "states": {}, "params": {"no": ""}, "batch": []}', "'no', which is not an input of the step"),
        ('{"loss": "", "states": {}, "params": {"w": "no"}, "batch": []}', "'no', which is not a value of the step"),
        ('{"loss": "", "states": {}, "params": {}, "batch": ["dw"]}', "metadata entry gopt.training_info names 'dw'"),
    ],
)
def test_broken_roles_in_its_metadata_are_refused(tmp_path: Path, told: str, message: str):
    model = model_of()
    info = model.training_info[0]
    kept = [node for node in info.algorithm.node if node.op_type != "Gradient"]
    del info.algorithm.node[:]
    info.algorithm.node.extend(kept)
    info.algorithm.node.insert(0, helper.make_node("Neg", ["w"], ["dw"]))
    info.algorithm.node.insert(1, helper.make_node("Neg", ["b"], ["db"]))
    model.metadata_props.add(key="gopt.training_info", value=told)
    with pytest.raises(InputError, match=re.escape(message)):
        gopt.load(saved(model, tmp_path))


def test_a_value_for_two_initializers_and_an_initialization(tmp_path: Path):
    """The bias starts anew from a graph of its own; one result replaces two initializers."""
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
    step = step_of(model)
    roles = json.loads(next(each.value for each in step.model.metadata_props if each.key == "gopt.roles"))
    assert roles["states"] == {"w": "w_new", "b": "b_new", "kept": "kept_out"}
    assert step.startup is not None and [each.name for each in step.startup.graph.output] == ["b"]
    np.testing.assert_array_equal(evaluate(graph_of(step.startup), {})["b"], np.zeros(3, np.float32))
    onnx.checker.check_model(step.model, full_check=True)
