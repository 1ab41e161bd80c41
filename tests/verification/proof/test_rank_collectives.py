"""Collectives in rank files of other tools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

import gopt
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import COMM, Graph
from gopt.records.mesh import Mesh
from gopt.verification.proof.rank_collectives import load_rank

MESH = Mesh.parse("dp=2,tp=2")


def file(path: Path, nodes: Sequence[NodeProto], output: Sequence[int] | None = None) -> Path:
    """A model from x [4,3] to y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, output)
    domains = sorted({node.domain for node in nodes} | {""})
    opsets = [helper.make_opsetid(domain, 1 if domain else 17) for domain in domains]
    onnx.save(
        helper.make_model(helper.make_graph(list(nodes), "g", [x], [y]), opset_imports=opsets, ir_version=9), path
    )
    return path


def plugin(kind: str, reduce: str = "sum", source: str = "x", target: str = "y", **more: Any) -> NodeProto:
    attributes = {"collective_operation": kind, "reduce_op": reduce, "root": -1, "group_size": 0, **more}
    return helper.make_node("DistCollective", [source], [target], "call", **attributes)


def loaded(path: Path, nodes: Sequence[NodeProto], rank: int = 0, mesh: Mesh = MESH) -> Graph:
    return load_rank(file(path / "rank.onnx", nodes), mesh, rank)


@pytest.mark.parametrize(
    ("node", "op_type", "attributes", "shape"),
    [
        (plugin("all_reduce"), "AllReduce", {"reduce": "sum"}, (4, 3)),
        (plugin("all_reduce", "avg"), "AllReduce", {"reduce": "mean"}, (4, 3)),
        (plugin("reduce", "max", root=1), "Reduce", {"reduce": "max", "root": 1}, (4, 3)),
        (plugin("all_gather", "none", nb_rank=4), "AllGather", {"axis": 0, "sizes": [4] * 4}, (16, 3)),
        (plugin("reduce_scatter", "min"), "ReduceScatter", {"reduce": "min", "axis": 0, "sizes": [1] * 4}, (1, 3)),
    ],
)
def test_collectives_of_tensorrt(node, op_type, attributes, shape, tmp_path):
    graph = loaded(tmp_path, [node])
    (call,) = graph.nodes
    assert (call.domain, call.op_type) == (COMM, op_type)
    assert dict(call.attributes) == {"group": "dp+tp", **attributes}
    assert graph.outputs["y"].shape == shape, "the output, which has no shape in the file"


@pytest.mark.parametrize(
    ("rank", "groups", "group"), [(0, [0, 1], "tp"), (3, [1, 3], "dp"), (2, [0, 1, 2, 3], "dp+tp")]
)
def test_a_group_is_listed_by_its_ranks(rank, groups, group, tmp_path):
    graph = loaded(tmp_path, [plugin("all_reduce", groups=groups)], rank)
    assert graph.nodes[0].attributes["group"] == group


@pytest.mark.parametrize(
    ("node", "error", "message"),
    [
        (plugin("all_reduce", groups=[0, 3]), UnsupportedError, "no axes of the mesh dp=2,tp=2 have just these"),
        (plugin("all_reduce", nb_rank=2), InputError, "is for 2 ranks, its group in the mesh dp=2,tp=2 has 4"),
        (plugin("all_reduce", "prod"), UnsupportedError, "reduces by 'prod'"),
        *((plugin(kind), UnsupportedError, f"is of kind '{kind}'") for kind in ("all_to_all", "gather", "scatter")),
    ],
)
def test_what_has_no_counterpart_is_refused(node, error, message, tmp_path):
    with pytest.raises(error, match=message) as caught:
        loaded(tmp_path, [node])
    assert caught.value.hints


