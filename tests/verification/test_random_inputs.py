"""Random nodes are fed what they would have drawn: source and ranks alike, every rank its own, by the right law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from gopt.cli.main import main
from helpers import Builder, edit_rank, edit_ranks, run_graph
from onnx import ModelProto, helper, numpy_helper
from plants import attribute, gradient_calls

import gopt
from gopt.errors import UnsupportedError
from gopt.ir.load import load
from gopt.operators.kinds import RANDOM
from gopt.verification.random_inputs import feed_graph, find_random
from gopt.verification.result import Outcome
from gopt.verification.verify import Verifier

BATCH = 4


def dropout(b: Builder, h: str) -> tuple[str, str]:
    """Dropped values, and what the derivative is multiplied by."""
    dropped, mask = b.op("Dropout", h, b.const(0.4), b.const(True, "bool"), outputs=2)
    return dropped, b.op("Mul", b.op("Cast", mask, to=1), b.const(1 / 0.6))


def by_uniform(b: Builder, h: str) -> tuple[str, str]:
    """A mask of uniform numbers, as PyTorch exports a dropout."""
    mask = b.op("Cast", b.op("Greater", b.op("RandomUniformLike", h), b.const(0.4)), to=1)
    scaled = b.op("Mul", mask, b.const(1 / 0.6))
    return b.op("Mul", h, scaled), scaled


def by_bernoulli(b: Builder, h: str) -> tuple[str, str]:
    odds = b.op("Expand", b.const(0.6), b.const([BATCH, 5], "int64"))
    scaled = b.op("Mul", b.op("Bernoulli", odds), b.const(1 / 0.6))
    return b.op("Mul", h, scaled), scaled


def by_noise(b: Builder, h: str) -> tuple[str, str]:
    """Gaussian dropout."""
    scaled = b.op("Add", b.op("RandomNormal", shape=[BATCH, 5], scale=0.3), b.const(1.0))
    return b.op("Mul", h, scaled), scaled


def by_classes(b: Builder, h: str) -> tuple[str, str]:
    """One column is let through, drawn from a distribution."""
    odds = b.op("Log", b.const(np.full((BATCH, 5), 0.2)))
    drawn = b.op("Cast", b.op("Multinomial", odds, dtype=6, sample_size=1), to=7)
    scaled = b.op("OneHot", b.op("Reshape", drawn, b.const([BATCH], "int64")), b.const(5, "int64"), b.const([0.0, 1.0]))
    return b.op("Mul", h, scaled), scaled


WAYS = {
    "Dropout": dropout, "RandomUniformLike": by_uniform, "Bernoulli": by_bernoulli, "RandomNormal": by_noise,
    "Multinomial": by_classes,
}  # fmt: skip


def step(folder: Path, way: str) -> Path:
    """x w, something random between, v, squared error, plain descent."""
    b = Builder()
    x, y = b.input("x", (BATCH, 3)), b.input("y", (BATCH, 2))
    w, v = b.parameter("w", (3, 5)), b.parameter("v", (5, 2))
    h, factor = WAYS[way](b, b.op("MatMul", x, w))
    d = b.op("Sub", b.op("MatMul", h, v), y)
    b.output("loss", b.op("ReduceMean", b.op("Mul", d, d), keepdims=0), ())
    delta = b.op("Mul", d, b.const(2.0 / (BATCH * 2)))
    back = b.op("Mul", b.op("MatMul", delta, b.op("Transpose", v, perm=[1, 0])), factor)
    gradients = {
        w: b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), back),
        v: b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), delta),
    }
    for name, shape in ((w, (3, 5)), (v, (5, 2))):
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradients[name], b.const(0.1))), shape)
    return b.save(folder / "step.onnx")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_random_steps_are_proven(tmp_path, way, stage):
    gopt.shard(gopt.load(step(tmp_path, way)), 3, stage=stage).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(steps=2)
    assert result.equal, result.to_json()
    assert {each.parameter for each in result.gradients if each.holds} == {"w", "v"}
    assert "1 random node was fed what it would have drawn" in result.notes


@pytest.mark.parametrize("way", WAYS)
def test_errors_beside_random_nodes_are_seen(tmp_path, way):
    gopt.shard(gopt.load(step(tmp_path, way)), 2, stage=0).write(tmp_path / "out")

    def plant(model: ModelProto) -> None:
        for node in gradient_calls(model):
            attribute(node, "reduce").s = b"sum"

    edit_ranks(tmp_path / "out", plant)
    assert Verifier(tmp_path / "out").run(steps=1, confirm=False).outcome is Outcome.DIFFERENT


def test_a_rank_that_drops_other_shares_is_seen(tmp_path):
    gopt.shard(gopt.load(step(tmp_path, "Dropout")), 2, stage=0).write(tmp_path / "out")

    def plant(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Dropout")
        tensor = next(each for each in model.graph.initializer if each.name == node.input[1])
        tensor.CopyFrom(numpy_helper.from_array(np.array(0.8, np.float32), tensor.name))

    edit_rank(tmp_path / "out", 1, plant)
    assert Verifier(tmp_path / "out").run(steps=1, confirm=False).outcome is Outcome.DIFFERENT


def test_a_rank_that_drops_nothing_is_seen(tmp_path):
    gopt.shard(gopt.load(step(tmp_path, "RandomUniformLike")), 2, stage=0).write(tmp_path / "out")

    def plant(model: ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Greater":
                node.op_type, node.input[1] = "Equal", node.input[0]

    edit_rank(tmp_path / "out", 1, plant)
    assert Verifier(tmp_path / "out").run(steps=1, confirm=False).outcome is Outcome.DIFFERENT


def test_every_rank_draws_its_own(tmp_path):
    gopt.shard(gopt.load(step(tmp_path, "Dropout")), 2).write(tmp_path / "out")
    random_inputs = Verifier(tmp_path / "out").random_inputs
    draws = [next(iter(random_inputs.draw(0, number, part).values())) for number in range(2) for part in range(2)]
    assert all(not np.array_equal(draws[0], other) for other in draws[1:])
    assert np.array_equal(draws[0], next(iter(random_inputs.draw(0, 0, 0).values())))


def test_the_command_says_so(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["shard", str(step(tmp_path, "Dropout")), "--ranks", "2", "-o", str(out)]) == 0
    assert main(["verify", str(out), "--steps", "1"]) == 0
    assert "1 random node was fed what it would have drawn" in capsys.readouterr().out


# --- the laws -------------------------------------------------------------------------------------------------------


def fed(text: str, folder: Path, **feeds: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The outputs of a graph with a random node, of many draws."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{text}')
    onnx.save(model, folder / "graph.onnx")
    graph = load(folder / "graph.onnx", own=True)
    random_inputs = find_random(graph)
    new = feed_graph(graph, random_inputs, graph.types)
    assert not any(node.is_a(*RANDOM) for node in new.nodes)
    return [run_graph(new, {**feeds, **random_inputs.draw(1, number, 0)}) for number in range(3)]


def test_classes_are_drawn_by_their_odds(tmp_path):
    odds = np.log(np.array([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]], np.float32)) + 3
    text = "g (float[2,3] odds) => (int32[2,4000] y) { y = Multinomial<sample_size = 4000>(odds) }"
    drawn = fed(text, tmp_path, odds=odds)[0]["y"]
    assert drawn.dtype == np.int32
    shares = np.stack([(drawn == each).mean(axis=1) for each in range(3)], axis=1)
    np.testing.assert_allclose(shares, [[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]], atol=0.03)


def test_a_bernoulli_follows_its_odds(tmp_path):
    odds = np.repeat(np.array([0.1, 0.7], np.float32), 4000).reshape(2, 4000)
    text = "g (float[2,4000] odds) => (double[2,4000] y) { y = Bernoulli<dtype = 11>(odds) }"
    drawn = fed(text, tmp_path, odds=odds)[0]["y"]
    assert drawn.dtype == np.float64 and set(np.unique(drawn)) == {0.0, 1.0}
    np.testing.assert_allclose(drawn.mean(axis=1), [0.1, 0.7], atol=0.03)


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_drops_its_share_in_training(tmp_path, training):
    text = """g (float[50,80] x, float r, bool t) => (float[50,80] y, bool[50,80] m) { y, m = Dropout(x, r, t) }"""
    x = np.ones((50, 80), np.float32)
    for made in fed(text, tmp_path, x=x, r=np.array(0.25, np.float32), t=np.array(training)):
        np.testing.assert_allclose(made["m"].mean(), 0.75 if training else 1, atol=0.03)
        np.testing.assert_allclose(made["y"], made["m"] * x / (0.75 if training else 1), rtol=1e-6)


def test_normal_and_uniform_numbers_have_their_parameters(tmp_path):
    text = """g (float[90,90] x) => (float16[90,90] a, float[90,90] b) {
        a = RandomNormalLike<mean = 3.0, scale = 0.5, dtype = 10>(x)
        b = RandomUniformLike<low = -1.0, high = 5.0>(x) }"""
    made = fed(text, tmp_path, x=np.zeros((90, 90), np.float32))[0]
    assert made["a"].dtype == np.float16
    np.testing.assert_allclose([made["a"].mean(dtype=float), made["a"].std(dtype=float)], [3, 0.5], atol=0.03)
    assert -1 <= made["b"].min() < -0.9 and 4.9 < made["b"].max() <= 5


def test_a_seed_makes_all_ranks_draw_the_same(tmp_path):
    text = "g (float[9] x) => (float[9] a, float[9] b) { a = RandomNormalLike<seed = 3.0>(x)  b = RandomNormalLike(x) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{text}'), tmp_path / "g.onnx")
    random_inputs = find_random(load(tmp_path / "g.onnx", own=True))
    one, other = random_inputs.draw(0, 0, 0), random_inputs.draw(0, 0, 1)
    assert [np.array_equal(one[name], other[name]) for name in one] == [True, False]


def test_a_random_node_in_a_body_is_refused_by_name(tmp_path):
    body = helper.make_graph(
        [helper.make_node("RandomNormal", [], ["r"], name="hidden", shape=[2])], "body", [],
        [helper.make_tensor_value_info("r", 1, [2])],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], name="gate", then_branch=body, else_branch=body)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("c", 9, [])], [helper.make_tensor_value_info("y", 1, [2])]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "g.onnx")
    with pytest.raises(UnsupportedError, match="hidden") as caught:
        find_random(load(tmp_path / "g.onnx", own=True))
    assert caught.value.hints
