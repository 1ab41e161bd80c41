"""Amounts that rounding may change in a step from the ranks' own states, in addition to contract section 7.

A floor is an amount that a value may be away. A span has the least and the greatest right value of each element, where
terms of a gradient cancel and the order of summation decides."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.ir.types import LOW_PRECISION
from gopt.verification.compare import Values, allowance, floating
from gopt.verification.reference_step import LocalResults, ReferenceProgram, ReferenceStep
from gopt.verification.sensitivity import MOST, MULTIPLE, NOISE, UNITS, Sensitivity, apart, largest, norm

Span = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step from the ranks' own states ``before`` it, to judge the values in ``names``: ``base`` of the source, and
    its ``update`` of the mean of the gradients that ranks ``sent``.

    ``noise``: gradients of rounding alone; ``moved``: the measured sensitivity, None before it is measured; ``ends``:
    the update for several orders of summation; ``rounding``: how far rounding inside the source's step moves a
    value."""

    training: TrainingGraph
    before: Values
    noise: Collection[str]
    names: Collection[str]
    base: ReferenceStep
    sent: LocalResults
    update: ReferenceStep
    moved: Sensitivity | None = None
    ends: Sequence[ReferenceStep] = ()
    rounding: Mapping[str, float] = field(default_factory=dict)

    def floors(self) -> dict[str, float]:
        """Return the floors of states, and of metrics of the update."""
        floors = {} if self.moved is None else self._states(self.moved) | self._metrics(self.moved)
        updated = self.update.states.keys() | (name for values in self.update.metrics for name in values)
        for name in self.rounding.keys() & updated:
            floors[name] = floors.get(name, 0.0) + MULTIPLE * self.rounding[name]
        return floors

    def gradient(self, turn: int, rank: int, name: str) -> float:
        """Return the floor of a local gradient of a batch."""
        moved = 0.0 if self.moved is None else self.moved.gradients[turn][rank][name]
        if name not in self.noise:
            return self._local(name, moved, self.base.local.gradients[turn][rank])
        return MULTIPLE * (moved + self.rounding.get(name, 0.0))

    def output(self, turn: int, rank: int, name: str) -> float:
        """Return the floor of a loss, or a metric of the forward, of a batch."""
        moved = 0.0 if self.moved is None else self.moved.outputs[turn][rank][name]
        return self._local(name, moved, self.base.local.outputs[turn][rank])

    def spans(self, tolerance: float) -> tuple[dict[str, Span], dict[str, int]]:
        """Return the spans of new states where the order of summation moves any element, and the numbers of these
        elements."""
        spans: dict[str, Span] = {}
        counts: dict[str, int] = {}
        for name in self.ends[0].states.keys() & self.names if self.ends else ():
            low, high, moves = span([end.states[name] for end in self.ends], self.before[name], tolerance)
            if moves:
                spans[name], counts[name] = (low, high), moves
        return spans, counts

    def share(self, name: str) -> float:
        """Return rounding as a share of a state's change, or of a gradient, a loss or a metric."""
        if name in self.update.states:
            size = apart(self.update.states[name], self.before[name])
        else:
            results = chain(self.update.metrics, *self.base.local.gradients, *self.base.local.outputs)
            size = max(norm(values[name]) for values in results if name in values)
        return self.rounding[name] / size if size else math.inf

    def _local(self, name: str, moved: float, values: Values) -> float:
        floor = min(MULTIPLE * moved, MOST * norm(values[name])) if moved else 0.0
        return floor + MULTIPLE * self.rounding.get(name, 0.0)

    def _states(self, moved: Sensitivity) -> dict[str, float]:
        statistics = {state.tensor for state in self.training.states if state.kind is StateKind.STATISTIC}
        floors = {name: _floor(moved.states[name], self._change(name), NOISE) for name in statistics}
        for name in self._of_halves():
            # A unit vector hardly turns by a gradient along it: its change is smaller than what rounding makes of it.
            floors[name] = _floor(moved.states[name], self._change(name))
        for name, value in self.base.states.items():
            # A sum in another order turns the last place of a half: at most a unit of it is rounding. Of one element it
            # may be, whether the few measured runs turned it or not.
            if value.dtype.name in LOW_PRECISION and name not in statistics:
                unit = UNITS[value.dtype.name]
                one = min(unit * largest(value), MOST * self._change(name))
                floors[name] = max(one, min(MULTIPLE * moved.states[name], unit * norm(value)))
        return floors

    def _change(self, name: str) -> float:
        return apart(self.base.states[name], self.before[name])

    def _metrics(self, moved: Sensitivity) -> dict[str, float]:
        """Return the floors of metrics of the update, where it reads halves, or values of the forward."""
        base, floors = self.base, dict[str, float]()
        halves = any(mean.dtype.name in LOW_PRECISION for mean in base.means.values())
        for values, changes in zip(base.metrics, moved.metrics) if halves or base.local.read != [{}] else ():
            for name, value in values.items():
                floors[name] = max(_floor(changes[name], norm(value)), floors.get(name, 0.0))
        return floors

    def _of_halves(self) -> list[str]:
        """Return the states, of any type, updated by gradients in halves: the mean is rounded too.

        States without a parameter are among them if any gradient is in halves."""
        halves = {name for name, mean in self.base.means.items() if mean.dtype.name in LOW_PRECISION}
        owned = {name for name, gradient in self.training.gradients.items() if gradient in halves}
        loose = (StateKind.OPTIMIZER_STATE, StateKind.SCALAR) if halves else ()
        return [
            state.tensor for state in self.training.states
            if (state.of or state.tensor) in owned or (state.of is None and state.kind in loose)
        ]  # fmt: skip


def _floor(noise: float, size: float, share: float = 1.0) -> float:
    """Return what rounding may change, by a measured change of a value, or change, of a size; moved by ``share`` of the
    size, a value is nothing but rounding."""
    return min(MULTIPLE * noise, MOST * size) if noise < share * size else MULTIPLE * noise


def summation_orders(
    reference: ReferenceProgram, own: Values, settings: Values, sent: LocalResults, update: ReferenceStep,
    wire: str = "",
) -> list[ReferenceStep]:  # fmt: skip
    """Return ``update``, the update of the gradients ``sent``, and the update for other orders of their summation, and
    for gradients rounded to the halves of the ``wire``."""
    ends, rounding = [update], reference.rounding(sent, UNITS.get(wire, 0.0))
    for times in (-MULTIPLE, -1, 1, MULTIPLE):
        means = {name: (update.means[name] + times * moved).astype(moved.dtype) for name, moved in rounding.items()}
        ends.append(reference.finish(own, settings, sent, update.means | means))
    if wire:
        ends.append(reference.finish(own, settings, sent.rounded(wire)))
    return ends


def span(values: Sequence[np.ndarray], start: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the least and greatest results, apart at elements moved beyond a share of the tolerance, where terms of a
    gradient may cancel, and how many there are."""
    wanted = values[0]
    if wanted.dtype == bool or wanted.dtype.name in LOW_PRECISION or not wanted.size:
        return wanted, wanted, 0
    values = [np.where(np.isfinite(value), value, wanted) for value in values]
    low, high = np.min(values, axis=0), np.max(values, axis=0)
    with np.errstate(invalid="ignore"):
        width = high - low if floating(wanted) else high != low
        moves = width > allowance(wanted, start, tolerance) / math.sqrt(wanted.size)
    return np.where(moves, low, wanted), np.where(moves, high, wanted), int(moves.sum())
