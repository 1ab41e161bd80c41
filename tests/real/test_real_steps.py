"""Steps of real models and real optimizers, exported from plain PyTorch code, verify on every stage and many ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, calls, edit_ranks
from onnx import ModelProto, helper
from products import part

REAL = FIXTURES / "real"
NAMES = sorted(path.stem for path in REAL.glob("*.onnx"))
LARGE = {"llama"}
"""Those that run with ``-m slow`` alone."""


def sharded(tmp_path: Path, name: str, stage: int, ranks: int) -> Path:
    out = tmp_path / "out"
    assert (
        main(["shard", str(REAL / f"{name}.onnx"), "--ranks", str(ranks), "--stage", str(stage), "-o", str(out)]) == 0
    )
    return out


def verified(out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, object]]:
    """Exit code and result of ``gopt verify``."""
    capsys.readouterr()
    code = main(["verify", str(out), "--json", *options])
    text = capsys.readouterr().out
    return code, json.loads(text) if text.strip() else {}


def test_the_families_that_must_be_here():
    """A BERT with key biases, a ResNet with running statistics, dropout, and a clip on gradients that are views."""
    assert {"bert_tiny", "resnet", "dropout_mlp", "dropout_mlp_random", "clip_on_views"} <= set(NAMES)
    names = {each.name for each in onnx.load(REAL / "bert_tiny.onnx").graph.input}
    assert "bert.encoder.layer.0.attention.self.key.bias" in names
    assert any(name.endswith("running_var") for name in (i.name for i in onnx.load(REAL / "resnet.onnx").graph.input))
    random = onnx.load(REAL / "dropout_mlp_random.onnx").graph.node
    assert any(node.op_type == "RandomUniform" for node in random)


@pytest.mark.parametrize("name", part([name for name in NAMES if name not in LARGE], 5))
def test_sharded_parameters_on_three_ranks(name, tmp_path, capsys):
    """Three ranks: their mean is rounded, and a state that is noise shows it."""
    code, result = verified(sharded(tmp_path, name, 3, 3), capsys)
    assert code == 0, result


@pytest.mark.parametrize("name", ["bert_tiny", "clip_on_views"])
def test_sharded_optimizers_on_eight_ranks(name, tmp_path, capsys):
    code, result = verified(sharded(tmp_path, name, 1, 8), capsys)
    assert code == 0, result


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_stage(name, stage, ranks, tmp_path, capsys):
    code, result = verified(sharded(tmp_path, name, stage, ranks), capsys)
    assert code == 0, result


def scaled(model: ModelProto, output: str, factor: float) -> None:
    """Multiply what a call gives under the name `output` before anybody reads it."""
    graph = model.graph
    for node in graph.node:
        node.input[:] = [f"{output}.planted" if name == output else name for name in node.input]
    place = next(i for i, node in enumerate(graph.node) if output in node.output)
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(factor), "planted"))
    nodes = list(graph.node)
    nodes.insert(place + 1, helper.make_node("Mul", [output, "planted"], [f"{output}.planted"]))
    del graph.node[:]
    graph.node.extend(nodes)


def of_the_values(model: ModelProto) -> str:
    """The reduced gradient of the largest tensor that calls of a rank of stage 0 give."""
    shapes = {each.name: [d.dim_value for d in each.type.tensor_type.shape.dim] for each in model.graph.value_info}
    found = [name for node in calls(model, "AllReduce") for name in node.output]
    return max(found, key=lambda name: (np.prod(shapes.get(name, [0])), name))


@pytest.mark.parametrize("name", ["bert_tiny", "clip_on_views", "dropout_mlp"])
def test_a_wrong_gradient_is_seen_beside_noise(name, tmp_path, capsys):
    """The floor for states that are noise does not hide one gradient that is two per cent too large."""
    out = sharded(tmp_path, name, 0, 2)
    edit_ranks(out, lambda model: scaled(model, of_the_values(model), 1.02))
    code, _ = verified(out, capsys, "--no-confirm", "--steps", "2")
    assert code == 1
