"""Curves of a run for TensorBoard, written by TensorBoard's writer."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gopt.errors import OptionError, RunError
from gopt.runtime.training.job import Progress


def check_writer() -> None:
    """Raise OptionError where the package writing curves is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise OptionError("--tensorboard needs the package tensorboard", "pip install 'gopt[tensorboard]'")


def scalars(progress: Progress) -> dict[str, float]:
    """The values of a step's curves, by tag."""
    figures = {"train/loss": progress.loss}
    figures |= {f"train/{name}": value for name, value in progress.means.items()}
    figures |= {f"hyper/{name}": value for name, value in progress.hyper.items()}
    figures["speed/samples_per_second"] = progress.samples_per_second
    if progress.tokens:
        figures["speed/tokens_per_second"] = progress.tokens_per_second
    if progress.evaluation is not None:
        figures |= {f"eval/{name}": value for name, value in progress.evaluation.values.items()}
    return figures


@contextmanager
def curves(folder: str | os.PathLike[str] | None) -> Iterator[Callable[[Progress], None]]:
    """A function adding a step to the curves in a folder, or doing nothing for None. A resumed run replaces the
    folder's values of the run's steps and later steps. Raises RunError for a failed write."""
    if folder is None:
        yield lambda progress: None
        return
    check_writer()
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = _written(folder, lambda: EventFileWriter(os.fspath(folder)))
    begun = False

    def add(progress: Progress) -> None:
        nonlocal begun
        step, now = progress.step, time.time()
        if not begun:
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(step=step, wall_time=now, session_log=start))
            begun = True
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(progress).items()]
        _written(folder, lambda: writer.add_event(Event(step=step, wall_time=now, summary=Summary(value=values))))

    try:
        yield add
    finally:
        _written(folder, writer.close)


def _written(folder: str | os.PathLike[str], work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        text = f"cannot write curves to {os.fspath(folder)}: {error.strerror or error}"
        raise RunError(text, "choose another folder") from error
