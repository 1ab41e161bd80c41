"""Loading: what a good file becomes, and the one line that a bad one gets."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_files import FLOAT, Edit, branch, edited, function, refusal, save, small, value
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.types import TensorType


def test_plain_graph(tmp_path: Path) -> None:
    model = edited(lambda m: helper.set_model_props(m, {"origin": "test"}))
    graph = load(save(tmp_path, model))
    assert [node.op_type for node in graph.nodes] == ["MatMul", "Add", "Relu"]
    assert list(graph.inputs) == ["x", "b"]
    assert list(graph.outputs) == ["y"]
    assert graph.types["h"] == TensorType("float32", ("N", 4)), "inferred, for no value_info declares it"
    assert graph.metadata == {"origin": "test"}
    assert graph.header.opset_import[0].version == 18
    assert not graph.header.HasField("graph")
    np.testing.assert_array_equal(graph.initializers["w"].numpy(), np.arange(12).reshape(3, 4))
    assert graph.nodes[1].to_proto() == model.graph.node[1]


def test_values_may_be_absent_or_stored_under_an_input(tmp_path: Path) -> None:
    absent = small(initializer=[], inputs=[value("x"), value("b", (4,)), value("w", (3, 4))])
    assert load(save(tmp_path, absent)).initializers == {}
    both = small(inputs=[value("x"), value("b", (4,)), value("w", (3, 4))])
    graph = load(save(tmp_path, both))
    assert "w" in graph.inputs
    assert "w" in graph.initializers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "uint8", "int4", "complex64", "uint32"])
@pytest.mark.parametrize("raw", [True, False])
def test_element_types(tmp_path: Path, dtype: str, raw: bool) -> None:
    if raw:
        array = np.zeros((3, 1), getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
        stored = numpy_helper.from_array(array, "c")
    else:
        code = TensorProto.DataType.Value(dtype.upper())
        stored = helper.make_tensor("c", code, (3, 1), [0, 0, 0])
    model = edited(lambda m: m.graph.initializer.append(stored))
    tensor = load(save(tmp_path, model)).initializers["c"]
    assert tensor.type == TensorType(dtype, (3, 1))
    assert tensor.numpy().shape == (3, 1)


def test_unsorted_nodes_are_refused_by_name(tmp_path: Path) -> None:
    model = small()
    nodes = [model.graph.node[index] for index in (2, 0, 1)]
    path = save(tmp_path, small(nodes=nodes))
    refusal(load, path, InputError, "node 'third' reads value 's' before a node makes it")


def test_gopt_s_own_output_can_be_read_back(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["gopt.p.0.v"], name="gopt.p.0")
    entry = node.metadata_props.add()
    entry.key, entry.value = "gopt.pass", "p"
    path = save(tmp_path, small(nodes=[node], outputs=[value("gopt.p.0.v", ("N", 3))]))
    assert load(path, own=True).nodes[0].made_by == "p"


def test_many_nodes_load_in_linear_time(tmp_path: Path) -> None:
    names = ["x", *(f"v{i}" for i in range(20_000))]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)]
    graph = load(save(tmp_path, small(nodes=nodes, outputs=[value(names[-1], ("N", "M"))])))
    assert [node.outputs[0] for node in graph.nodes] == names[1:]
    assert graph.types[names[-1]] == TensorType("float32", ("N", 3))


def test_missing_file(tmp_path: Path) -> None:
    refusal(load, tmp_path / "no.onnx", InputError, "no such file")
    refusal(load, save(tmp_path, b"x") / "m.onnx", InputError, "no such file")


def test_a_folder_and_a_pipe(tmp_path: Path) -> None:
    refusal(load, tmp_path, InputError, "is a folder")
    os.mkfifo(tmp_path / "pipe")
    refusal(load, tmp_path / "pipe", InputError, "not a regular file")


def test_a_path_that_is_no_path() -> None:
    with pytest.raises(InputError, match=r"cannot be read"):
        load("a\0b")


def test_more_than_a_protobuf_holds(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    assert refusal(load, path, InputError, "2 GiB").hints


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "is empty"),
        (b"Dear diary,\nnothing happened today.\n", "is a text file"),
        ("Grüße, 世界\n".encode(), "is a text file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(range(256)), "is not an ONNX model"),
        (b"\x08\x09\x12\x04test", "is truncated or damaged"),
        (b"\x00" * 100, "is not an ONNX model"),
        (b"2\x02hi", "is a text file|is not an ONNX model"),
    ],
)
def test_not_onnx(tmp_path: Path, content: bytes, pattern: str) -> None:
    refusal(load, save(tmp_path, content), InputError, pattern)


def test_text_that_parses_as_protobuf_is_still_text(tmp_path: Path) -> None:
    text = b'" ' + b"a" * 32
    assert ModelProto.FromString(text).domain == "a" * 32
    refusal(load, save(tmp_path, text), InputError, "is a text file")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = small().SerializeToString()
    for size in range(1, len(data)):
        with pytest.raises(InputError) as caught:
            load(save(tmp_path, data[:size]))
        assert "Traceback" not in caught.value.message
        assert caught.value.message.isprintable()
    refusal(load, save(tmp_path, data[: len(data) // 2]), InputError, "is truncated or damaged")


def test_no_flipped_byte_escapes_as_another_error(tmp_path: Path) -> None:
    data = small().SerializeToString()
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            try:
                graph = load(save(tmp_path, bytes(damaged)))
            except (InputError, UnsupportedError) as error:
                assert error.message.isprintable()
            else:
                assert isinstance(graph, Graph)


def clear_graph(model: ModelProto) -> None:
    model.ClearField("graph")


def a_sparse_tensor() -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        helper.make_tensor("v", FLOAT, (1,), [1.0]), helper.make_tensor("i", TensorProto.INT64, (1,), [0]), [4]
    )


def add_sparse(model: ModelProto) -> None:
    sparse = model.graph.sparse_initializer.add()
    sparse.CopyFrom(a_sparse_tensor())
    sparse.values.name = "sp"


def sequence_input(model: ModelProto) -> None:
    model.graph.input.append(
        helper.make_tensor_sequence_value_info("seq", FLOAT, None)
    )  # fmt: skip


def cycle(model: ModelProto) -> None:
    model.graph.node[0].input[0] = "s"


def rename(what: str, name: str) -> Edit:
    def edit(model: ModelProto) -> None:
        graph = model.graph
        if what == "node":
            graph.node[1].name = name
        elif what == "input":
            graph.input[1].name = graph.node[1].input[1] = name
        elif what == "initializer":
            graph.initializer[0].name = graph.node[0].input[1] = name
        else:
            graph.node[0].output[0] = graph.node[1].input[0] = name

    return edit


def node(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Edit:
    return lambda model: model.graph.node.append(helper.make_node(op_type, inputs, outputs, **attributes))


def stored(array: np.ndarray, name: str) -> Edit:
    return lambda model: model.graph.initializer.append(numpy_helper.from_array(array, name))


def dims(*sizes: int) -> Edit:
    def edit(model: ModelProto) -> None:
        model.graph.initializer[0].dims[:] = sizes

    return edit


def typed(count: int) -> Edit:
    def edit(model: ModelProto) -> None:
        model.graph.initializer[0].ClearField("raw_data")
        model.graph.initializer[0].float_data.extend([0.0] * count)

    return edit


def untyped_attribute(model: ModelProto) -> None:
    model.graph.node[2].attribute.add().name = "what"


def no_opset(model: ModelProto) -> None:
    del model.opset_import[:]


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (clear_graph, "holds no graph"),
        (lambda m: m.graph.ClearField("node"), "has no nodes"),
        (lambda m: m.ClearField("ir_version"), "is not an ONNX model"),
        (no_opset, "names no operator set"),
        # order and definition
        (cycle, "value '[hs]' depends on itself"),
        (node("Add", ["loop", "x"], ["loop"]), "value 'loop' depends on itself"),
        (node("Relu", ["ghost"], ["z"]), "value 'ghost' is undefined: node 'z' reads it"),
        (lambda m: m.graph.output.append(value("ghost")), "graph output 'ghost' is undefined"),
        (node("If", ["x"], ["z"], then_branch=branch("t", "ghost"), else_branch=branch("e", "x")), "'ghost' is undef"),
        (node("Relu", ["x"], ["h"]), "value 'h' is defined twice"),
        (node("Relu", ["x"], ["b"]), "value 'b' is defined twice"),
        (node("Relu", ["x"], ["w"]), "value 'w' is defined twice"),
        (node("Split", ["x"], ["z", "z"]), "value 'z' is defined twice"),
        (lambda m: m.graph.input.append(value("x")), "two graph inputs are named 'x'"),
        (lambda m: m.graph.output.append(value("y")), "two graph outputs are named 'y'"),
        (stored(np.zeros(1, np.float32), "w"), "two initializers are named 'w'"),
        (stored(np.zeros(1, np.float32), ""), "an initializer without a name"),
        (lambda m: m.graph.input.append(value("")), "a graph input without a name"),
        (lambda m: m.graph.input.append(onnx.ValueInfoProto(name="z")), "input 'z' has no element type"),
        (node("", ["x"], ["z"], name="empty"), "node 'empty' has no operator type"),
        (untyped_attribute, "attribute 'what' of node 'third' has no type"),
        # sizes
        (lambda m: m.graph.input.append(value("z", (-1, 3))), "input 'z' has a negative dimension: -1"),
        (lambda m: m.graph.output[0].CopyFrom(value("y", (-2,))), "output 'y' has a negative dimension"),
        (lambda m: m.graph.value_info.append(value("h", (-2,))), "value 'h' has a negative dimension"),
        (lambda m: m.graph.input.append(value("z", (2**40, 2**40))), "input 'z' overflows"),
        (lambda m: m.graph.input.append(value("z", (2**62, 0, 2**62))), "input 'z' overflows"),
        (lambda m: m.graph.input.append(value("z", (1,) * 70)), "has 70 dimensions"),
        (dims(-3, -4), "initializer 'w' has a negative dimension"),
        (dims(2**32, 2**32), "initializer 'w' overflows"),
        (dims(3, 5), r"initializer 'w' holds 48 bytes, but float32\[3,5\] takes 60"),
        (dims(), r"initializer 'w' holds 48 bytes, but float32\[\] takes 4"),
        (typed(11), "initializer 'w' holds 11 entries of float_data, but .* takes 12"),
        (typed(0), "initializer 'w' holds 0 entries"),
        (stored(np.zeros((2,), np.float32), "b"), r"input 'b' is float32\[4\], but its initializer is float32\[2\]"),
        (stored(np.zeros((4,), np.int32), "b"), r"input 'b' is float32\[4\], but its initializer is int32\[4\]"),
        # names of gopt's own
        (rename("node", "gopt.x"), r"node 'gopt\.x': names that begin with 'gopt\.' are gopt's own"),
        (rename("value", "gopt.x"), r"value 'gopt\.x': names"),
        (rename("input", "gopt.x"), r"value 'gopt\.x': names"),
        (rename("initializer", "gopt.x"), r"value 'gopt\.x': names"),
        (node("If", ["x"], ["z"], then_branch=branch("gopt.", "x"), else_branch=branch("e", "x")), "gopt's own"),
        (node("Relu", ["line\nbreak"], ["z"]), r"'line\\nbreak' is undefined"),
    ],
)
def test_malformed_graphs(tmp_path: Path, edit: Edit, pattern: str) -> None:
    refusal(load, save(tmp_path, edited(edit)), InputError, pattern)


def test_a_gopt_output_is_called_one(tmp_path: Path) -> None:
    model = edited(rename("value", "gopt.x"))
    assert "export" in refusal(load, save(tmp_path, model), InputError, "gopt's own").hints[0]
    helper.set_model_props(model, {"gopt.format": "gopt-rank/1"})
    assert "already an output of gopt" in refusal(load, save(tmp_path, model), InputError, "gopt's own").hints[0]


@pytest.mark.parametrize("name", [b"first", b"step", b"MatMul", b"s_ab"])
def test_names_that_are_not_utf8(tmp_path: Path, name: bytes) -> None:
    model = edited(rename("value", "s_ab"))
    data = model.SerializeToString().replace(name, b"\xff" * len(name))
    refusal(load, save(tmp_path, data), InputError, "not UTF-8")


def add_training_info(model: ModelProto) -> None:
    model.training_info.add()
    model.training_info.add()


def sparse_attribute(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["z"], sparse_value=a_sparse_tensor()))


def external_attribute(model: ModelProto) -> None:
    tensor = TensorProto(name="t", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    model.graph.node.append(helper.make_node("Constant", [], ["z"], value=tensor))


PREVIEW = "ai.onnx.preview.training"


def gradient(model: ModelProto) -> None:
    node("Gradient", ["x"], ["dx"], domain=PREVIEW, xs=["x"], y="y")(model)
    model.opset_import.add(domain=PREVIEW, version=1)


def gradient_in_a_function(model: ModelProto) -> None:
    made = function("F", "Gradient", PREVIEW)
    for each in made.node:
        each.attribute.extend([helper.make_attribute("xs", ["x"]), helper.make_attribute("y", "y")])
    made.opset_import.add(domain=PREVIEW, version=1)
    model.functions.append(made)
    model.opset_import.add(domain="user", version=1)


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (add_training_info, "training_info holds 2 training steps"),
        (gradient, "'dx'.*Gradient operator"),
        (gradient_in_a_function, "Gradient operator"),
        (add_sparse, "initializer 'sp' is sparse"),
        (sparse_attribute, "attribute 'sparse_value' of node 'z' is a sparse tensor"),
        (external_attribute, "attribute 'value' of node 'z' lies in external data"),
        (sequence_input, "input 'seq' is a sequence"),
    ],
)
def test_recognised_but_unsupported(tmp_path: Path, edit: Edit, pattern: str) -> None:
    assert refusal(load, save(tmp_path, edited(edit)), UnsupportedError, pattern).exit_code == 4
