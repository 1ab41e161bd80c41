"""Counts and the time left."""

from __future__ import annotations

import sys

import pytest
from gopt.cli import render_progress
from gopt.cli.render_progress import PlainLines, counted_progress, time_left


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(render_progress, "perf_counter", lambda: now[0])
    return now


def test_plain_lines_come_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    for seconds, done in ((0, 0), (1, 100), (2, 312), (3, 400), (12, 700), (14, 772)):
        clock[0] = 100.0 + seconds
        lines.advance("confirming", done, 772)
    assert capsys.readouterr().err.splitlines() == [
        "gopt: note: confirming: 312 of 772, about 3 s left",
        "gopt: note: confirming: 700 of 772, about 1 s left",
    ]


def test_what_is_short_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    for phase in ("a", "b", "c"):
        for done in range(3):
            clock[0] += 0.4
            lines.advance(phase, done, 3)
    assert capsys.readouterr().err == ""


def test_a_phase_without_a_count_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    lines.advance("reading")
    clock[0] += 30
    lines.advance("reading")
    assert capsys.readouterr().err == ""


def test_time_left() -> None:
    assert time_left(10, 1, 3) == "about 20 s left"
    assert time_left(100, 1, 10) == "about 15 min left"


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with counted_progress() as advance:
        advance("reading")
        advance("confirming", 312, 772)
    shown = capsys.readouterr().err
    assert "312 of 772" in shown and "confirming" in shown


def test_nothing_on_a_pipe_but_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with counted_progress() as advance:
        advance("reading", 1, 2)
    assert capsys.readouterr().err == ""
