"""Progress as a bar on a terminal. Imported only for terminals: rich takes as long to import for bars as for the
rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from gopt.system.progress import ProgressCallback
from gopt.text.sanitize import clean_line


@contextmanager
def bar(console: Console) -> Iterator[ProgressCallback]:
    """Show each phase with its count and the time left, and nothing once all is done."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.fields[count]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        yield _Bar(bars).advance


class _Bar:
    """A bar, starting anew with each phase."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._phase = ""
        self._task = bars.add_task("starting", total=None, count="")

    def advance(self, phase: str, done: int = 0, total: int = 0, /) -> None:
        if phase != self._phase:
            self._phase = phase
            self._bars.reset(self._task, total=total or None, description=clean_line(phase), count="")
        count = f"{done} of {total}" if total else ""
        self._bars.update(self._task, completed=done, total=total or None, count=count)
