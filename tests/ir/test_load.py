"""Loading: what a good file becomes, and the one line that a bad one gets."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.ir.external_data import load_state
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.types import TensorType

Edit = Callable[[ModelProto], object]
FLOAT = TensorProto.FLOAT


def value(name: str, shape: Sequence[int | str] | None = (2, 3), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def small(**changes: Any) -> ModelProto:
    """y = relu(x · w + b), with w stored."""
    parts: dict[str, Any] = {
        "nodes": [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
            helper.make_node("Add", ["h", "b"], ["s"], name="second"),
            helper.make_node("Relu", ["s"], ["y"], name="third"),
        ],
        "inputs": [value("x", ("N", 3)), value("b", (4,))],
        "outputs": [value("y", ("N", 4))],
        "initializer": [numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), "w")],
        "functions": [],
    } | changes
    functions = parts.pop("functions")
    graph = helper.make_graph(parts.pop("nodes"), "step", **parts)
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid("user", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)


def save(folder: Path, model: ModelProto | bytes, name: str = "m.onnx") -> Path:
    path = folder / name
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def edited(edit: Edit, **changes: Any) -> ModelProto:
    model = small(**changes)
    edit(model)
    return model


def refusal(call: Callable[[Any], object], path: Path, kind: type[GoptError], pattern: str) -> GoptError:
    with pytest.raises(GoptError) as caught:
        call(path)
    error = caught.value
    assert type(error) is kind, error
    assert error.message.isprintable(), "one line"
    assert str(path) in error.message
    assert re.search(pattern, error.message), error.message
    return error


# --- good files -----------------------------------------------------------------------------------------------------


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


def test_large_values_take_no_part_in_inference_but_small_ones_do(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.zeros((600,), np.float32))),
        helper.make_node("Reshape", ["big", "shape"], ["r"]),
        helper.make_node("Add", ["r", "k"], ["y"]),
    ]
    stored = [
        numpy_helper.from_array(np.zeros((1200,), np.float32), "big"),
        numpy_helper.from_array(np.array([2, -1], np.int64), "shape"),
    ]
    model = small(nodes=nodes, initializer=stored, inputs=[], outputs=[value("y", ("a", "b"))])
    graph = load(save(tmp_path, model))
    assert graph.types["r"] == TensorType("float32", (2, 600))
    assert graph.types["k"] == TensorType("float32", (600,))


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


def branch(name: str, reads: str) -> GraphProto:
    nodes = [helper.make_node("Relu", [reads], [f"{name}_r"]), helper.make_node("Neg", [f"{name}_r"], [f"{name}_n"])]
    return helper.make_graph(nodes, name, [], [value(f"{name}_n", None)])


def test_captures_reach_into_nested_bodies(tmp_path: Path) -> None:
    inner = helper.make_node("If", ["flag"], ["inner"], then_branch=branch("t", "x"), else_branch=branch("e", "late"))
    outer_then = helper.make_graph([inner], "then", [], [value("inner", None)])
    same = helper.make_node("Identity", ["w"], ["same"])
    outer_else = helper.make_graph([same], "else", [], [value("same", None)])
    nodes = [
        helper.make_node("Neg", ["x"], ["late"], name="late"),
        helper.make_node("If", ["flag"], ["y"], name="if", then_branch=outer_then, else_branch=outer_else),
    ]
    flag = value("flag", (), TensorProto.BOOL)
    model = small(nodes=nodes, inputs=[value("x", (3, 4)), flag], outputs=[value("y", (3, 4))])
    graph = load(save(tmp_path, model))
    assert [node.name for node in graph.nodes] == ["late", "if"], "a captured value counts as read"
    assert graph.nodes[1].captures == ("w", "flag", "late", "x"), "in order; make_node sorts attributes"


def loop(body_reads: str) -> NodeProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["carried", body_reads], ["next"]), helper.make_node("Identity", ["go"], ["go_on"])],
        "body",
        [value("i", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), value("carried", None)],
        [value("go_on", (), TensorProto.BOOL), value("next", None)],
    )
    return helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)


def test_a_body_s_own_values_are_no_captures(tmp_path: Path) -> None:
    model = small(nodes=[loop("b")], inputs=[value("x"), value("b", ()), value("count", (), TensorProto.INT64)])
    (node,) = load(save(tmp_path, model)).nodes
    assert node.captures == ("b",)


def function(name: str, calls: str, domain: str = "") -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("user", 1)]
    nodes = [
        helper.make_node(calls, ["a"], ["mid"], domain=domain),
        helper.make_node(calls, ["mid"], ["z"], domain=domain),
    ]
    return helper.make_function("user", name, ["a"], ["z"], nodes, opsets)


def test_functions_stay_in_the_header_and_are_inferred_through(tmp_path: Path) -> None:
    call = helper.make_node("Twice", ["x"], ["y"], domain="user")
    model = small(nodes=[call], functions=[function("Twice", "Relu")], outputs=[value("y", ("N", "M"))])
    graph = load(save(tmp_path, model))
    assert [f.name for f in graph.header.functions] == ["Twice"]
    assert graph.types["y"] == TensorType("float32", ("N", 3))


@pytest.mark.parametrize(("levels", "limit"), [(60, "FUNCTION_NODES"), (18, "FUNCTION_NODES")])
def test_functions_that_double_at_each_level_are_counted_and_refused(tmp_path: Path, levels: int, limit: str) -> None:
    doubling = [function("F0", "Relu"), *(function(f"F{i}", f"F{i - 1}", "user") for i in range(1, levels))]
    call = helper.make_node(f"F{levels - 1}", ["x"], ["y"], domain="user")
    refusal(load, save(tmp_path, small(nodes=[call], functions=doubling)), InputError, limit)


def test_functions_that_call_one_another_too_deep_are_refused(tmp_path: Path) -> None:
    def calling(place: int) -> onnx.FunctionProto:
        made = function(f"F{place}", f"F{place - 1}" if place else "Relu", "user" if place else "")
        del made.node[1]
        made.node[0].output[0] = "z"
        return made

    call = helper.make_node("F120", ["x"], ["y"], domain="user")
    model = small(nodes=[call], functions=[calling(place) for place in range(121)])
    refusal(load, save(tmp_path, model), InputError, "FUNCTION_DEPTH")


def test_an_operator_that_nobody_knows_is_no_refusal(tmp_path: Path) -> None:
    unknown = helper.make_node("Mystery", ["x"], ["y"], domain="nobody.knows")
    model = small(nodes=[unknown])
    refusal(load, save(tmp_path, model), InputError, "No opset import for domain 'nobody.knows'")
    model.opset_import.add(domain="nobody.knows", version=1)
    graph = load(save(tmp_path, model))
    assert graph.types["y"] == TensorType("float32", ("N", 4))


def test_a_declared_shape_in_numbers_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **__: pytest.fail("not needed"))
    declared = [value("h", (2, 4)), value("s", (2, 4))]
    model = small(inputs=[value("x"), value("b", (4,))], outputs=[value("y", (2, 4))], value_info=declared)
    assert load(save(tmp_path, model)).types["h"] == TensorType("float32", (2, 4))


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


# --- external data --------------------------------------------------------------------------------------------------


def external(location: str, shape: Sequence[int] = (3, 4), **entries: int | str) -> ModelProto:
    tensor = TensorProto(name="w", data_type=FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, item in {"location": location, **entries}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(item)
    return small(initializer=[tensor])


def test_external_data_is_found_beside_the_model_wherever_we_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"pad." + np.arange(12, dtype="<f4").tobytes())
    save(tmp_path, external("sub/../sub/./w.bin", offset=4, length=48))
    monkeypatch.chdir(tmp_path)
    tensor = load("m.onnx").initializers["w"]
    monkeypatch.chdir("/")
    assert tensor.external
    assert tensor.proto is None
    np.testing.assert_array_equal(tensor.numpy(), np.arange(12, dtype=np.float32).reshape(3, 4))


def test_the_model_s_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "w.bin").write_bytes(bytes(48))
    save(real, external("w.bin"))
    (tmp_path / "link").symlink_to(real)
    assert load(tmp_path / "link" / "m.onnx").initializers["w"].numpy().shape == (3, 4)


def test_hard_links_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(bytes(48))
    os.link(tmp_path / "store", tmp_path / "w.bin")
    assert load(save(tmp_path, external("w.bin"))).initializers["w"].external


def test_external_data_is_mapped_and_not_read(tmp_path: Path) -> None:
    elements = 1 << 28
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(4 * elements)
    model = external("w.bin", (3, elements // 3))
    model.graph.output[0].CopyFrom(value("y", ("N", "M")))
    model.graph.input[1].CopyFrom(value("b", (1,)))
    path = save(tmp_path, model)
    # In its own process: what other tests held and freed would hide the growth.
    code = (
        "import resource, sys; from gopt.ir.load import load\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); value = load(sys.argv[1]).initializers['w'].numpy(); value[-1, -1]; print(peak() - before)"
    )
    root = Path(__file__).parents[2]
    grown = subprocess.run([sys.executable, "-c", code, path], cwd=root, capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 50 << 10, "KiB"


def no_file(folder: Path) -> None:
    pass


def short_file(folder: Path) -> None:
    (folder / "w.bin").write_bytes(bytes(47))


def full_file(folder: Path) -> None:
    (folder / "w.bin").write_bytes(bytes(64))


def linked_file(folder: Path) -> None:
    (folder / "real.bin").write_bytes(bytes(48))
    (folder / "w.bin").symlink_to("real.bin")


def linked_folder(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "real" / "w.bin").write_bytes(bytes(48))
    (folder / "sub").symlink_to("real")


def folder_of_that_name(folder: Path) -> None:
    (folder / "w.bin").mkdir()


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "w.bin")


@pytest.mark.parametrize(
    ("prepare", "entries", "pattern"),
    [
        (no_file, {"location": "w.bin"}, r"'w'.*'w\.bin' cannot be opened: No such file"),
        (no_file, {"location": "w\nx.bin"}, r"'w\\nx\.bin' cannot be opened"),
        (no_file, {"location": "w" * 5000}, r"cannot be opened: File name too long"),
        (no_file, {"location": ""}, "is no file location"),
        (no_file, {"location": "a\0b"}, "is no file location"),
        (short_file, {"location": "w.bin"}, "'w.bin' is too short: 47 bytes, 48 needed"),
        (full_file, {"location": "w.bin", "offset": 20}, "'w.bin' is too short: 64 bytes, 68 needed"),
        (full_file, {"location": "w.bin", "offset": 10**18}, "too short"),
        (full_file, {"location": "w.bin", "offset": -4}, "offset is '-4', not a number"),
        (full_file, {"location": "w.bin", "offset": "1" * 5000}, "offset is .* not a number"),
        (full_file, {"location": "w.bin", "length": 40}, r"length is 40 bytes, but float32\[3,4\] takes 48"),
        (full_file, {"location": "w.bin", "length": "x"}, "length is 'x', not a number"),
        (full_file, {"location": "/etc/passwd"}, "'/etc/passwd' is an absolute path"),
        (full_file, {"location": "C:\\w.bin"}, "is an absolute path"),
        (full_file, {"location": "../m/w.bin"}, "leaves the model's folder"),
        (full_file, {"location": "./../w.bin"}, "leaves the model's folder"),
        (linked_folder, {"location": "real/../../w.bin"}, "leaves the model's folder"),
        (linked_file, {"location": "w.bin"}, "goes through a symbolic link"),
        (linked_folder, {"location": "sub/w.bin"}, r"goes through a symbolic link \('sub'\)"),
        (linked_folder, {"location": "sub/../real/w.bin"}, "goes through a symbolic link"),
        (full_file, {"location": "w.bin/x"}, "cannot be opened: Not a directory"),
        (folder_of_that_name, {"location": "w.bin"}, "is not a regular file"),
        (pipe, {"location": "w.bin"}, "is not a regular file"),
    ],
)
def test_bad_external_data(
    tmp_path: Path, prepare: Callable[[Path], None], entries: dict[str, Any], pattern: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    prepare(folder)
    refusal(load, save(folder, external(**entries)), InputError, pattern)


def test_external_strings_and_packed_values(tmp_path: Path) -> None:
    full_file(tmp_path)
    for dtype, kind in ((TensorProto.STRING, InputError), (TensorProto.INT4, UnsupportedError)):
        model = external("w.bin")
        model.graph.initializer[0].data_type = dtype
        model.graph.node[0].CopyFrom(helper.make_node("DequantizeLinear", ["w", "b"], ["h"], name="first"))
        if kind is UnsupportedError:
            del model.graph.node[1:]
            model.graph.input[1].CopyFrom(value("b", ()))
            model.graph.node[0].output[0] = "y"
            model.graph.output[0].CopyFrom(value("y", (3, 4)))
            model.opset_import[0].version = 21
        refusal(load, save(tmp_path, model), kind, "'w'")


# --- bad files ------------------------------------------------------------------------------------------------------


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


def test_functions_that_call_themselves(tmp_path: Path) -> None:
    functions = [function("Ping", "Pong", "user"), function("Pong", "Ping", "user")]
    call = helper.make_node("Ping", ["x"], ["y"], domain="user")
    refusal(load, save(tmp_path, small(nodes=[call], functions=functions)), InputError, "function 'P.ng' calls itself")


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


# --- state files ----------------------------------------------------------------------------------------------------


def safetensors(folder: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "s.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_safetensors_are_mapped(tmp_path: Path) -> None:
    half = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    header = {
        "__metadata__": {"by": "hand"},
        "half": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "step": {"dtype": "I64", "shape": [], "data_offsets": [4, 12]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [12, 12]},
    }
    state = load_state(safetensors(tmp_path, header, half.tobytes() + (7).to_bytes(8, "little")))
    assert list(state) == ["half", "step", "none"]
    assert state["half"].external
    assert state["half"].type == TensorType("bfloat16", (2,))
    np.testing.assert_array_equal(state["half"].numpy(), half)
    assert state["step"].numpy() == 7
    assert state["none"].numpy().shape == (0, 3)


def test_safetensors_as_its_own_library_writes_them(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    values = {"w": np.arange(6, dtype=np.float16).reshape(2, 3), "m": np.ones(3, np.float64)}
    library.save_file(values, tmp_path / "s.safetensors")
    state = load_state(tmp_path / "s.safetensors")
    for name, array in values.items():
        np.testing.assert_array_equal(state[name].numpy(), array)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    values: dict[str, Any] = {
        "w": np.arange(6, dtype=">f4").reshape(2, 3),
        "a/b": np.asfortranarray(np.ones((2, 2), np.int64)),
    }
    np.savez_compressed(path, **values)
    state = load_state(path)
    assert state["w"].type == TensorType("float32", (2, 3))
    for name, array in values.items():
        np.testing.assert_array_equal(state[name].numpy(), array)


def entry(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "pattern"),
    [
        (b"not json", "header is not JSON"),
        (b"[" * 100_000, "header is nested more than"),
        (b"[]", 'its header: .* is not of type "object"'),
        (b'{"w":{},"w":{}}', "'w' stands twice"),
        ({"w": 3}, "entry of 'w' is malformed"),
        (entry(shape=["2"]), "entry of 'w' is malformed"),
        (entry(shape=[True]), "entry of 'w' is malformed"),
        (entry(data_offsets=[0]), "entry of 'w' is malformed"),
        (entry(dtype="F3"), "element type 'F3'"),
        (entry(shape=[-2]), "negative dimension"),
        (entry(shape=[2**62]), "overflows"),
        (entry(shape=[3]), r"8 bytes, but float32\[3\] takes 12"),
        (entry(data_offsets=[-8, 0]), "truncated"),
        (entry(data_offsets=[8, 16]), "truncated"),
    ],
)
def test_bad_safetensors(tmp_path: Path, header: object, pattern: str) -> None:
    refusal(load_state, safetensors(tmp_path, header, bytes(8)), InputError, pattern)


def test_bad_state_files(tmp_path: Path) -> None:
    refusal(load_state, tmp_path / "no.npz", InputError, "no such file")
    refusal(load_state, tmp_path, InputError, "is a folder")
    refusal(load_state, save(tmp_path, b"xyz", "s.safetensors"), InputError, "truncated")
    refusal(load_state, save(tmp_path, b"\xff" * 64, "s.safetensors"), InputError, "truncated")
    refusal(load_state, save(tmp_path, b"x", "s.pt"), InputError, r"\.safetensors or an \.npz")
    refusal(load_state, save(tmp_path, b"not a zip", "s.npz"), InputError, r"is no \.npz file")


def read_state(path: Path) -> dict[str, object]:
    """Every array of a file: those of an archive are looked at when they are asked for."""
    return dict(load_state(path))


def test_bad_npz(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, o=np.array([{}], dtype=object))
    refusal(read_state, path, InputError, r"at 'o': Object arrays cannot be loaded")
    np.savez(path, half=np.ones(2, ml_dtypes.bfloat16))
    assert "safetensors" in refusal(read_state, path, InputError, "'half' has the NumPy type").hints[0]
    np.savez(path, text=np.array(["a"]))
    refusal(read_state, path, InputError, "'text' has the NumPy type")
    np.savez_compressed(path, w=np.arange(1000))
    damaged = bytearray(path.read_bytes())
    damaged[200:220] = bytes(20)
    held = load_state(save(tmp_path, bytes(damaged), "s.npz"))["w"]
    refusal(lambda _: held.numpy(), path, InputError, "damaged at 'w'")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00\x08\x00{'descr'")
    refusal(read_state, path, InputError, "damaged at 'w'")


def test_a_long_row_is_not_followed_element_by_element(tmp_path):
    """ONNX's data propagation makes a dimension of each element of a row: 24 GB for one flat parameter."""
    nodes = [
        helper.make_node("Slice", ["x", "a", "b"], ["half"]),
        helper.make_node("Concat", ["half", "half"], ["again"], axis=0),
        helper.make_node("Identity", ["again"], ["y"]),
    ]
    bounds = [numpy_helper.from_array(np.array([at], np.int64), name) for name, at in (("a", 0), ("b", 20_000_000))]
    row = helper.make_tensor_value_info("x", 1, [40_000_000])
    graph = helper.make_graph(nodes, "g", [row], [helper.make_tensor_value_info("y", 1, [40_000_000])], bounds)
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    code = (
        "import resource, sys\nfrom gopt.ir.load import load\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(*load(sys.argv[1]).types['half'].shape)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.onnx")], capture_output=True, text=True)
    shape, kilobytes = done.stdout.split()
    assert (int(shape), int(kilobytes) < 200_000) == (20_000_000, True), done
