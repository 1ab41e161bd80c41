"""Prints the result of ``gopt run``: the loss, and a small plot of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from gopt.analysis.loss_reduction import LossRule
from gopt.artifact.checkpoint_index import BEST_DIR, step_dir
from gopt.text.sanitize import clean_line, show

from .render import console
from .verbosity import Verbosity, verbosity

if TYPE_CHECKING:
    from gopt.runtime.parameter_server.waits import ServerSummary
    from gopt.runtime.training.evaluation import Evaluation
    from gopt.runtime.training.job import Progress, StepMessage
    from gopt.runtime.training.run_result import RunResult

_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_run(steps: int) -> Iterator[Callable[[Progress | StepMessage], None]]:
    """A line of at most 80 columns on stderr that follows the steps; nothing when stderr is not a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal or verbosity() is Verbosity.QUIET:
        yield lambda _: None
        return
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=8), TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=steps, facts="")

        def show(step: Progress | StepMessage) -> None:
            bar.update(task, completed=step.step, facts=facts(step))

        yield show


def facts(step: Progress | StepMessage) -> str:
    """Loss, rate, memory and the share of the peak of operations, as far as they are known."""
    tokens = step.tokens_per_second
    return ", ".join(
        filter(
            None,
            [
                "" if step.loss is None else f"loss {step.loss:.4g}",
                f"{tokens:.0f} tokens/s" if tokens else f"{step.samples_per_second:.0f} samples/s",
                f"{step.memory / 1e9:.2g} GB" if step.memory else "",
                f"{step.utilisation:.0%}" if step.utilisation else "",
            ],
        )
    )


def render_evaluation(step: int, evaluation: Evaluation) -> None:
    """The line of an evaluation, while the run goes on."""
    values = ", ".join(f"{clean_line(name)} {value:.6g}" for name, value in evaluation.values.items())
    best = {None: "", True: "; the best so far", False: f"; {evaluation.without} since the best"}[evaluation.best]
    console().print(f"step {step}: evaluation {values} ({evaluation.samples} samples){best}")


def render_run(result: RunResult) -> None:
    """The end of a run."""
    out = console()
    if not result.steps:
        out.print(
            f"nothing to do: {result.checkpoint} is at step {result.resumed} already, and --steps "
            f"{result.asked} counts from the start of training",
        )
        return
    progress, last, count, seconds = result.steps[0], result.steps[-1], len(result.steps), result.seconds
    how = result.engine + (f", {result.shared_calls} calls in shared memory" if result.shared_calls else "")
    out.print(
        f"{_steps(count)} on {_ranks(result)} ({how}) "
        f"in {f'{seconds:.1f}' if seconds >= 1 else f'{seconds:.2g}'} s: "
        f"{1000 * seconds / count:.1f} ms a step, {result.samples_per_second:.0f} samples/s"
    )
    used = result.usage
    rates = [
        f"{used['tokens_per_second']:.0f} tokens/s" if "tokens_per_second" in used else "",
        f"{used['memory'] / 1e9:.2f} GB of memory at most" if "memory" in used else "",
        f"{used['utilisation']:.1%} of the peak of floating-point operations" if "utilisation" in used else "",
    ]
    if used.keys() - {"memory"}:
        out.print(", ".join(filter(None, rates)))
    word, _, value = result.loss_reduction.partition(":")
    rules = {LossRule.SUM.value: "  mean over the ranks; their gradients are added up"}
    rules[LossRule.WEIGHTED.value] = (
        f"  mean over the ranks, weighed by {show(value)}" if result.roles is None
        else f"  mean over the trainers; their gradients are weighed by {show(value)}"
    )  # fmt: skip
    rule = rules.get(word, "") if result.ranks > 1 else ""
    out.print(f"loss {progress.loss:.6g} → {last.loss:.6g}  {sparkline(result.losses)}{rule}")
    for name in progress.means:
        line = [step.means[name] for step in result.steps]
        out.print(f"loss {show(name)} {line[0]:.6g} → {line[-1]:.6g}  {sparkline(line)}")
    if result.not_finite is not None:
        out.print(
            f"warning: {'a' if progress.means else 'the'} loss is not finite in {_steps(result.not_finite.steps)}, "
            f"first in step {result.not_finite.first}{f', {cause}' if (cause := result.not_finite.cause) else ''}; "
            "with --stop-on-nan the run ends there",
        )
    if last.epoch > 1:
        out.print(f"the samples of the data were read {last.epoch:.4g} times")
    if result.servers:
        _render_servers(result.servers)
    if result.record is not None:
        out.print(f"record: gopt verify {result.folder} --replay {result.record} runs it again")
    if last.evaluation is not None and last.evaluation.ends:
        count = last.evaluation.without
        out.print(f"ended at step {last.step} of {result.asked}: {count} evaluations without a better one")
    if result.best is not None:
        step, entry = result.best
        value = f"{clean_line(entry.metric)} {entry.value:.6g}"
        out.print(f"best checkpoint: {result.checkpoint}/{BEST_DIR}, step {step}, {value}")
    if result.checkpoint is not None:
        out.print(f"last checkpoint: {result.checkpoint / step_dir(last.step)}")
    else:
        out.print("note: the values are not kept; give --checkpoint CKPT for that")


def _render_servers(servers: Sequence[ServerSummary]) -> None:
    """Print each server's counts and waits, with at most three trainers per server: those with the longest waits."""
    out = console()
    out.print(f"{'server':>6} {'answers':>8} {'MB in':>9} {'MB out':>9} {'dropped':>7}  waited for trainers, s")
    for server in servers:
        longest = sorted(server.waits.items(), key=lambda item: -item[1])[:3]
        waits = ", ".join(f"{trainer}: {spent:.2g}" for trainer, spent in longest) or "-"
        out.print(
            f"{server.server:>6} {server.answered:>8} {server.bytes_in / 1e6:>9.3f} {server.bytes_out / 1e6:>9.3f} "
            f"{server.dropped:>7}  {waits}",
        )


def _ranks(result: RunResult) -> str:
    """``2 ranks``, or ``2 trainers and 1 server``."""
    counts = {"ranks": result.ranks} if result.roles is None else result.roles
    return " and ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in counts.items())


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of bars, each the mean of its share."""
    count = min(width, len(values))
    shares = [values[len(values) * n // count : len(values) * (n + 1) // count] for n in range(count)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if mean == mean and abs(mean) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        _BARS[round((mean - low) / span * (len(_BARS) - 1))] if low <= mean <= high else "?" for mean in means
    )
