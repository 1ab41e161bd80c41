"""The training and the optimizer graph of ONNX Runtime's artifacts, written by hand: see ``kind_files``."""

from __future__ import annotations

from pathlib import Path

from helpers import FIXTURES
from kind_files import ort_optimizer, ort_training

from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.ort_models import inspect_ort_optimizer, inspect_ort_training, is_ort_optimizer, is_ort_training


def test_training_graph(tmp_path: Path) -> None:
    record = inspect_ort_training(FileCandidate(ort_training(tmp_path / "m")))
    assert (record.loss, record.forward, record.backward, record.accumulators) == ("loss", 2, 2, 1)
    assert [(each.name, each.shape, each.bytes) for each in record.parameters] == [("w", (4, 2), 32)]
    assert [(each.name, each.shape) for each in record.inputs] == [("x", ("batch", 4))]


def test_optimizer_graph(tmp_path: Path) -> None:
    record = inspect_ort_optimizer(FileCandidate(ort_optimizer(tmp_path / "m")))
    assert (record.optimizer, record.max_norm) == ("AdamWOptimizer", 1.0)
    assert abs(record.constants["beta"] - 0.999) < 1e-6
    assert record.inputs[:3] == ("learning_rate", "step", "params")


def test_a_step_with_an_opaque_optimizer_is_none_of_them() -> None:
    candidate = FileCandidate(FIXTURES / "mlp_ort_adamw.onnx")
    assert not is_ort_optimizer(candidate) and not is_ort_training(candidate)
