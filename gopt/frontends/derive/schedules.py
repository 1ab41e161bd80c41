"""Learning rate schedules: closed forms of the number of steps taken, with PyTorch's formulas and defaults (the
pages of ``torch.optim.lr_scheduler``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleFormula:
    """A schedule. ``rule``: a function (lr, t) -> (rate) in float64; ``t``: the number of steps taken. ``options``:
    names of options with the defaults; None if required."""

    rule: str
    options: Mapping[str, float | None]


_LINEAR = """linear <start_factor, end_factor, total_steps> (lr, t) => (rate)
{
  start = Constant <value: tensor = @start_factor> ()
  end = Constant <value: tensor = @end_factor> ()
  total = Constant <value: tensor = @total_steps> ()
  steps = Min (t, total)
  share = Div (steps, total)
  rise = Sub (end, start)
  risen = Mul (rise, share)
  factor = Add (start, risen)
  rate = Mul (lr, factor)
}"""
"""LinearLR: from start_factor to end_factor over total_steps, then constant."""

_COSINE = """cosine <min_lr, total_steps> (lr, t) => (rate)
{
  least = Constant <value: tensor = @min_lr> ()
  total = Constant <value: tensor = @total_steps> ()
  pi = Constant <value: tensor = double {3.141592653589793}> ()
  one = Constant <value: tensor = double {1}> ()
  half = Constant <value: tensor = double {0.5}> ()
  share = Div (t, total)
  angle = Mul (pi, share)
  wave = Cos (angle)
  raised = Add (one, wave)
  height = Mul (half, raised)
  span = Sub (lr, least)
  above = Mul (span, height)
  rate = Add (least, above)
}"""
"""CosineAnnealingLR: half a cosine wave from lr to min_lr over total_steps."""

_STEP = """step <step_size, gamma> (lr, t) => (rate)
{
  size = Constant <value: tensor = @step_size> ()
  g = Constant <value: tensor = @gamma> ()
  share = Div (t, size)
  count = Floor (share)
  factor = Pow (g, count)
  rate = Mul (lr, factor)
}"""
"""StepLR: times gamma every step_size steps."""

SCHEDULES: Mapping[str, ScheduleFormula] = {
    "linear": ScheduleFormula(_LINEAR, {"start_factor": 1 / 3, "end_factor": 1.0, "total_steps": 5}),
    "cosine": ScheduleFormula(_COSINE, {"min_lr": 0.0, "total_steps": None}),
    "step": ScheduleFormula(_STEP, {"step_size": None, "gamma": 0.1}),
}
"""By the name that ``--schedule`` takes."""
