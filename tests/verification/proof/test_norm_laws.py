"""Norms and pools of all places, which ranks with a part of the places write as sums and extremes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Builder, calls, edit_ranks
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from plants import attribute, own_values, replace
from products import spread
from verification.proof.test_split_holes import model

import gopt
from gopt.ir.load import load
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import ExpressionValues
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.result import ProofVerdict

CHANNELS = 4
VECTORS = {
    "GlobalAveragePool": 0, "GlobalMaxPool": 0, "InstanceNormalization": 2, "GroupNormalization": 2,
    "BatchNormalization": 4,
}  # fmt: skip
SETTINGS = {
    "InstanceNormalization": {"epsilon": 0.01}, "GroupNormalization": {"num_groups": 2},
    "BatchNormalization": {"training_mode": 1, "momentum": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("op", VECTORS)
@pytest.mark.parametrize("opset", [17, 21])
def test_a_definition_has_the_values_of_the_operator(op: str, opset: int, tmp_path: Path) -> None:
    if op == "GroupNormalization" and opset < 21:
        pytest.skip("it is not valid")
    generator = np.random.default_rng(7)
    inputs = {"x": generator.standard_normal((3, CHANNELS, 2, 5)).astype(np.float32)}
    inputs |= {f"v{at}": generator.uniform(0.5, 2, CHANNELS).astype(np.float32)
               for at in range(VECTORS[op])}  # fmt: skip
    names = ["y", "m", "v"] if op == "BatchNormalization" else ["y"]
    node = helper.make_node(op, [*inputs], names, **SETTINGS.get(op, {}))
    infos = [helper.make_tensor_value_info(name, 1, array.shape) for name, array in inputs.items()]
    shapes = {
        "y": (3, CHANNELS, 1, 1) if op.endswith("Pool") else (3, CHANNELS, 2, 5),
        "m": (CHANNELS,),
        "v": (CHANNELS,),
    }
    graph = helper.make_graph(
        [node], "g", infos, [helper.make_tensor_value_info(name, 1, shapes[name]) for name in names]
    )
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(written), tmp_path / "g.onnx")
    loaded, expressions = load(tmp_path / "g.onnx"), Expressions({})
    table = ConstantTable(expressions)
    reader = NodeReader(expressions, loaded, frozenset(), table, split=True)
    leaves = [expressions.leaf("batch", name, array.shape) for name, array in inputs.items()]
    numbers = reader.results(loaded.nodes[0], leaves)
    assert op not in {expression.op for expression in expressions.all}
    values = ExpressionValues(
        expressions, lambda leaf, _: expressions.values.get(leaf, inputs.get(str(leaf.attributes))), table.origins
    ).values(numbers, {})
    for value, due in zip(values, ReferenceEvaluator(written).run(None, inputs)):
        np.testing.assert_allclose(value, due, rtol=2e-5, atol=1e-6)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def step(op: str, folder: Path) -> Path:
    b = Builder(1)
    value = b.op("Conv", b.input("x", (2, 2, 8, 8)), b.const(b.generator.standard_normal((CHANNELS, 2, 3, 3))),
                 pads=[1, 1, 1, 1])  # fmt: skip
    vectors = [b.const(np.linspace(0.5, 1.5, CHANNELS)) for _ in range(VECTORS[op])]
    value = b.op(op, value, *vectors, **{**SETTINGS.get(op, {}), **({"training_mode": 0} if len(vectors) > 2 else {})})
    b.output("loss", b.op("ReduceMean", b.op("Mul", value, value), keepdims=0), ())
    step_model = b.model()
    step_model.opset_import[0].version = 21
    onnx.save(step_model, folder / "forward.onnx")
    gopt.derive(folder / "forward.onnx", folder / "step.onnx", gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    return folder / "step.onnx"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")
    home = tmp_path_factory.mktemp("norms")

    def of(op: str, mesh: str) -> Path:
        folder = home / f"{op}.{mesh}"
        if not folder.exists():
            folder.mkdir()
            gopt.shard(gopt.load(step(op, folder)), gopt.Mesh.parse(mesh)).write(folder / "ranks")
        return folder / "ranks"

    return of


@pytest.mark.parametrize(("op", "mesh"), spread(VECTORS, ["h=2", "w=3", "h=2,w=2", "dp=2,h=2"], keep=2))
def test_ranks_with_some_of_the_places_are_proven(op: str, mesh: str, clean: Callable[[str, str], Path]) -> None:
    proof = gopt.prove(clean(op, mesh))
    assert proof.proven, proof.open()


def _first(model: ModelProto) -> NodeProto:
    return calls(model, "AllReduce")[0]


def _epsilon(model: ModelProto) -> None:
    """Another number is added to the variance."""
    node = next(node for node in model.graph.node if node.op_type == "Add" and node.output[0].endswith(".added"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.02), "planted.epsilon"))
    node.input[1] = "planted.epsilon"


def _reduced(how: str) -> Callable[[ModelProto], None]:
    return lambda model: setattr(attribute(_first(model), "reduce"), "s", how.encode())


def _left_out(model: ModelProto) -> None:
    replace(model, _first(model), own_values(_first(model), 0))


WRONG = {
    "a mean of own places": ("GlobalAveragePool", _left_out),
    "another reduction of a mean": ("GlobalAveragePool", _reduced("max")),
    "the largest of own places": ("GlobalMaxPool", _left_out),
    "the smallest of the largest": ("GlobalMaxPool", _reduced("min")),
    "a sum of the largest": ("GlobalMaxPool", _reduced("sum")),
    "the mean of a group of own places": ("GroupNormalization", _left_out),
    "another epsilon": ("InstanceNormalization", _epsilon),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("mesh", ["h=2", "h=2,w=2"])
def test_a_wrong_norm_is_different(wrong: str, mesh: str, clean: Callable[[str, str], Path], tmp_path: Path) -> None:
    op, edit = WRONG[wrong]
    folder = shutil.copytree(clean(op, mesh), tmp_path / "out")
    edit_ranks(folder, edit)
    assert gopt.prove(folder).verdict is ProofVerdict.DIFFERENT


# --- extremes of two dimensions by hand -------------------------------------------------------------------------------

BOTH = 'n = gopt.comm.AllReduce <reduce="max", group="{}">(m) o = gopt.comm.AllReduce <reduce="{}", group="{}">(n)'
CALLS = {
    "h, then w": (BOTH.format("h", "max", "w"), True), "w, then h": (BOTH.format("w", "max", "h"), True),
    "both": ('o = gopt.comm.AllReduce <reduce="max", group="h+w">(m)', True),
    "h alone": ('o = gopt.comm.AllReduce <reduce="max", group="h">(m)', False),
    "h twice": (BOTH.format("h", "max", "h"), False), "the smallest along w": (BOTH.format("h", "min", "w"), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_largest_of_parts_of_two_dimensions(name: str, tmp_path: Path) -> None:
    text, right = CALLS[name]
    axes = "int64[2] a={2,3}"
    onnx.save(model("(float[2,3,4,6] x) => (float[2,3,1,1] o)", "o = ReduceMax(x,a)", axes), tmp_path / "source.onnx")
    rank = model("(float[2,3,2,3] x) => (float[2,3,1,1] o)", f"m = ReduceMax(x,a) {text}", axes)
    onnx.save(rank, tmp_path / "rank.onnx")
    relation = {"format": "gopt-relation/1", "forward": True, "mesh": {"h": 2, "w": 2},
                "inputs": {"x": {"split": ["", "", "h", "w"]}}}  # fmt: skip
    proof = gopt.prove(tmp_path / "source.onnx", ranks=[tmp_path / "rank.onnx"], relation=relation)
    assert proof.verdict is (ProofVerdict.PROVEN if right else ProofVerdict.DIFFERENT)
