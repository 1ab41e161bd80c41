"""Adam without its epsilon is noted: once, and only where nothing else keeps the root from zero."""

from __future__ import annotations

from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, NAMES, Builder, perceptron

import gopt

FORMS = {
    "bare": (True, lambda b, m, v: b.op("Div", m, b.op("Sqrt", v))),
    "corrected": (True, lambda b, m, v: b.op("Div", m, b.op("Sqrt", b.op("Div", v, b.const(0.1))))),
    "scaled root": (True, lambda b, m, v: b.op("Div", m, b.op("Mul", b.op("Sqrt", v), b.const(3.0)))),
    "power": (True, lambda b, m, v: b.op("Div", m, b.op("Pow", v, b.const(0.5)))),
    "reciprocal": (True, lambda b, m, v: b.op("Mul", m, b.op("Reciprocal", b.op("Sqrt", v)))),
    "epsilon outside": (False, lambda b, m, v: b.op("Div", m, b.op("Add", b.op("Sqrt", v), b.const(1e-8)))),
    "epsilon inside": (False, lambda b, m, v: b.op("Div", m, b.op("Sqrt", b.op("Add", v, b.const(1e-8))))),
    "kept from zero": (False, lambda b, m, v: b.op("Div", m, b.op("Max", b.op("Sqrt", v), b.const(1e-8)))),
}


def step(folder: Path, form: str) -> Path:
    b = Builder()
    net = perceptron(b)
    b.output("loss", net.loss, ())
    for name, shape in net.params.items():
        g, m, v = net.gradients[name], b.small(f"{name}.m", shape), b.small(f"{name}.v", shape)
        m1 = b.op("Add", b.op("Mul", m, b.const(0.9)), b.op("Mul", g, b.const(0.1)))
        v1 = b.op("Add", b.op("Mul", v, b.const(0.99)), b.op("Mul", b.op("Mul", g, g), b.const(0.01)))
        b.output(f"{name}.m_out", m1, shape)
        b.output(f"{name}.v_out", v1, shape)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", FORMS[form][1](b, m1, v1), b.const(0.01))), shape)
    return b.save(folder / "step.onnx")


@pytest.mark.parametrize("form", FORMS)
def test_roots_without_epsilon_are_noted(tmp_path, form):
    notes = [note for note in gopt.load(step(tmp_path, form)).training.notes if "epsilon" in note]
    assert len(notes) == FORMS[form][0]
    assert all("as do 3 more" in note and "w0.v" in note for note in notes)


@pytest.mark.parametrize("name", NAMES)
def test_fixtures_keep_theirs(name):
    assert not [note for note in gopt.load(FIXTURES / f"{name}.onnx").training.notes if "epsilon" in note]


def test_shard_says_so(tmp_path, capsys):
    assert main(["shard", str(step(tmp_path, "bare")), "--ranks", "2", "-o", str(tmp_path / "out")]) == 0
    assert "no epsilon" in "".join(capsys.readouterr())
