"""Confirm gradients by value: each must be proportional to the change of the loss along random directions.

For a parameter p with the value g as its gradient and a random direction d, ⟨g, d⟩ = c · (L(p + εd) − L(p − εd)) / 2ε
with one constant c (a loss scale) for every d and every batch. In float64; ε from a ladder of lengths, because a kink
of the loss (a ReLU) within a step is not a verdict.

Gradients of many parameters are measured together: along a direction in all parameters at once, with the same c. Where
the sum does not agree, halves are measured in the order of the backward, down to a single gradient; all others are then
measured together again. So right gradients take about 20 runs of the forward in all, a wrong gradient about 100 more,
and 4 for each doubling of the number of parameters.

A value that is not proportional may still be right to average: see ``additivity`` and ``alternatives``."""

from __future__ import annotations

from gopt.verification.gradient_check.check import PHASE, check_gradients
from gopt.verification.gradient_check.verdict import GradientCheck, Verdict

__all__ = ["PHASE", "GradientCheck", "Verdict", "check_gradients"]
