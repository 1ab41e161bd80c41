"""Values of hyper-parameters a step is written with: an optimizer's options, a scheduler's rates as a formula or a
table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gopt.documents.default_values import DefaultValue
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.hyper import Hyper
from gopt.frontends.pytorch.rates import scheduled_options
from gopt.runtime.training.schedules import parse_schedule, usable

NEAR = 1e-9
"""Difference between a formula and the scheduler that is allowed in each step, as a share of the largest rate."""


def default_values(recipe: Recipe, hyper: Hyper, scheduled: bool, steps: int) -> dict[str, DefaultValue]:
    """Hyper-parameter -> value in the recipe; for an option moved by a schedule, the values over ``steps`` steps,
    unless computed in the graph (``scheduled``). Unfeedable values, such as a negative rate, are left out."""
    found_values = {
        name: DefaultValue(str(np.float32(value))) for name, value in hyper.values.items() if usable(float(value))
    }
    if recipe.scheduler is None or scheduled:
        return found_values
    rates = scheduled_options(recipe, steps, hyper.rates.values())
    for name, option in hyper.rates.items():
        series = [row[option] for row in rates]
        if all(map(usable, series)):
            found_values[name] = fitted(series)
    return found_values


def fitted(series: Sequence[float]) -> DefaultValue:
    """A formula giving the values of all steps, or a table of them."""
    values = np.asarray(series, float)
    near = NEAR * float(values.max(initial=0.0))
    for text in _candidates(values, near):
        rule = parse_schedule(text).at
        if all(abs(rule(step) - value) <= near for step, value in enumerate(series)):
            return DefaultValue(text, steps=len(series))
    return DefaultValue(table=tuple(series))


def _candidates(values: np.ndarray, near: float) -> Iterator[str]:
    """Formulas perhaps giving the values, simple formulas first."""
    start, last, count = values[0], values[-1], len(values)
    yield _text(start)
    peak = int(np.argmax(values >= values.max() - near))
    changes = np.flatnonzero(np.abs(values - last) > near)
    end = int(changes[-1]) + 1 if len(changes) else 0  # from here on the value stays
    yield f"linear:{_text(start)}:{_text(last)}:{end}"
    moves = np.flatnonzero(np.abs(values - start) > near)
    if len(moves) and start:
        yield f"step:{_text(start)}:{int(moves[0])}:{_text(values[moves[0]] / start)}"
    top = values[peak]
    for kind in ("cosine", "linear"):
        ends = [(end, last)] if end < count - 1 else []
        part = last / top  # a schedule that goes on behind the last step, most likely to zero
        share = np.arccos(np.clip(2 * part - 1, -1, 1)) / np.pi if kind == "cosine" else 1 - part
        if share > 0:
            ends.append((peak + round((count - 1 - peak) / share), 0.0))
        if kind == "cosine":
            ends += _end_of_cosine(values[peak:], peak)
        for total, to in ends:
            yield (
                f"warmup-{kind}:{_text(top)}:{peak}:{total}:{_text(to)}:{_text(start)}"
                if peak else f"{kind}:{_text(top)}:{_text(to)}:{total}"
            )  # fmt: skip


def _end_of_cosine(values: np.ndarray, start: int) -> Iterator[tuple[int, float]]:
    """The step of the minimum of a cosine from ``values[0]``, at step ``start``, and the value there; from the values
    half way and at the end."""
    half = (len(values) - 1) // 2
    fall, whole = (float(values[0] - values[index]) if half else 0.0 for index in (half, 2 * half))
    cosine = whole / (2 * fall) - 1 if fall > 0 else 1.0
    if not -1 < cosine < 1:
        return
    length = round(half * np.pi / np.arccos(cosine))
    least = float(values[0]) - 2 * fall / (1 - np.cos(half * np.pi / length))
    yield start + length, float(f"{max(least, 0.0):.12g}")


def _text(value: float) -> str:
    return repr(float(value))
