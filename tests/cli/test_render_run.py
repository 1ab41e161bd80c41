"""The end of a run as people see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gopt.cli.render_run import facts, render_run, sparkline

from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.training.job import JobUsage, Progress
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


@pytest.mark.parametrize(
    ("rule", "ranks", "told"), [("sum", 2, True), ("sum:w", 2, True), ("mean", 2, False), ("sum", 1, False)]
)
def test_a_loss_beside_summed_gradients_is_said_to_be_a_mean(rule, ranks, told, capsys):
    """A loss summed over samples stood there as the mean over the ranks, without a word."""
    text = shown(capsys, [2.5, 2.0], loss_reduction=rule, ranks=ranks)
    assert ("mean over the ranks; their gradients are added up" in text) == told


def test_facts_of_a_step_fit_beside_a_bar():
    usage = JobUsage(tokens=64_000, memory=12_345_678_901, flops=10**12, peak=4e12)
    step = Progress(1234, (2.34567,), 0.5, 32, usage=usage)
    assert facts(step) == "loss 2.346, 128000 tokens/s, 12 GB, 50%"
    assert facts(Progress(1, (2.5,), 0.5, 32)) == "loss 2.5, 64 samples/s"
    assert len(f"step 1234/10000 {'━' * 8} {facts(step)} 0:12:34") <= 80


def test_what_a_run_used(capsys):
    steps = [Progress(number, (2.5,), 0.5, 32, usage=JobUsage(1000, number * 10**9, 10**12, 4e12)) for number in (1, 2)]
    text = shown(capsys, [], steps=steps)
    assert "2000 tokens/s, 2.00 GB of memory at most, 50.0% of the peak of floating-point operations" in text
    told = RunResult(folder=Path("out"), engine="threads", ranks=1, steps=steps, asked=2).to_json()
    assert (told["tokens_per_second"], told["memory"], told["utilisation"]) == (2000.0, 2 * 10**9, 0.5)


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
