"""A graph read beside files that are alike is the graph that the file alone gives."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import InputError
from gopt.ir.alike_files import AlikeFiles
from gopt.ir.graph import Graph
from gopt.ir.load import load

FOLDERS = {
    "copies": ("mlp_adamw", "dp=4", 0),
    "shards": ("gpt_adamw", "dp=2,shard=3", 2),
    "parameters": ("gpt_adamw", "dp=2,shard=5", 3),
    "parts": ("gpt_adamw", "dp=2,shard=2,tp=2", 2),
    "external data": ("mlp_adamw_external", "dp=2,shard=3", 2),
}


def contents(graph: Graph) -> tuple[object, ...]:
    stored = {name: (tensor.type, tensor.numpy().tobytes()) for name, tensor in graph.initializers.items()}
    nodes = [node.to_bytes() for node in graph.nodes]
    header = graph.header.SerializeToString(deterministic=True)
    return nodes, graph.inputs, graph.outputs, stored, graph.types, graph.metadata, header


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_beside_others_is_read_as_alone(name: str, tmp_path: Path) -> None:
    fixture, mesh, stage = FOLDERS[name]
    gopt.shard(FIXTURES / f"{fixture}.onnx", mesh=mesh, stage=stage).write(tmp_path / "ranks")
    files, graphs = AlikeFiles(), list[Graph]()
    for path in sorted((tmp_path / "ranks").glob("rank_*.onnx")):
        graphs.append(files.load(str(path)))
        assert contents(graphs[-1]) == contents(load(path, own=True))
    assert len({id(graph.nodes) for graph in graphs}) < len(graphs)


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
