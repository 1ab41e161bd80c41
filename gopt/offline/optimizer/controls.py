"""Controls of an update outside its rule: learning rate and schedule, clips, finite check, loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.analysis.training import State, StateKind
from gopt.offline.optimizer.clips import Clip, find_clips
from gopt.offline.optimizer.evidence import Rule, tidy
from gopt.offline.optimizer.probe import Scalars, spread
from gopt.offline.optimizer.recogniser import Recogniser
from gopt.operators.kinds import COMPARISONS


@dataclass(frozen=True, slots=True)
class LearningRate:
    """``input``: the input it is fed through, '' if it is a constant or none was found; ``effective``: the scalar
    that the update uses; ``schedule``: the nodes in between; ``follows``: the states that the schedule reads."""

    input: str
    effective: str
    value: float | None
    schedule: tuple[str, ...]
    follows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """A condition on the gradients that lets states keep their old values."""

    condition: str
    states: int


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scalar that gradients are divided by; the factors are None where none was found (or it never changes)."""

    input: str
    dynamic: bool
    growth: float | None
    backoff: float | None
    interval: float | None


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
    """All controls of a step; ``rules`` are those of its subgraphs."""
    predicates: dict[str, list[tuple[State, bool]]] = {}
    for state in recogniser.training.states:
        if state.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE):
            for condition, advances in recogniser.probe.ungated(state)[1]:
                predicates.setdefault(condition, []).append((state, advances))
    finite = _finite_check(recogniser, predicates)
    return Controls(
        _learning_rate(recogniser, rules), find_clips(recogniser.paths, [*recogniser.training.gradients]), finite,
        _loss_scale(recogniser, finite, predicates), _accumulation(recogniser, predicates),
    )  # fmt: skip


def _learning_rate(recogniser: Recogniser, rules: Iterable[Rule]) -> LearningRate | None:
    sources = dict.fromkeys(rule.step_size for rule in rules if rule.recognised)
    hypers = set(recogniser.training.hyper)
    if len(sources) == 1 and (source := next(iter(sources))):
        probe = recogniser.probe
        if probe.is_constant(source):
            value = recogniser.trials[0].number(source)
            return LearningRate("", source, None if value is None else tidy(abs(value)), (), ())
        behind = probe.inputs_behind(source)
        name = _proportional(recogniser, source, [name for name in probe.inputs if name in behind & hypers])
        if source == name:
            return LearningRate(name, name, None, (), ())
        between = [x for x in probe.scalars_before([source]) if x in probe.producers]
        order = probe.index.position
        between.sort(key=lambda x: order[id(probe.producers[x])])
        follows = tuple(x for x in probe.inputs if x in behind and x not in hypers)
        return LearningRate(name, source, None, tuple(between), follows)
    common = _reaching_all(recogniser)
    return LearningRate(common[0], "", None, (), ()) if len(common) == 1 else None


def _proportional(recogniser: Recogniser, value: str, names: Sequence[str]) -> str:
    """The one of the inputs that the value is proportional to; '' when there is not exactly one."""
    found = []
    for name in names:
        given = spread(recogniser.probe.inputs, 0)
        before, doubled = (
            Scalars(recogniser.probe, given | {name: times * given[name]}).number(value) for times in (1, 2)
        )
        if doubled is not None and before and abs(doubled - 2 * before) <= 1e-9 * abs(before):
            found.append(name)
    return found[0] if len(found) == 1 else ""


def _reaching_all(recogniser: Recogniser) -> list[str]:
    """One-element hyper-parameter inputs that every parameter's new value depends on."""
    training, probe = recogniser.training, recogniser.probe
    wanted = [state.updated for state in training.parameters if state.tensor in training.gradients]
    found = []
    for name in training.hyper:
        if name not in probe.inputs:
            continue
        behind = {name}
        for node in training.graph.nodes:
            if any(operand in behind for operand in node.reads):
                behind.update(node.outputs)
        if wanted and all(output in behind for output in wanted):
            found.append(name)
    return found


def _finite_check(recogniser: Recogniser, predicates: dict[str, list[tuple[State, bool]]]) -> FiniteCheck | None:
    """The predicate on gradients that changes where one is infinite."""
    probe = recogniser.probe
    given = spread(probe.inputs, 0)
    runs = [Scalars(probe, given, reduced) for reduced in (0.0, float("inf"))]
    for condition, states in predicates.items():
        if condition in probe.owners.reduced:
            values = [each.number(condition) for each in runs]
            if None not in values and values[0] != values[1]:
                return FiniteCheck(condition, len(states))
    return None


def _loss_scale(
    recogniser: Recogniser, finite: FiniteCheck | None, predicates: dict[str, list[tuple[State, bool]]]
) -> LossScale | None:
    if not recogniser.paths.unscaled:
        return None
    name = next(iter(recogniser.paths.unscaled))
    probe, states = recogniser.probe, recogniser.training.state_of()
    if name not in states or states[name].updated == name:
        return LossScale(name, False, None, None, None)
    updated = states[name].updated
    if finite is None:
        return LossScale(name, True, None, None, None)
    good = next(flag for _, flag in predicates[finite.condition])
    interval, counter = _threshold(recogniser, updated)
    given = dict.fromkeys(probe.inputs, 1.0)
    backoff = Scalars(probe, given, pinned={finite.condition: not good}).number(updated)
    growth = None
    if interval is not None:
        given[counter] = 2 * interval
        growth = Scalars(probe, given, pinned={finite.condition: good}).number(updated)
    return LossScale(
        name, True, None if growth is None or growth <= 1 else tidy(growth),
        None if backoff is None or backoff >= 1 else tidy(backoff), interval,
    )  # fmt: skip


def _threshold(recogniser: Recogniser, value: str) -> tuple[float | None, str]:
    """The one constant that a counter is compared with before ``value``, and the counter's input."""
    probe = recogniser.probe
    found: dict[tuple[float, str], None] = {}
    for name in probe.scalars_before([value]):
        node = probe.producers.get(name)
        if node is None or not node.is_a(*COMPARISONS) or name in probe.owners.reduced:
            continue
        for place, operand in enumerate(node.inputs):
            number, counters = recogniser.trials[0].number(operand), probe.inputs_behind(node.inputs[1 - place])
            if probe.is_constant(operand) and number is not None and len(counters) == 1:
                found[tidy(number), next(iter(counters))] = None
    return next(iter(found)) if len(found) == 1 else (None, "")


def _accumulation(recogniser: Recogniser, predicates: dict[str, list[tuple[State, bool]]]) -> Accumulation | None:
    accumulators = sum(state.kind is StateKind.ACCUMULATOR for state in recogniser.training.states)
    if not accumulators:
        return None
    condition = next((name for name in predicates if name not in recogniser.probe.owners.reduced), "")
    every, _ = _threshold(recogniser, condition) if condition else (None, "")
    return Accumulation(condition, accumulators, every)
