"""Curves for TensorBoard: their values, and a folder that its own reader reads, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gopt.errors import OptionError
from gopt.runtime.training.evaluation import Evaluation
from gopt.runtime.training.job import JobUsage, Progress
from gopt.verbs.curves import curves, scalars
from gopt.verbs.run_options import RunOptions


def step(number: int, loss: float = 0.5) -> Progress:
    evaluation = Evaluation({"loss": loss / 2, "accuracy": 0.75}, 10, 0.1)
    more = {"balance": (1.0, 3.0)}
    return Progress(number, (loss, 3 * loss), 2.0, 32, {}, more, {"lr": 0.01}, evaluation, usage=JobUsage(tokens=640))


def test_the_values_of_a_step():
    assert scalars(step(3)) == {
        "train/loss": 1.0, "train/balance": 2.0, "hyper/lr": 0.01, "eval/loss": 0.25, "eval/accuracy": 0.75,
        "speed/samples_per_second": 16.0, "speed/tokens_per_second": 320.0,
    }  # fmt: skip


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs the package tensorboard") as error:
        RunOptions(tensorboard="curves")
    assert error.value.hints == ("pip install 'gopt[tensorboard]'",)


def test_tensorboard_reads_them_and_a_resumed_run_replaces_its_steps(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, loss in ((1, 0.5), (3, 0.25)):
        with curves(tmp_path / "curves") as add:
            for number in range(first, 5):
                add(step(number, loss))
    found = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert set(found.Tags()["scalars"]) == set(scalars(step(1)))
    losses = {each.step: each.value for each in found.Scalars("train/loss")}
    assert losses == {1: 1.0, 2: 1.0, 3: 0.5, 4: 0.5}
