"""What a loss reads: the operand of the last operator, where the loss applies that operator itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from test_losses import cross_entropy, drawn, stepped, with_offsets

import gopt


def notes_of(model: onnx.ModelProto, folder: Path, **options: object) -> list[str]:
    onnx.save(model, folder / "m.onnx")
    made = gopt.derive(folder / "m.onnx", folder / "s.onnx", gopt.DeriveOptions(optimizer="sgd", **options), force=True)
    return [note for note in made.notes if "applies itself" in note]


def test_cross_entropy_reads_what_a_softmax_reads(tmp_path: Path):
    model = with_offsets((6, 5), last=("Softmax", {"axis": -1}))
    assert notes_of(model, tmp_path, loss="cross-entropy") == [
        "'z' is a Softmax, which cross-entropy applies itself: it reads 'y'"
    ]
    x, labels = drawn((6, 5), None, None)
    (tmp_path / "s.onnx").unlink()
    loss, slopes = stepped(model, tmp_path, {"x": x, "label": labels}, loss="cross-entropy")
    wanted, gradient = cross_entropy(x + numpy_helper.to_array(model.graph.initializer[0]), labels, None)
    assert loss == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-4, atol=1e-6)


def test_copies_behind_the_softmax_are_passed_over(tmp_path: Path):
    model = with_offsets((6, 5), last=("Softmax", {"axis": 1}))
    model.graph.node.append(helper.make_node("Reshape", ["z", "shape"], ["reshaped"]))
    model.graph.node.append(helper.make_node("Identity", ["reshaped"], ["out"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 5]), "shape"))
    model.graph.output[0].name = "out"
    assert len(notes_of(model, tmp_path, loss="cross-entropy")) == 1


def test_a_softmax_over_another_dimension_stays(tmp_path: Path):
    model = with_offsets((6, 5), last=("Softmax", {"axis": 0}))
    assert notes_of(model, tmp_path, loss="cross-entropy") == []


def test_other_losses_read_a_softmax_as_it_is(tmp_path: Path):
    assert notes_of(with_offsets((6, 5), last=("Softmax", {"axis": 1})), tmp_path, loss="mse") == []


def test_binary_cross_entropy_reads_what_a_sigmoid_reads(tmp_path: Path):
    model = with_offsets((4, 3), last=("Sigmoid", {}))
    assert len(notes_of(model, tmp_path, loss="binary-cross-entropy")) == 1
