"""Counts and the time left."""

from __future__ import annotations

import sys
from threading import Event

import pytest
from gopt.cli import render_progress
from gopt.cli.render_progress import PlainLines, progress, time_left


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(render_progress, "EVERY", 10.0)
    monkeypatch.setattr(render_progress, "perf_counter", lambda: now[0])
    return now


def said(lines: PlainLines, clock: list[float], seconds: float) -> None:
    """Let seconds go by, with a look at each."""
    end = clock[0] + seconds
    while clock[0] < end:
        clock[0] += 1
        lines.say()


def test_plain_lines_come_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    for seconds, done in ((1, 0), (4, 100), (6, 312), (4, 400), (6, 700), (15, 772)):
        lines.advance("confirming", done, 772)
        said(lines, clock, seconds)
    assert capsys.readouterr().err.splitlines() == [
        "gopt: note: confirming: 312 of 772, about 15 s left",
        "gopt: note: confirming: 700 of 772, about 2 s left",
        "gopt: note: confirming",
    ]


def test_what_is_short_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    said(lines, clock, 30)
    for phase in ("a", "b", "c"):
        for done in range(3):
            lines.advance(phase, done, 3)
            said(lines, clock, 3)
        lines.advance(f"behind {phase}")
        said(lines, clock, 9)
    assert capsys.readouterr().err == ""


def test_a_long_phase_without_a_count_says_so_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    for phase in ("reading", "tracing", "reading"):
        lines.advance(phase)
        said(lines, clock, 40)
    assert capsys.readouterr().err.splitlines() == [
        f"gopt: note: {phase}" for phase in ("reading", "tracing", "reading")
    ]


def test_a_phase_is_told_while_it_lasts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = Event()
    monkeypatch.setattr(render_progress, "EVERY", 0.0)
    monkeypatch.setattr(render_progress, "TICK", 0.0)
    monkeypatch.setattr(render_progress, "print_note", lambda text: text == "tracing" and told.set())
    with progress() as advance:
        advance("tracing")
        assert told.wait(60)


def test_a_stderr_that_takes_nothing_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Event()

    def broken(text: str) -> None:
        asked.set()
        raise BrokenPipeError

    monkeypatch.setattr(render_progress, "EVERY", 0.0)
    monkeypatch.setattr(render_progress, "TICK", 0.0)
    monkeypatch.setattr(render_progress, "print_note", broken)
    with progress() as advance:
        advance("tracing")
        assert asked.wait(60)


def test_time_left() -> None:
    assert time_left(10, 1, 3) == "about 20 s left"
    assert time_left(100, 1, 10) == "about 15 min left"


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress() as advance:
        advance("reading")
        advance("confirming", 312, 772)
    shown = capsys.readouterr().err
    assert "312 of 772" in shown and "confirming" in shown


def test_nothing_on_a_pipe_but_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as advance:
        advance("reading", 1, 2)
    assert capsys.readouterr().err == ""
