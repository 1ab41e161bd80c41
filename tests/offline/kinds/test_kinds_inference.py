"""Models that train nothing."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from kind_files import HEAD, inference
from onnx import parser

from gopt import api
from gopt.errors import GoptError, InputError
from gopt.offline.kinds.inference import NO_STEP, InferenceInspection, inspect_inference


def found(path: Path) -> InferenceInspection:
    with pytest.raises(GoptError) as refusal:
        api.load(path)
    return inspect_inference(path, refusal.value)


def test_inputs_weights_and_the_way_to_a_step(tmp_path: Path) -> None:
    record = found(inference(tmp_path / "m.onnx"))
    assert [(each.name, each.dtype, each.shape) for each in record.inputs] == [("x", "float32", ("N", 4))]
    assert (record.weights.tensors, record.weights.elements, record.weights.bytes) == (1, 8, 32)
    assert record.refusal.startswith("this is not a training step")
    assert record.next.endswith("--optimizer adamw --dim N=8 -o step.onnx; choose the sizes; then gopt shard")
    assert record.to_json()["what"] == "inference_model"


def test_an_output_of_an_inputs_type_is_no_state(tmp_path: Path) -> None:
    text = "g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }"
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    record = found(tmp_path / "m.onnx")
    assert record.refusal == NO_STEP


def test_notes(tmp_path: Path) -> None:
    text = """g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0},
        float[2] v = {1,1}> { y = BatchNormalization(x, s, b, m, v) }"""
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    assert any("BatchNormalization in inference mode" in note for note in found(tmp_path / "m.onnx").notes)


def test_states_without_a_loss_are_told(tmp_path: Path) -> None:
    text = "g (float[2] w, float[2] g) => (float[2] n) <float[2] r = {1,1}> { s = Mul(g, r)  n = Sub(w, s) }"
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    assert found(tmp_path / "m.onnx").carried == {"w": "n"}


def test_parameters_may_be_among_the_inputs(tmp_path: Path) -> None:
    text = "g (float[2,2] x, float[2,2] w) => (float[2,2] y) { y = MatMul(x, w) }"
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    record = found(tmp_path / "m.onnx")
    assert record.weights.tensors == 0 and any("among the inputs" in note for note in record.notes)


def test_a_damaged_file_stays_refused(tmp_path: Path) -> None:
    path = inference(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InputError) as refusal:
        api.load(path)
    with pytest.raises(InputError):
        inspect_inference(path, refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2,2] x, int64[2] k) => (float[2,3] y, int64[2] m) <float[2,3] w = {1,2,3,4,5,6}>"
        " { zero = Constant <value_int = 0> () y = MatMul(x, w) m = CumSum(k, zero) }",
        "g (float[2,2] x, float[1] t) => (float[2,3] y, float[1] u) <float[2,3] w = {1,2,3,4,5,6}>"
        " { zero = Constant <value_int = 0> () y = MatMul(x, w) u = CumSum(t, zero) }",
    ],
    ids=["of whole numbers", "of one element"],
)
def test_an_output_that_cannot_be_a_tensor_of_states_is_not_called_one(text: str, tmp_path: Path) -> None:
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    assert "replaces no input" not in found(tmp_path / "m.onnx").refusal
