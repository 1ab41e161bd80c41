"""Functions that draw random numbers: each rank would draw its own, and no analysis of the graph sees it."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from helpers import FIXTURES
from onnx import helper

import gopt
from gopt.errors import UnsupportedError

HEAD = '<domain: "my", opset_import: ["" : 20, "my" : 1]>'
DRAWS = {
    "without a seed": f"{HEAD} Noise (x) => (y) {{ n = RandomNormalLike(x) y = Add(x, n) }}",
    "with a seed": f"{HEAD} Noise (x) => (y) {{ n = RandomNormalLike<seed=1.0>(x) y = Add(x, n) }}",
    "dropout": f"{HEAD} Noise (x) => (y) {{ t = Constant<value = bool {{1}}>() y = Dropout(x, , t) }}",
    "in a branch": f"""{HEAD} Noise (x) => (y) {{ t = Constant<value = bool {{1}}>()
        y = If (t) <then_branch = a () => (p) {{ p = RandomNormalLike(x) }},
                    else_branch = b () => (q) {{ q = Identity(x) }}> }}""",
}


def noisy(folder: Path, *functions: str, call: str = "Noise") -> Path:
    """The step of an MLP whose forward reads the batch through a function."""
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    x = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["noisy" if name == x else name for name in node.input]
    model.graph.node.insert(0, helper.make_node(call, [x], ["noisy"], domain="my"))
    opset = next(each.version for each in model.opset_import if each.domain == "")
    for text in functions:
        model.functions.append(onnx.parser.parse_function(text.replace(": 20", f": {opset}")))
    model.opset_import.add(domain="my", version=1)
    onnx.save(model, folder / "step.onnx")
    return folder / "step.onnx"


@pytest.mark.parametrize("name", DRAWS)
def test_a_function_that_draws_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UnsupportedError, match=r"Noise .* is a function that draws random numbers") as caught:
        gopt.load(noisy(tmp_path, DRAWS[name]))
    assert any("inline" in hint for hint in caught.value.hints)


def test_a_function_that_calls_one_is_refused(tmp_path: Path):
    outer = f"{HEAD} Outer (x) => (y) {{ y = my.Noise(x) }}"
    with pytest.raises(UnsupportedError, match=r"Outer .* by RandomNormalLike 'n'"):
        gopt.load(noisy(tmp_path, DRAWS["without a seed"], outer, call="Outer"))


def test_others_are_taken(tmp_path: Path):
    """A dropout without a mode passes its operand on; a function that nobody calls does nothing."""
    quiet = f"{HEAD} Noise (x) => (y) {{ y = Dropout(x) }}"
    idle = DRAWS["without a seed"].replace("Noise", "Idle")
    gopt.shard(gopt.load(noisy(tmp_path, quiet, idle)), 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").equal


def test_a_dropout_without_a_mode_is_not_random(tmp_path: Path):
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    x = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["kept" if name == x else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Dropout", [x], ["kept"]))
    onnx.save(model, tmp_path / "step.onnx")
    assert not gopt.load(tmp_path / "step.onnx").training.random
    gopt.shard(gopt.load(tmp_path / "step.onnx"), "tp=2")  # whose ranks must compute the same
