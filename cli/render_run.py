"""Prints the result of ``gopt run``: the loss, and a small plot of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gopt.artifact.checkpoint_index import step_dir

from .render import console
from .verbosity import Verbosity, verbosity

_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_run(steps: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A line on stderr that follows the steps; nothing when stderr is not a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal or verbosity() is Verbosity.QUIET:
        yield lambda _: None
        return
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.4g}"),
        TextColumn("{task.fields[rate]:.0f} samples/s"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"), rate=0.0)

        def show(step: Mapping[str, Any]) -> None:
            bar.update(task, completed=step["step"], loss=step["loss"], rate=step["samples_per_second"])

        yield show


def render_run(record: Mapping[str, Any], losses: Sequence[float]) -> None:
    """The end of a run."""
    out = console()
    if not losses:
        out.print(
            f"nothing to do: {record['checkpoint']} is at step {record['resumed']} already, and --steps "
            f"{record['asked']} counts from the start of training",
            soft_wrap=True,
        )
        return
    last, seconds, shared = record["last"], record["seconds"], record["shared_calls"]
    how = record["engine"] + (f", {shared} calls in shared memory" if shared else "")
    out.print(
        f"{_steps(record['steps'])} on {_who(record)} ({how}) "
        f"in {f'{seconds:.1f}' if seconds >= 1 else f'{seconds:.2g}'} s: "
        f"{1000 * seconds / record['steps']:.1f} ms a step, {record['samples_per_second']:.0f} samples/s"
    )
    out.print(f"loss {record['first']['loss']:.6g} → {last['loss']:.6g}  {sparkline(losses)}")
    if record["not_finite"] is not None:
        bad = record["not_finite"]
        out.print(
            f"warning: the loss is not finite in {_steps(bad['steps'])}, first in step {bad['first']}; "
            "with --stop-on-nan the run ends there",
            soft_wrap=True,
        )
    if (epoch := last.get("epoch", 0)) > 1:
        out.print(f"the samples of the data were read {epoch:.4g} times", soft_wrap=True)
    if record.get("servers"):
        _render_servers(record["servers"])
    if record["checkpoint"] is not None:
        out.print(f"last checkpoint: {Path(record['checkpoint'], step_dir(last['step']))}", soft_wrap=True)
    else:
        out.print("note: the values are not kept; give --checkpoint CKPT for that")


def _render_servers(servers: Sequence[Mapping[str, Any]]) -> None:
    """Print each server's counts and waits, with at most three trainers per server: those with the longest waits."""
    out = console()
    out.print(f"{'server':>6} {'answers':>8} {'MB in':>9} {'MB out':>9} {'dropped':>7}  waited for trainers, s")
    for each in servers:
        most = sorted(each["waits"].items(), key=lambda item: -item[1])[:3]
        waits = ", ".join(f"{trainer}: {spent:.2g}" for trainer, spent in most) or "-"
        out.print(
            f"{each['server']:>6} {each['answered']:>8} {each['bytes_in'] / 1e6:>9.3f} {each['bytes_out'] / 1e6:>9.3f} "
            f"{each['dropped']:>7}  {waits}",
            soft_wrap=True,
        )


def _who(record: Mapping[str, Any]) -> str:
    """``2 ranks``, or ``2 trainers and 1 server``."""
    counts = record.get("roles") or {"ranks": record["ranks"]}
    return " and ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in counts.items())


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of bars, each the mean of its share."""
    count = min(width, len(values))
    shares = [values[len(values) * n // count : len(values) * (n + 1) // count] for n in range(count)]
    means = [sum(share) / len(share) for share in shares]
    known = [mean for mean in means if mean == mean and abs(mean) != float("inf")]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        _BARS[round((mean - low) / span * (len(_BARS) - 1))] if low <= mean <= high else "?" for mean in means
    )
