"""Prints the result of ``gopt verify``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .render import console, table

if TYPE_CHECKING:
    from gopt.verification.gradient_sample import GradientSample
    from gopt.verification.result import Verification

MOST = 12
"""Unconfirmed values that are named; --json has them all."""
FAILING = 24
"""Values that differ with a row of their own; the others are named in a line."""
VERDICTS = {
    "equal": ("equal", "green"),
    "different": ("NOT equal", "bold red"),
    "unconfirmed": ("NOT confirmed", "bold yellow"),
}


def render_verification(result: Verification, roles: Sequence[str] = ()) -> None:
    """The worst error of each variant, unconfirmed gradients, doubts, and the verdict.

    ``roles``: the names of trainers and servers, if not ranks."""
    out = console()
    rows = [
        (
            name,
            difference.name,
            difference.kind,
            roles[difference.rank] if roles else difference.rank,
            difference.step,
            f"{difference.error_over_tolerance * result.tolerance:.2e}",
        )
        for name, difference in result.worst.items()
    ]
    steps = result.steps
    who = "trainers and servers" if roles else "ranks"
    over = f"{len(roles) or result.ranks} {who} and {steps} step{'s' * (steps != 1)}"
    title = f"Worst relative error over {over} (tolerance {result.tolerance:g})"
    if result.proof is not None:
        out.print(f"{result.proof.line()} (gopt prove, when the ranks were written)")
    out.print(table(title, ("variant", "value", "kind", "role" if roles else "rank", "step", "error"), rows, (3, 4, 5)))
    _failing(result, out, roles)
    _gradients(result, out)
    for engine in dict.fromkeys(engine.engine for engine in result.engines if engine.engine):
        values = sum(check.values for check in result.engines if check.engine == engine)
        out.print(f"one step of the source by a second engine, {engine}: {values} values")
    if result.large_batch is not None:
        out.print(Text(result.large_batch.line(), "bold red" if result.large_batch.unnoted else ""))
    unconfirmed = list(result.open())
    for doubt in unconfirmed[:MOST]:
        out.print(Text.assemble((f"{doubt.name} is not confirmed", "yellow"), f": {doubt.why}"))
    if len(unconfirmed) > MOST:
        out.print(f"and {len(unconfirmed) - MOST} more, not confirmed either: --json has them all")
    for note in result.notes:
        out.print(f"note: {note}")
    out.print(Text.assemble(VERDICTS[result.outcome.value], f": {result.compared} comparisons"))


def _failing(result: Verification, out: Console, roles: Sequence[str]) -> None:
    """Every value out of tolerance, by name."""
    values = result.failing()
    if not values:
        return
    rows = []
    for value in values[:FAILING]:
        worst = value.worst
        where = f"{worst.variant}, step {worst.step}, {roles[worst.rank] if roles else f'rank {worst.rank}'}"
        error = f"{worst.error_over_tolerance * result.tolerance:.2e}"
        rows.append((worst.name, worst.kind, error, value.comparisons, where))
    comparisons = sum(failure.comparisons for failure in values)
    title = f"{len(values)} values differ, in {comparisons} of {result.compared} comparisons"
    out.print(table(title, ("value", "kind", "worst error", "comparisons", "worst in"), rows, (2, 3)))
    if len(values) > FAILING:
        out.print(f"and {', '.join(failure.worst.name for failure in values[FAILING:])}")


def _gradients(result: Verification, out: Console) -> None:
    checked = result.gradients
    good = sum(check.holds for check in checked)
    if checked:
        out.print(f"gradients confirmed by finite differences: {good} of {len(checked)}{_sample(result.sample)}")
    refuted = result.refuted()
    if refuted:
        out.print(Text(f"finite differences contradict {len(refuted)} gradients:", "red"))
    for wrong in refuted:
        why = wrong.why or f"ratios {list(wrong.ratios)}"
        text = f"{wrong.gradient} is not the gradient of {wrong.parameter}"
        out.print(Text.assemble((text, "red"), f": {why}"))


def _sample(sample: GradientSample | None) -> str:
    """The size of the sample, where only a sample was checked."""
    if sample is None:
        return ""
    kinds = f"{sample.kinds} kinds of {sample.classes} classes"
    if sample.widened:
        sampled = len(sample.parameters)
        return f" (a sample of {sampled} held one that is not confirmed, so all were looked at)"
    return f" (a sample of {sample.total}, some of all {kinds}, seed {sample.seed}; --all confirms every one)"