@pytest.mark.parametrize("root", [0, 1])
def test_a_broadcast_gives_the_value_of_its_root(root, tmp_path):
    source = tmp_path / "source.onnx"
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[4,3] x) => (float[4,3] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), source)
    ranks = []
    for rank, op_type in enumerate(["Neg", "Identity"]):
        nodes = [
            helper.make_node(op_type, ["x"], ["a"]), plugin("broadcast", "none", "a", "b", root=root),
            helper.make_node("Relu", ["b"], ["y"]),
        ]  # fmt: skip
        ranks.append(file(tmp_path / f"rank{rank}.onnx", nodes))
    keys = {"format": "gopt-relation/1", "forward": True, "mesh": {"tp": 2}}
    assert gopt.prove(source, ranks=ranks, relation=keys).proven == (root == 1)


def test_a_broadcast_from_nowhere_is_refused(tmp_path):
    with pytest.raises(InputError, match="from rank -1 of 4"):
        loaded(tmp_path, [plugin("broadcast")])


def test_rows_that_cannot_be_shared_out_evenly_are_refused(tmp_path):
    with pytest.raises(InputError, match="scatters 4 rows among 3 ranks"):
        loaded(tmp_path, [plugin("reduce_scatter")], mesh=Mesh.parse("tp=3"))


def test_nodes_may_stand_in_any_order_and_types_are_inferred_from_call_to_call(tmp_path):
    nodes = [
        helper.make_node("Relu", ["b"], ["y"]), plugin("all_gather", "none", "a", "b", nb_rank=2),
        plugin("reduce_scatter", "max", "x", "a", nb_rank=2),
    ]  # fmt: skip
    nodes[2].name = "second"
    graph = loaded(tmp_path, nodes, mesh=Mesh.parse("cp=2"))
    assert [node.op_type for node in graph.nodes] == ["ReduceScatter", "AllGather", "Relu"]
    assert [graph.types[name].shape for name in "aby"] == [(2, 3), (4, 3), (4, 3)]


def test_calls_of_onnx_runtime_are_of_all_ranks(tmp_path):
    nodes = [
        helper.make_node("AllReduce", ["x"], ["a"], "sum", domain="com.microsoft"),
        helper.make_node("AllGather", ["a"], ["y"], "gather", domain="com.microsoft", axis=1, group_size=4),
    ]
    graph = load_rank(file(tmp_path / "rank.onnx", nodes, [4, 12]), MESH, 0)
    assert [node.attributes["group"] for node in graph.nodes] == ["dp+tp"] * 2
    assert graph.nodes[1].attributes["sizes"] == [3] * 4


def test_an_exchange_of_rows_is_one_of_a_dimension_of_members(tmp_path):
    node = helper.make_node("AllToAll", ["x"], ["y"], "call", domain="com.microsoft", group_size=2)
    graph = load_rank(file(tmp_path / "rank.onnx", [node], [4, 3]), Mesh.parse("ep=2"), 0)
    (call,) = [node for node in graph.nodes if node.domain == COMM]
    pairs = [np.arange(12, dtype=np.float32).reshape(4, 3) + 100 * rank for rank in range(2)]
    wanted = [np.concatenate([pair[2 * rank : 2 * rank + 2] for pair in pairs]) for rank in range(2)]
    sent = [[pair.reshape(2, 2, 3)] for pair in pairs]
    results = COLLECTIVES["AllToAll"].execute(call.attributes, sent, "float32")
    for (result,), due in zip(results, wanted):
        assert np.array_equal(result.reshape(4, 3), due)
    assert graph.types["y"].shape == (4, 3)


def test_types_behind_calls_of_gopt_are_inferred(tmp_path):
    """In a process of its own: elsewhere a test may have registered the schemas."""
    call = helper.make_node("AllReduce", ["x"], ["a"], "call", domain=COMM, group="tp")
    path = file(
        tmp_path / "rank.onnx",
        [call, helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["y"])],
        [4, 3],
    )
    script = (
        "from gopt.records.mesh import Mesh\nfrom gopt.verification.proof.rank_collectives import load_rank\n"
        f"print(load_rank({str(path)!r}, Mesh.parse('tp=2'), 0).types['b'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float32[4,3]"
