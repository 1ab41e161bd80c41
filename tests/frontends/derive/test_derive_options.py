"""Requests that make no step: one line, a hint, and the exit code of the contract."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from derive_cases import forward_model
from gopt.cli.main import main

from gopt.errors import OptionError
from gopt.frontends.derive.options import DeriveOptions


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 1e60}, {"lr": 1e-60}, {"lr": 0.0}, {"clip_norm": 1e60}, {"clip_value": 1e-60}, {"weight_decay": 1e60},
        {"weight_decay": -1.0}, {"loss_scale": 1e39}, {"loss_scale": 1e-60}, {"loss_scale": 0.0},
        {"optimizer": "adam", "optimizer_options": {"eps": 1e60}},
        {"optimizer": "adam", "optimizer_options": {"beta1": 1.0}},
        {"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"label_smoothing": float("nan")},
        {"ignore_index": 2**63}, {"loss": "mse", "ignore_index": 0}, {"loss": "mse", "label_smoothing": 0.1},
        {"loss": "binary-cross-entropy", "class_axis": 1},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_make_no_step_are_refused(given: dict[str, object]):
    """Infinity in float32 would make every parameter not a number, and zero would train nothing."""
    with pytest.raises(OptionError) as caught:
        DeriveOptions(**{"loss": "cross-entropy", "optimizer": "sgd", **given})
    assert caught.value.hints and "\n" not in caught.value.message


def test_an_option_of_an_attached_loss_is_refused_beside_an_output():
    options = DeriveOptions(loss="logits", optimizer="sgd", ignore_index=1)
    assert options.criterion.ignore_index == 1  # the model says what ``logits`` is


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    model = forward_model()
    for each in (model.graph.input[0], model.graph.output[0]):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx"), str(tmp_path / "s.onnx")


def derived(*arguments: str) -> int:
    return main(["derive", *arguments, "--loss", "cross-entropy", "--optimizer", "sgd"])


def test_the_model_itself_is_not_replaced(files: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    before = Path(files[0]).read_bytes()
    assert derived(files[0], "--dim", "batch=4", "-o", files[0], "--force") == 2
    assert "is the model itself" in capsys.readouterr().err
    assert Path(files[0]).read_bytes() == before


def test_a_dimension_has_one_size(files: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    assert derived(files[0], "--dim", "batch=4", "--dim", "batch=5", "-o", files[1]) == 2
    assert "--dim batch is given as 4 and as 5" in capsys.readouterr().err


def test_a_step_is_no_forward_model(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert derived(files[0], "--dim", "batch=4", "-o", files[1]) == 0
    assert derived(files[1], "-o", str(tmp_path / "again.onnx")) == 3
    assert "is a training step, not a forward model" in capsys.readouterr().err
