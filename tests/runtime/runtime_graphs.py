"""Small graphs, made by hand, and what the runtime's tests do with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gopt.collectives.node import format_shape
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.load import load
from gopt.ir.types import dtype_code
from gopt.runtime.executor import Executor
from gopt.runtime.partition import Segment, partition
from gopt.runtime.session import SessionCache

Spec = dict[str, tuple[str, Sequence[int | str]]]
FIXTURES = Path(__file__).parents[2] / "fixtures"


def make(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Spec,
    outputs: Spec,
    constants: dict[str, np.ndarray] | None = None,
    values: Spec | None = None,
    **model: Any,
) -> Graph:
    """A graph as it comes out of ``load``. ``values`` are declared types of what is in between."""

    def infos(spec: Spec) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, dtype_code(dtype), shape) for n, (dtype, shape) in spec.items()]

    body = helper.make_graph(
        nodes, "step", infos(inputs), infos(outputs),
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
        value_info=infos(values or {}),
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(COMM, 1), *model.pop("opsets", [])]
    proto = helper.make_model(body, opset_imports=opsets, ir_version=9, **model)
    path = folder / "graph.onnx"
    path.write_bytes(proto.SerializeToString())
    return load(path, own=True)


def comm(op: str, inputs: Sequence[str], outputs: Sequence[str], group: str = "shard", **attributes: Any):
    node = helper.make_node(op, inputs, outputs, domain=COMM, group=group)
    for name, value in attributes.items():
        if name in ("cuts", "shapes", "sizes") and not value:
            kind = onnx.AttributeProto.STRINGS if name == "shapes" else onnx.AttributeProto.INTS
            node.attribute.append(onnx.AttributeProto(name=name, type=kind))
        else:
            node.attribute.append(helper.make_attribute(name, value))
    return node


def sharded_sgd(folder: Path, rank: int, cuts: Sequence[int], dtype: str = "float32") -> Graph:
    """w (2, 3) and b (2): y = x·wᵀ + b, loss = mean y², update of the bucket [w, b] on shards."""
    op = helper.make_node
    shard = (dtype, [cuts[rank + 1] - cuts[rank]])
    nodes = [
        op("Transpose", ["w"], ["wt"], perm=[1, 0]),
        op("MatMul", ["x", "wt"], ["xw"]),
        op("Add", ["xw", "b"], ["y"]),
        op("Mul", ["y", "y"], ["yy"]),
        op("ReduceMean", ["yy"], ["loss"], keepdims=0),
        op("Transpose", ["y"], ["yt"], perm=[1, 0]),
        op("MatMul", ["yt", "x"], ["gw"]),
        op("ReduceSum", ["y", "axis"], ["gb"], keepdims=0),
        comm("ReduceScatter", ["gw", "gb"], ["g"], reduce="mean", cuts=cuts),
        op("Mul", ["m", "decay"], ["md"]),
        op("Add", ["md", "g"], ["m.new"]),
        op("Mul", ["m.new", "rate"], ["step"]),
        op("Sub", ["p", "step"], ["p.new"]),
        comm("AllGather", ["p.new"], ["w.new", "b.new"], cuts=cuts, shapes=[format_shape((2, 3)), "2"]),
    ]
    kind = helper.tensor_dtype_to_np_dtype(dtype_code(dtype))
    return make(
        folder, nodes,
        {"x": (dtype, ["N", 3]), "w": (dtype, [2, 3]), "b": (dtype, [2]), "p": shard, "m": shard},
        {"loss": (dtype, []), "w.new": (dtype, [2, 3]), "b.new": (dtype, [2]), "p.new": shard, "m.new": shard},
        {"axis": np.array([0]), "decay": np.array(0.5, kind), "rate": np.array(0.125, kind)},
        {"g": shard},
    )  # fmt: skip


def sgd_feeds(cuts: Sequence[int], seed: int = 0, dtype: Any = np.float32) -> list[dict[str, np.ndarray]]:
    """Feeds of every rank: batches of their own, the same parameters."""
    rng = np.random.default_rng(seed)
    w, b = rng.normal(size=(2, 3)).astype(dtype), rng.normal(size=2).astype(dtype)
    bucket, momentum = np.concatenate([w.ravel(), b]), rng.normal(size=8).astype(dtype)
    feeds = []
    for start, stop in pairwise(cuts):
        x = rng.normal(size=(4, 3)).astype(dtype)
        feeds.append({"x": x, "w": w, "b": b, "p": bucket[start:stop], "m": momentum[start:stop]})
    return feeds


def expected_sgd(feeds: Sequence[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """New parameters, new momenta as one bucket each, and every rank's loss."""
    gradients, losses = [], []
    for given in feeds:
        y = given["x"] @ given["w"].T + given["b"]
        gradients.append(np.concatenate([(y.T @ given["x"]).ravel(), y.sum(0)]))
        losses.append(float((y * y).mean()))
    bucket, momentum = (np.concatenate([given[name] for given in feeds]) for name in ("p", "m"))
    momentum = momentum / 2 + np.mean(gradients, 0)
    return bucket - momentum / 8, momentum, losses


def alone(graph: Graph, cache: SessionCache | None = None) -> Executor:
    return Executor(graph, cache or SessionCache())


def no_call(index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
    raise AssertionError(f"no call expected, got {node}")


def segments(graph: Graph) -> list[list[str]]:
    """The cut in short: first outputs by segment, and operator types of calls."""
    return [
        [node.outputs[0] for node in step.nodes] if isinstance(step, Segment) else [step.node.op_type]
        for step in partition(graph)
    ]
