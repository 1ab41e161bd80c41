"""Loaded values that the next step would not read are refused; the others stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from onnx import TensorProto, helper, numpy_helper

SHAPE = (4, 3)


def step_file(folder: Path, *, reads_first: bool = False, started: int = 0) -> Path:
    """Momentum whose first step stores the gradient; ``reads_first``: even that step adds the old momentum."""
    first = ["m", "g"] if reads_first else ["g", "zeros"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Sub", ["y", "t"], ["e"]),
        helper.make_node("Mul", ["e", "e"], ["s"]),
        helper.make_node("ReduceMean", ["s"], ["loss"], keepdims=0),
        helper.make_node("Transpose", ["x"], ["xt"]),
        helper.make_node("Mul", ["e", "two"], ["de"]),
        helper.make_node("MatMul", ["xt", "de"], ["g"]),
        helper.make_node("Equal", ["zero", "begun"], ["fresh"]),
        helper.make_node("Add", first, ["m_first"]),
        helper.make_node("Mul", ["m", "beta"], ["kept"]),
        helper.make_node("Add", ["kept", "g"], ["m_later"]),
        helper.make_node("Where", ["fresh", "m_first", "m_later"], ["m_out"]),
        helper.make_node("Mul", ["m_out", "lr"], ["by"]),
        helper.make_node("Sub", ["w", "by"], ["w_out"]),
        helper.make_node("Add", ["begun", "one"], ["begun_out"]),
    ]

    def value(name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    zeros = np.zeros(SHAPE, np.float32)
    stored = {"w": zeros + 1, "m": zeros, "begun": np.array(started), "zero": np.array(0), "one": np.array(1),
              "two": np.array(2 / 18, np.float32), "beta": np.array(0.9, np.float32), "zeros": zeros}  # fmt: skip
    graph = helper.make_graph(
        nodes, "step",
        [value("x", (6, 4)), value("t", (6, 3)), value("lr", ()), value("w", SHAPE), value("m", SHAPE),
         value("begun", (), TensorProto.INT64)],
        [value("loss", ()), value("w_out", SHAPE), value("m_out", SHAPE), value("begun_out", (), TensorProto.INT64)],
        [numpy_helper.from_array(each, name) for name, each in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "step.onnx")
    return folder / "step.onnx"


def loaded(model: Path, **values: np.ndarray) -> int:
    np.savez(model.parent / "values.npz", **values)
    new = model.parent / "new.onnx"
    return main(["load-state", str(model), str(model.parent / "values.npz"), "-o", str(new), "--force"])


MOMENTUM = np.full(SHAPE, 0.5, np.float32)


def test_a_value_that_the_first_step_makes_anew_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = step_file(tmp_path)
    assert loaded(model, m=MOMENTUM) == 3
    said = capsys.readouterr().err
    assert "'m' would not be read: 'begun' is 0" in said and "give 'begun' as 1 in the file" in said
    assert not (tmp_path / "new.onnx").exists()
    assert loaded(model, m=MOMENTUM, begun=np.array(0)) == 3


def test_a_value_that_counts_is_taken(tmp_path: Path):
    assert loaded(step_file(tmp_path), m=MOMENTUM, begun=np.array(1)) == 0
    assert loaded(step_file(tmp_path), w=MOMENTUM) == 0
    assert loaded(step_file(tmp_path, started=1), m=MOMENTUM) == 0
    assert loaded(step_file(tmp_path, reads_first=True), m=MOMENTUM) == 0
