"""Controls of an update outside the rule: learning rate and schedule, clips, finite check, loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gopt.analysis.training import State, StateKind
from gopt.ir.graph_index import descendants
from gopt.offline.optimizer.clips import Clip, find_clips
from gopt.offline.optimizer.evidence import Rule, tidy
from gopt.offline.optimizer.probe import Probe
from gopt.offline.optimizer.recogniser import Recogniser
from gopt.operators.kinds import COMPARISONS

Gates = dict[str, list[tuple[State, bool]]]
"""Condition -> the states that it controls, and the value for which they change."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """``input``: the input that feeds the rate, '' for a constant or an unknown rate; ``effective``: the scalar of the
    update; ``schedule``: the nodes in between; ``follows``: the states read by the schedule."""

    input: str
    effective: str
    value: float | None
    schedule: tuple[str, ...]
    follows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """A condition on the gradients under which states keep their old values."""

    condition: str
    states: int


@dataclass(frozen=True, slots=True)
class LossScale:
    """The divisor of gradients; the factors are None if not found (or the scale never changes)."""

    input: str
    dynamic: bool
    growth: float | None = None
    backoff: float | None = None
    interval: float | None = None


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Gradients are summed in states; the other states move every so many steps."""

    condition: str
    accumulators: int
    every: float | None


@dataclass(frozen=True, slots=True)
class Controls:
    learning_rate: LearningRate | None
    clips: tuple[Clip, ...]
    finite_check: FiniteCheck | None
    loss_scale: LossScale | None
    accumulation: Accumulation | None


def find_controls(recogniser: Recogniser, rules: Iterable[Rule]) -> Controls:
    """All controls of a step; ``rules``: of the step's subgraphs."""
    training, probe, gates = recogniser.training, recogniser.probe, Gates()
    for state in training.states:
        if state.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE):
            for condition, advances in probe.ungated(state)[1]:
                gates.setdefault(condition, []).append((state, advances))
    finite = _finite_check(probe, gates)
    return Controls(
        _learning_rate(recogniser, rules), find_clips(recogniser.paths, [*training.gradients]), finite,
        _loss_scale(recogniser, gates[finite.condition] if finite is not None else [], finite),
        _accumulation(recogniser, gates),
    )  # fmt: skip


def _learning_rate(recogniser: Recogniser, rules: Iterable[Rule]) -> LearningRate | None:
    sources = dict.fromkeys(rule.step_size for rule in rules if rule.recognised)
    probe = recogniser.probe
    if len(sources) == 1 and (source := next(iter(sources))):
        if probe.is_constant(source):
            return LearningRate("", source, tidy(abs(recogniser.trials[0].number(source))), (), ())
        behind = [name for name in probe.inputs if name in probe.inputs_behind(source)]
        fed = [name for name in behind if name in probe.hyper and _proportional(probe, source, name)]
        name = fed[0] if len(fed) == 1 else ""
        if source == name:
            return LearningRate(name, name, None, (), ())
        between = [x for x in probe.scalars_before([source]) if x in probe.producers]
        between.sort(key=lambda x: probe.index.position[id(probe.producers[x])])
        follows = tuple(name for name in behind if name not in probe.hyper)
        return LearningRate(name, source, None, tuple(between), follows)
    wanted = {s.updated for s in recogniser.training.parameters if s.tensor in recogniser.training.gradients}
    hypers = [name for name in recogniser.training.hyper if name in probe.inputs] if wanted else []
    common = [name for name in hypers if wanted <= descendants(probe.index, [name])]
    return LearningRate(common[0], "", None, (), ()) if len(common) == 1 else None


def _proportional(probe: Probe, value: str, name: str) -> bool:
    """Return whether a value is proportional to an input."""
    before, doubled = (probe.scalars(0, {name: times}).number(value) for times in (0.3, 0.6))
    return before != 0 and abs(doubled - 2 * before) <= 1e-9 * abs(before)


def _finite_check(probe: Probe, gates: Gates) -> FiniteCheck | None:
    """The condition on gradients that changes for an infinite gradient."""
    finite, infinite = (probe.scalars(0, reduced=reduced) for reduced in (0.0, float("inf")))
    for condition, states in gates.items():
        if condition in probe.owners.reduced and abs(finite.number(condition) - infinite.number(condition)) == 1:
            return FiniteCheck(condition, len(states))
    return None


def _loss_scale(
    recogniser: Recogniser, gated: list[tuple[State, bool]], finite: FiniteCheck | None
) -> LossScale | None:
    name, probe = next(iter(recogniser.paths.unscaled), ""), recogniser.probe
    updated = probe.updated.get(name, name)
    if finite is None or updated == name:
        return LossScale(name, updated != name) if name else None
    good, (interval, counter) = gated[0][1], _threshold(recogniser, updated)
    ones, late = dict.fromkeys(probe.inputs, 1.0), {} if interval is None else {counter: 2 * interval}
    backoff = probe.scalars(0, ones, pinned={finite.condition: not good}).number(updated)
    growth = probe.scalars(0, ones | late, pinned={finite.condition: good}).number(updated)
    return LossScale(
        name, True, tidy(growth) if late and growth > 1 else None, tidy(backoff) if backoff < 1 else None, interval
    )


def _threshold(recogniser: Recogniser, value: str) -> tuple[float | None, str]:
    """The one constant compared with a counter before ``value``, and the counter's input."""
    probe, thresholds = recogniser.probe, dict[tuple[float, str], None]()
    for name in probe.scalars_before([value]):
        node = probe.producers.get(name)
        if node is None or not node.is_in(COMPARISONS) or name in probe.owners.reduced:
            continue
        for constant, operand in (node.inputs, reversed(node.inputs)):
            number, counters = recogniser.trials[0].number(constant), probe.inputs_behind(operand)
            if probe.is_constant(constant) and number == number and len(counters) == 1:
                thresholds[tidy(number), next(iter(counters))] = None
    return next(iter(thresholds)) if len(thresholds) == 1 else (None, "")


def _accumulation(recogniser: Recogniser, gates: Gates) -> Accumulation | None:
    accumulators = sum(state.kind is StateKind.ACCUMULATOR for state in recogniser.training.states)
    condition = next((name for name in gates if name not in recogniser.probe.owners.reduced), "")
    every = _threshold(recogniser, condition)[0] if condition else None
    return Accumulation(condition, accumulators, every) if accumulators else None
