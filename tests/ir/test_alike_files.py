"""A graph read beside files that are alike is the graph that the file alone gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from helpers import FIXTURES
from products import spread

import gopt
from gopt.errors import InputError
from gopt.ir.alike_files import AlikeFiles
from gopt.ir.graph import Graph
from gopt.ir.load import load

SEQUENCE = {"tensor-parallel": {"sequence": True}}
FOLDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "copies": ("mlp_adamw", "dp=4", {"stage": 0}),
    "shards": ("gpt_adamw", "dp=2,shard=3", {"stage": 2}),
    "parameters": ("gpt_adamw", "dp=2,shard=5", {"stage": 3}),
    "parts": ("gpt_adamw", "dp=2,shard=2,tp=2", {"stage": 2}),
    "few nodes": ("mlp_adamw", "shard=5,tp=2", {"stage": 2}),
    "external data": ("mlp_adamw_external", "dp=2,shard=3", {"stage": 2}),
    "saved values": ("families/t5_adamw", "pp=2,tp=2", {"accumulate": 2, "passes": SEQUENCE}),
}


def contents(graph: Graph) -> tuple[Any, ...]:
    stored = {name: (tensor.type, tensor.numpy().tobytes()) for name, tensor in graph.initializers.items()}
    nodes = [node.to_bytes() for node in graph.nodes]
    header = graph.header.SerializeToString(deterministic=True)
    return nodes, graph.inputs, graph.outputs, stored, graph.types, graph.metadata, header


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_beside_others_is_read_as_alone(name: str, tmp_path: Path) -> None:
    fixture, mesh, options = FOLDERS[name]
    gopt.shard(FIXTURES / f"{fixture}.onnx", mesh, prove=False, **options).write(tmp_path / "ranks")
    files, graphs = AlikeFiles(), list[Graph]()
    for path in sorted((tmp_path / "ranks").glob("rank_*.onnx"), key=lambda path: (path.suffixes, path.name)):
        graphs.append(files.load(str(path)))
        assert contents(graphs[-1]) == contents(load(path, own=True))
    if name != "saved values":
        assert len({id(graph.nodes) for graph in graphs}) < len(graphs)


def test_most_nodes_are_shared_where_other_nodes_stand_between(tmp_path: Path) -> None:
    gopt.shard(FIXTURES / "mlp_adamw.onnx", mesh="shard=5", prove=False).write(tmp_path / "ranks")
    files = AlikeFiles()
    first, *rest = (files.load(str(path)).nodes for path in sorted((tmp_path / "ranks").glob("rank_*.onnx")))
    alike = [{*map(id, first)}.intersection(map(id, nodes)) for nodes in rest]
    assert all(2 * len(shared) > len(first) for shared in alike)


def test_nodes_behind_a_result_of_another_size_are_shared(tmp_path: Path) -> None:
    gopt.shard(FIXTURES / "gpt_adamw.onnx", mesh="shard=3").write(tmp_path / "ranks")
    files = AlikeFiles()
    first, _, last = (files.load(str(path)) for path in sorted((tmp_path / "ranks").glob("rank_*.onnx")))
    pairs = list(zip(first.nodes, last.nodes))
    alike = next(at for at, (node, other) in enumerate(pairs) if node is not other)
    unlike = [
        at for at, (node, _) in enumerate(pairs) if first.types[node.outputs[0]] != last.types.get(node.outputs[0])
    ]
    assert unlike[0] < alike
    assert pairs[alike][0].encoded != pairs[alike][1].encoded


def _read(load_file: Callable[[str], Graph], path: Path) -> tuple[Any, ...] | None:
    try:
        return contents(load_file(str(path)))
    except InputError:
        return None


def _untyped(read: tuple[Any, ...] | None) -> bool:
    """Whether onnx infers no type for a result, in a file where types do not fit."""
    nodes, *_, types, _, _ = read or ((), {}, (), ())
    results = {name for node in nodes for name in onnx.NodeProto.FromString(node).output if name}
    return not results <= types.keys()


def _edited(model: onnx.ModelProto, draw: Random) -> None:
    graph, kind = model.graph, draw.randrange(7)
    first, second = sorted(draw.sample(range(len(graph.node)), 2))
    copy = onnx.NodeProto()
    copy.CopyFrom(graph.node[first])
    if kind == 0:
        graph.node.insert(second, copy)
    elif kind == 1:
        del graph.node[first]
        graph.node.insert(second, copy)
    elif kind == 2:
        del graph.node[first]
    elif kind == 3 and graph.node[first].input:
        graph.node[first].input[0] = draw.choice([*graph.node[second].input, *graph.node[second].output])
    elif kind == 4:
        tensor = draw.choice([tensor for tensor in graph.initializer if not tensor.external_data])
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array((array + 1).astype(array.dtype), tensor.name))
    elif kind == 5:
        shape = draw.choice(graph.input).type.tensor_type.shape
        if shape.dim:
            shape.dim[0].dim_value += 1
    else:
        graph.node[first].op_type, graph.node[second].op_type = graph.node[second].op_type, graph.node[first].op_type


@pytest.mark.parametrize(("name", "seed"), spread(FOLDERS, range(7, 10)))
def test_an_edited_file_beside_others_is_read_or_refused_as_alone(name: str, seed: int, tmp_path: Path) -> None:
    fixture, mesh, options = FOLDERS[name]
    gopt.shard(FIXTURES / f"{fixture}.onnx", mesh, prove=False, **options).write(tmp_path / "ranks")
    paths, draw, kept = sorted((tmp_path / "ranks").glob("rank_*.onnx")), Random(seed), 0
    for _ in range(15):
        files, path = AlikeFiles(), draw.choice(paths)
        data = path.read_bytes()
        model = onnx.ModelProto.FromString(data)
        _edited(model, draw)
        path.write_bytes(model.SerializeToString())
        *_, beside = (_read(files.load, each) for each in (*(other for other in paths if other != path), path))
        alone = _read(lambda file: load(file, own=True), path)
        assert beside == alone or (beside is None and _untyped(alone))
        kept += beside is not None
        path.write_bytes(data)
    assert 1 <= kept < 15


def _slices(path: Path, start: int, stop: int) -> None:
    nodes = [onnx.helper.make_node("Slice", ["x", "start", "stop"], ["part"]),
             onnx.helper.make_node("Neg", ["part"], ["y"])]  # fmt: skip
    bounds = {"start": start, "stop": stop}
    stored = [onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]) for name, value in bounds.items()]
    border = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [8]), ("y", ["n"]))]
    graph = onnx.helper.make_graph(nodes, "slices", border[:1], border[1:], stored)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)


@pytest.mark.parametrize(("start", "stop", "shared"), [(2, 4, True), (6, 8, True), (-2, 9, True), (2, 5, False)])
def test_types_that_follow_from_other_stored_values_are_read_again(
    start: int, stop: int, shared: bool, tmp_path: Path
) -> None:
    _slices(tmp_path / "first.onnx", 0, 2)
    _slices(tmp_path / "second.onnx", start, stop)
    files = AlikeFiles()
    first, second = (files.load(str(tmp_path / name)) for name in ("first.onnx", "second.onnx"))
    assert (first.nodes is second.nodes) == shared
    assert contents(second) == contents(load(tmp_path / "second.onnx", own=True))


@pytest.mark.parametrize("cut", [1, 40, 900])
@pytest.mark.parametrize("front", [False, True])
def test_a_damaged_file_beside_others_is_refused(front: bool, cut: int, tmp_path: Path) -> None:
    gopt.shard(FIXTURES / "mlp_adamw.onnx", mesh="dp=3").write(tmp_path / "ranks")
    files = AlikeFiles()
    paths = sorted((tmp_path / "ranks").glob("rank_*.onnx"))
    files.load(str(paths[0]))
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[cut:] if front else data[:-cut])
    with pytest.raises(InputError, match=paths[1].name):
        files.load(str(paths[1]))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        AlikeFiles().load(str(tmp_path / "none.onnx"))
