"""The end of a run as people see it."""

from __future__ import annotations

from typing import Any

import pytest
from gopt.cli.render_run import render_run, sparkline

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "bars"),
    [([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0], "▁█"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
     ([0.0, NAN, 7.0, INF, -INF], "▁?█??"), ([NAN], "?"), ([], "")],
)  # fmt: skip
def test_bars(values, bars):
    assert sparkline(values) == bars


def test_many_values_share_a_bar():
    assert sparkline([0.0] * 50 + [7.0] * 50, width=2) == "▁█"
    assert sparkline([0.0, 7.0, 3.5, 3.5, 14.0, 0.0], width=3) == "▁▁█"
    assert len(sparkline(list(range(1000)))) == 40


def record(**changes: Any) -> dict[str, Any]:
    return {
        "ranks": 2, "steps": 4, "asked": 4, "resumed": 0, "seconds": 2.0, "shared_calls": 0, "engine": "threads",
        "samples_per_second": 64.0, "first": {"loss": 2.5}, "last": {"loss": 1.25, "step": 4}, "not_finite": None,
        "checkpoint": None,
    } | changes  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], losses: list[float], **changes: Any) -> str:
    render_run(record(**changes), losses)
    return capsys.readouterr().out


def test_a_run(capsys):
    text = shown(capsys, [2.5, 2.0, 1.5, 1.25])
    assert "4 steps on 2 ranks (threads) in 2.0 s: 500.0 ms a step, 64 samples/s" in text
    assert "loss 2.5 → 1.25" in text and "the values are not kept" in text
    assert "1 step on 1 rank (mpi, 3 calls in shared memory)" in shown(
        capsys, [2.5], steps=1, ranks=1, engine="mpi", shared_calls=3
    )


def test_where_the_values_are(capsys):
    text = shown(capsys, [2.5], checkpoint="ck")
    assert "last checkpoint: ck/step_00000004" in text and "not kept" not in text


def test_nothing_to_do(capsys):
    text = shown(capsys, [], resumed=7, checkpoint="ck")
    assert text.startswith("nothing to do: ck is at step 7 already, and --steps 4 counts from the start")


def test_a_loss_that_is_no_number(capsys):
    text = shown(capsys, [2.5, NAN], not_finite={"steps": 1, "first": 2})
    assert "warning: the loss is not finite in 1 step, first in step 2;" in text
