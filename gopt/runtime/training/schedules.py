"""Hyper-parameters as functions of the step: numbers, formulas, tables, and functions of the user.

Steps are updates, counted from 0 at the start of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gopt.documents.default_values import DefaultValue
from gopt.errors import InputError, OptionError
from gopt.runtime.training.data import load_function
from gopt.text.sanitize import show

Rule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """The values of a hyper-parameter. ``steps``: the number of steps with known values; None: any number."""

    at: Rule
    steps: int | None = None


def parse_schedule(text: str) -> RateSchedule:
    """A hyper-parameter as a function of the step; ``docs/running.md`` lists the forms.

    Raises OptionError, and InputError for a table that cannot be read."""
    formula = _formula(text)
    if formula is not None:
        return RateSchedule(formula)
    kind, colon, rest = text.partition(":")
    if kind == "table" and colon:
        return _tabled(_read_table(rest), rest)
    if not colon or ":" in rest:  # module:function has one colon
        raise OptionError(f"cannot read {show(text)} as a schedule", _FORMS)
    function = load_function(text)
    return RateSchedule(lambda step: float(function(step)))


def default_schedule(name: str, default: DefaultValue) -> RateSchedule:
    """The schedule of a step's own value: a number, a formula or a table, and never a file or a function. Raises
    InputError; ``name``: of the hyper-parameter."""
    try:
        if default.table:
            return _tabled(default.table, f"the table of {name}")
        formula = _formula(default.schedule)
    except OptionError as error:
        raise InputError(
            f"the value of {name!r} in the step: {error.message}", f"set another with --set {name}=VALUE"
        ) from None
    if formula is None:
        raise InputError(
            f"the value of {name!r} in the step is {show(default.schedule)}, which is no number or formula",
            f"set another with --set {name}=VALUE",
        )
    return RateSchedule(formula, default.steps)


def _tabled(values: Sequence[float], name: str) -> RateSchedule:
    wrong = next((step for step, value in enumerate(values) if not usable(value)), None)
    if wrong is not None:
        raise OptionError(f"{name}: step {wrong + 1}: {values[wrong]}", USABLE)
    return RateSchedule(lambda step: float(values[step]), len(values))


def _read_table(path: str) -> list[float]:
    """The numbers of a file: a .npy array of one axis, or a text with a number on each line."""
    try:
        if path.endswith(".npy"):
            return [float(number) for number in np.load(path, allow_pickle=False).reshape(-1)]
        return [float(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"cannot read {show(path)}: {error.strerror}", "write --set NAME=table:FILE") from error
    except (ValueError, UnicodeError) as error:
        raise InputError(f"{show(path)}: {error}", "write one number on each line, or a .npy array") from error


def usable(value: float) -> bool:
    """Return whether a number can be a hyper-parameter's value."""
    return math.isfinite(value) and value >= 0


USABLE = "give a finite number that is not negative; what may be negative is data: shard with --batch NAME"


# --- formulas -------------------------------------------------------------------------------------------------------


def _constant(value: float) -> Rule:
    return lambda step: value


def _part(step: int, steps: float) -> float:
    return min(step / max(steps, 1), 1.0)


def _linear(start: float, end: float, steps: float) -> Rule:
    return lambda step: start + (end - start) * _part(step, steps)


def _cosine(start: float, end: float, steps: float) -> Rule:
    return lambda step: start + (end - start) * (1 - math.cos(math.pi * _part(step, steps))) / 2


def _warmed(behind: Callable[[float, float, float], Rule]) -> Callable[..., Rule]:
    def make(peak: float, warmup: float, steps: float = 0.0, end: float = 0.0, start: float = 0.0) -> Rule:
        rise, fall = _linear(start, peak, warmup), behind(peak, end, steps - warmup)
        return lambda step: rise(step) if step < warmup else fall(step - int(warmup))

    return make


def _steps(start: float, every: float, factor: float) -> Rule:
    return lambda step: start * factor ** (step // max(int(every), 1))


@dataclass(frozen=True, slots=True)
class _Formula:
    """``make``: of the numbers; ``needed`` of ``form`` must be given. ``counts``: the positions of numbers of steps."""

    make: Callable[..., Rule]
    form: str
    needed: int
    counts: tuple[int, ...] = ()


_FORMULAS: Mapping[str, _Formula] = {
    "constant": _Formula(_constant, "VALUE", 1),
    "linear": _Formula(_linear, "START:END:STEPS", 3, (2,)),
    "cosine": _Formula(_cosine, "START:END:STEPS", 3, (2,)),
    "step": _Formula(_steps, "START:EVERY:FACTOR", 3, (1,)),
    "warmup-constant": _Formula(_warmed(lambda peak, end, steps: _constant(peak)), "PEAK:WARMUP", 2, (1,)),
    "warmup-linear": _Formula(_warmed(_linear), "PEAK:WARMUP:STEPS[:END[:START]]", 3, (1, 2)),
    "warmup-cosine": _Formula(_warmed(_cosine), "PEAK:WARMUP:STEPS[:END[:START]]", 3, (1, 2)),
}
_FORMS = (
    f"write a number, {', '.join(f'{kind}:{formula.form}' for kind, formula in _FORMULAS.items())}, table:FILE or "
    "module:function"
)


def _formula(text: str) -> Rule | None:
    """The rule of a number or a formula; None for another text. Raises OptionError for an unusable formula."""
    number = _number(text)
    if number is not None:
        return _constant(_checked(text, number))
    kind, *rest = text.split(":")
    formula = _FORMULAS.get(kind)
    if formula is None:
        return None
    most = formula.form.count(":") + 1
    numbers = [_number(part) for part in rest]
    if not formula.needed <= len(numbers) <= most or None in numbers:
        raise OptionError(f"cannot read {show(text)} as a schedule", f"write {kind}:{formula.form}")
    values = [_checked(text, number) for number in numbers if number is not None]
    for index in formula.counts:
        if index < len(values) and not (values[index].is_integer() and values[index] <= 2**53):
            raise OptionError(f"{show(text)}: {values[index]:g} is no number of steps", f"write {kind}:{formula.form}")
    if formula.counts == (1, 2) and values[1] > values[2]:
        raise OptionError(
            f"{show(text)}: the warm-up of {values[1]:g} steps is longer than all {values[2]:g}",
            f"STEPS counts the warm-up too: {kind}:{formula.form}",
        )
    return formula.make(*values)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _checked(text: str, number: float) -> float:
    if not usable(number):
        raise OptionError(f"{show(text)}: a hyper-parameter cannot be {number:g}", USABLE)
    return number
