"""States whose new value is of another type are refused by name; updates that read another parameter are right."""

from __future__ import annotations

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import Builder, Network, perceptron


def step(new_weight) -> Builder:
    b = Builder()
    net = perceptron(b, (2, 2, 2), bias=False)
    b.output("loss", net.loss, ())
    new, shape, dtype = new_weight(b, net)
    b.output("w0_out", new, shape, dtype)
    b.output("w1_out", b.op("Sub", "w1", b.op("Mul", net.gradients["w1"], b.const(0.1))), (2, 2))
    return b


def moved(b: Builder, net: Network) -> str:
    return b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1)))


OTHER_TYPES = {
    "flat": lambda b, net: (b.op("Reshape", moved(b, net), b.const([4], "int64")), (4,), "float32"),
    "a dimension more": lambda b, net: (b.op("Unsqueeze", moved(b, net), b.const([0], "int64")), (1, 2, 2), "float32"),
    "a half": lambda b, net: (b.op("Cast", moved(b, net), to=10), (2, 2), "float16"),
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_a_new_value_of_another_type_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    step(OTHER_TYPES[name]).save(tmp_path / "m.onnx")
    assert main(["shard", "m.onnx", "--ranks", "2", "--states", "w0=w0_out"]) == 3
    said = capsys.readouterr().err
    assert "state 'w0' is float32[2,2], and its new value 'w0_out' is" in said


def scaled(b: Builder, net: Network, other: str) -> tuple[str, tuple[int, ...], str]:
    new = b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.op("Mul", other, b.const(0.1))))
    return new, (2, 2), "float32"


OTHERS_READ = {
    "its mean": lambda b, net: scaled(b, net, b.op("ReduceMean", b.op("Abs", "w1"), keepdims=0)),
    "all of it": lambda b, net: scaled(b, net, b.op("Abs", "w1")),
    "a constant": lambda b, net: scaled(b, net, b.const(np.full((2, 2), 0.5))),
}


@pytest.mark.parametrize("stage", ["0", "1", "3"])
@pytest.mark.parametrize("name", OTHERS_READ)
def test_an_update_that_reads_another_parameter_is_right(tmp_path, monkeypatch, name, stage):
    monkeypatch.chdir(tmp_path)
    step(OTHERS_READ[name]).save(tmp_path / "m.onnx")
    assert main(["shard", "m.onnx", "--ranks", "2", "--stage", stage, "-o", "out"]) == 0
    assert main(["verify", "out", "--steps", "2", "--no-confirm"]) == 0


@pytest.mark.parametrize("power", [1, 2])
def test_a_moment_without_its_parameter_is_refused(tmp_path, monkeypatch, capsys, power):
    """The mean of the ranks' squares is not a square of the mean; the graph says nothing of a parameter it is for."""
    monkeypatch.chdir(tmp_path)
    b = Builder()
    net = perceptron(b, (2, 2, 2), bias=False)
    b.output("loss", net.loss, ())
    b.output("w0_out", moved(b, net), (2, 2))
    moment, gradient = b.small("m1", (2, 2)), net.gradients["w1"]
    for _ in range(power - 1):
        gradient = b.op("Mul", gradient, net.gradients["w1"])
    kept = b.op("Add", b.op("Mul", moment, b.const(0.9)), b.op("Mul", gradient, b.const(0.1)))
    b.output("m1_out", kept, (2, 2))
    b.save(tmp_path / "m.onnx")
    assert main(["shard", "m.onnx", "--ranks", "2"]) == 4
    assert "state 'm1' follows the backward" in capsys.readouterr().err
