"""One change is one line; renaming is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import executed_lines
from offline_graphs import FIXTURES, NAMES, Step, fixture, saved, scrambled, step_with
from onnx import helper, numpy_helper

from gopt import api
from gopt.errors import InputError, OptionError
from gopt.offline.diff import Diff, diff

pytestmark = pytest.mark.usefixtures("unchecked")


def compared(old: onnx.ModelProto, new: onnx.ModelProto, folder: Path) -> Diff:
    return diff(saved(old, folder, "a.onnx"), saved(new, folder, "b.onnx"))


def lines(result: Diff) -> list[tuple[str, str]]:
    return [(line.kind, line.text) for line in result.lines]


def node(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if output in each.output)


def changed(change: Callable[[onnx.ModelProto], None], folder: Path, name: str = "mlp_adamw") -> Diff:
    model = fixture(name)
    change(model)
    return compared(fixture(name), model, folder)


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_itself(name: str) -> None:
    path = FIXTURES / f"{name}.onnx"
    result = diff(path, path)
    assert result.equal and not result.renamed and result.exit_code == 0


@pytest.mark.parametrize("name", NAMES)
def test_renamed_inner_values_are_no_difference(name: str, tmp_path: Path) -> None:
    result = compared(fixture(name), scrambled(fixture(name), interface=False), tmp_path)
    assert result.equal and result.renamed > 20


def test_external_data_is_no_difference() -> None:
    assert diff(FIXTURES / "mlp_adamw.onnx", FIXTURES / "mlp_adamw_external.onnx").equal


@pytest.mark.parametrize("rename", [False, True])
def test_one_attribute(rename: bool, tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node(model, "_log_softmax").attribute[0].i = 0

    model = fixture("mlp_adamw")
    change(model)
    result = compared(fixture("mlp_adamw"), scrambled(model, interface=False) if rename else model, tmp_path)
    assert lines(result) == [("attribute", "%_log_softmax = LogSoftmax: axis 1 -> 0")]
    assert result.exit_code == 1


def test_a_node_added(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        place = next(i for i, each in enumerate(model.graph.node) if "relu" in each.input)
        model.graph.node.insert(place, helper.make_node("Neg", ["relu"], ["extra"]))
        reader = model.graph.node[place + 1]
        reader.input[list(reader.input).index("relu")] = "extra"

    assert lines(changed(change, tmp_path)) == [
        ("rewired", "%addmm_1 = Gemm: input 0 %relu -> %extra"),
        ("added", "%extra = Neg(%relu)"),
    ]


def test_a_node_of_the_same_kind_added_at_an_output(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        last = node(model, "fc1.weight_out")
        last.output[0] = "before"
        model.graph.node.append(helper.make_node("Sub", ["before", "mul_9"], ["fc1.weight_out"]))

    kinds = [kind for kind, _ in lines(changed(change, tmp_path))]
    assert sorted(kinds) == ["added", "output"]


def test_a_node_removed_and_a_dead_one(tmp_path: Path) -> None:
    model = fixture("mlp_adamw")
    model.graph.node.append(helper.make_node("Neg", ["relu"], ["dead"]))
    assert lines(compared(model, fixture("mlp_adamw"), tmp_path)) == [("removed", "%dead = Neg(%relu)")]


def test_an_input_rewired(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node(model, "div_4").input[1] = "sqrt"

    assert lines(changed(change, tmp_path)) == [("rewired", "%div_4 = Div: input 1 %add_2 -> %sqrt")]


def test_an_operator_changed(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node(model, "relu").op_type = "Tanh"

    assert lines(changed(change, tmp_path)) == [("op", "%relu: Relu -> Tanh")]


@pytest.mark.parametrize("rename", [False, True])
def test_a_constant_changed(rename: bool, tmp_path: Path) -> None:
    model = fixture("mlp_adamw")
    for tensor in model.graph.initializer:
        if tensor.name == "val_31":
            tensor.CopyFrom(numpy_helper.from_array(np.array(1e-8, np.float32), "val_31"))
    model = scrambled(model, interface=False) if rename else model
    result = lines(compared(fixture("mlp_adamw"), model, tmp_path))
    assert [kind for kind, _ in result] == ["value"]
    assert result[0][1].startswith("%val_31") and result[0][1].endswith("float32[] 1.0e-6 -> float32[] 1.0e-8")


def test_an_initial_value_changed(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(each for each in model.graph.initializer if each.name == "fc1.bias")
        tensor.CopyFrom(numpy_helper.from_array(np.zeros(64, np.float32), "fc1.bias"))

    result = lines(changed(change, tmp_path))
    assert len(result) == 1 and result[0][0] == "value" and result[0][1].startswith("%fc1.bias: float32[64] #")


def plain(s: Step) -> None:
    s.state("w", s.op("Sub", "w", s.mul("lr", s.gradient)))


def heavy(s: Step) -> None:
    buffer = s.op("Add", s.mul("m", s.number(0.9)), s.gradient)
    s.state("w", s.op("Sub", "w", s.mul("lr", buffer)))
    s.state("m", buffer)


def test_a_state_added(tmp_path: Path) -> None:
    result = lines(compared(step_with(plain), step_with(heavy), tmp_path))
    assert ("state", "%m added: float32[4,3] optimizer_state of %w") in result
    assert ("bytes", "optimizer_state: 0 -> 48 (+48)") in result
    assert [kind for kind, _ in result if kind not in ("added", "rewired")] == ["state", "bytes"]
    back = lines(compared(step_with(heavy), step_with(plain), tmp_path))
    assert ("state", "%m removed: float32[4,3] optimizer_state of %w") in back


def test_opset_and_interface(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 21
        model.graph.input.append(helper.make_tensor_value_info("more", 1, [2]))

    assert lines(changed(change, tmp_path)) == [
        ("model", "opset ai.onnx: 20 -> 21"),
        ("input", "%more added: float32[2]"),
    ]


def test_linear_time(tmp_path: Path) -> None:
    """A change at the very start of a long graph: everything behind it has to be matched again."""

    def chain(count: int, alpha: float) -> onnx.ModelProto:
        nodes = [helper.make_node("LeakyRelu", ["x"], ["v0"], alpha=alpha)]
        nodes += [helper.make_node("Add", [f"v{i}", f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
        graph = helper.make_graph(
            nodes, "g", [helper.make_tensor_value_info("x", 1, [2])],
            [helper.make_tensor_value_info(f"v{count}", 1, [2])],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])

    def work(count: int) -> int:
        """Lines of Python that a comparison runs: the same on any machine."""
        both = [saved(chain(count, alpha), tmp_path, f"{alpha}.onnx") for alpha in (0.25, 0.5)]
        assert lines(diff(*both)) == [("attribute", "%v0 = LeakyRelu: alpha 0.25 -> 0.5")]
        return executed_lines(lambda: diff(*both))

    small, large = work(500), work(2000)
    assert large < 4.5 * small


def test_folders(tmp_path: Path) -> None:
    source = api.load(FIXTURES / "mlp_adamw.onnx")
    for name, ranks, stage in (("a", 2, 2), ("b", 2, 2), ("c", 3, 2), ("d", 2, 0)):
        api.shard(source, ranks, stage=stage).write(tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "b").equal
    ranks = [str(line) for line in diff(tmp_path / "a", tmp_path / "c").lines]
    assert "manifest.json: record ranks[2] added" in ranks
    stage = diff(tmp_path / "a", tmp_path / "d")
    assert any(line.kind == "added" and "AllReduce" in line.text and line.where == "rank 0-1" for line in stage.lines)
    json.dumps(stage.to_json())


def test_folders_with_other_values(tmp_path: Path) -> None:
    source = api.load(FIXTURES / "mlp_sgd.onnx")
    for name in ("a", "b"):
        api.shard(source, 2).write(tmp_path / name)
    values = tmp_path / "b" / "states.bin"
    data = bytearray(values.read_bytes())
    data[3] ^= 1
    values.write_bytes(bytes(data))
    result = diff(tmp_path / "a", tmp_path / "b")
    assert [line.kind for line in result.lines] == ["value"]


def test_refusals(tmp_path: Path) -> None:
    model = FIXTURES / "mlp_sgd.onnx"
    with pytest.raises(InputError, match="there is no"):
        diff(model, tmp_path / "none.onnx")
    with pytest.raises(OptionError, match="two models or two output folders"):
        diff(model, tmp_path)
    with pytest.raises(InputError, match="not an output folder"):
        diff(tmp_path, tmp_path)
