"""The result of a run as a record and as JSON."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gopt.runtime.training.job import Progress, not_finite_error
from gopt.runtime.training.run_result import NotFinite, RunResult

NAN = float("nan")


def result(*losses: float, **more: object) -> RunResult:
    steps = [Progress(step, (loss,), 0.25, 16) for step, loss in enumerate(losses, 3)]
    return RunResult(folder=Path("out"), engine="threads", ranks=1, steps=steps, asked=9, **more)  # type: ignore[arg-type]


def test_figures_are_those_of_all_steps():
    found = result(2.0, 1.0)
    assert (found.losses, found.seconds, found.samples_per_second) == ([2.0, 1.0], 0.5, 64.0)
    assert result().samples_per_second == 0.0


@pytest.mark.parametrize(
    ("losses", "bad"), [([1.0, 2.0], None), ([1.0, NAN, float("inf")], NotFinite(2, 4)), ([], None)]
)
def test_losses_that_are_not_finite_are_counted(losses, bad):
    assert result(*losses).not_finite == bad


def test_json():
    record = result(2.0, NAN, resumed=2, checkpoint=Path("ck"), roles={"trainers": 1, "servers": 1}).to_json()
    assert list(record) == [
        "format", "folder", "engine", "ranks", "shared_calls", "steps", "asked", "resumed", "first", "last",
        "not_finite", "seconds", "samples_per_second", "checkpoint", "roles",
    ]  # fmt: skip
    assert record["first"] == {
        "step": 3, "loss": 2.0, "losses": [2.0], "seconds": 0.25, "samples_per_second": 64.0,
    }  # fmt: skip
    assert (record["steps"], record["last"]["step"], record["checkpoint"]) == (2, 4, "ck")
    assert record["not_finite"] == {"steps": 1, "first": 4}
    assert result(2.0, record=Path("run.json")).to_json()["record"] == "run.json"
    assert result().to_json()["first"] is None and "roles" not in result().to_json()


def test_a_loss_that_is_no_number_in_the_first_step_comes_of_no_update():
    first, later = (not_finite_error({"loss": math.nan}, done) for done in (0, 7))
    assert later.message == "the loss is nan" and first.message.startswith("the loss is nan in the data or the first")
    assert first.hints[0].startswith("look there") and later.hints[0].startswith("lower the learning rate")
