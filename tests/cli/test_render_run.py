"""The end of a run as people see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gopt.cli.render_run import render_run, sparkline

from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.training.job import Progress
from gopt.runtime.training.run_result import RunResult

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


def shown(capsys: pytest.CaptureFixture[str], losses: list[float], **changes: Any) -> str:
    steps = [Progress(step, (loss, loss), 0.5, 32) for step, loss in enumerate(losses, 1)]
    given: dict[str, Any] = {"folder": Path("out"), "engine": "threads", "ranks": 2, "steps": steps, "asked": 4}
    render_run(RunResult(**given | changes))
    return capsys.readouterr().out


def test_a_run(capsys):
    text = shown(capsys, [2.5, 2.0, 1.5, 1.25])
    assert "4 steps on 2 ranks (threads) in 2.0 s: 500.0 ms a step, 64 samples/s" in text
    assert "loss 2.5 → 1.25" in text and "the values are not kept" in text
    assert "1 step on 1 rank (mpi, 3 calls in shared memory)" in shown(
        capsys, [2.5], ranks=1, engine="mpi", shared_calls=3
    )


def test_a_split(capsys):
    server = ServerSummary(0, 2, 4, 2_000_000, 1_000_000, 1, {0: 0.5, 1: 2.0}, {1: 2})
    text = shown(capsys, [2.5], roles={"trainers": 2, "servers": 1}, servers=[server])
    assert "1 step on 2 trainers and 1 server (threads)" in text
    assert text.splitlines()[-2].split() == ["0", "4", "2.000", "1.000", "1", "1:", "2,", "0:", "0.5"]


def test_data_that_is_read_again(capsys):
    steps = [Progress(1, (2.5,), 0.5, 32, {"epoch": 2.5})]
    assert "the samples of the data were read 2.5 times" in shown(capsys, [], steps=steps)
    assert "were read" not in shown(capsys, [2.5])


def test_where_the_values_are(capsys):
    text = shown(capsys, [2.5, 2.0], checkpoint=Path("ck"))
    assert "last checkpoint: ck/step_00000002" in text and "not kept" not in text


def test_nothing_to_do(capsys):
    text = shown(capsys, [], resumed=7, checkpoint=Path("ck"))
    assert text.startswith("nothing to do: ck is at step 7 already, and --steps 4 counts from the start")


def test_a_loss_that_is_no_number(capsys):
    text = shown(capsys, [2.5, NAN])
    assert "warning: the loss is not finite in 1 step, first in step 2;" in text
