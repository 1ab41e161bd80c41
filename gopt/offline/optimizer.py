"""Which rule updates a parameter, found by trying its update, and believed only when the rule reproduces it.

For each choice of the scalar inputs the coefficients of a rule are read off at a few chosen points; then the rule
must agree with the graph at random ones. A number is a hyper-parameter when it is the same for every choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.analysis.training import Kind, Phase, State, Training
from gopt.analysis.updates import Cone, Mode
from gopt.graph.model import Node
from gopt.graph.types import FLOATS
from gopt.offline.evaluate import Array, Cell, Scalars, Trial, spread

Hyper = float | bool | None
TRIALS = 3
_EXACT, _ABOUT = 1e-8, 2e-5
"""How well a rule must fit, and how well two stored constants such as 0.9 and 1 - 0.9 can."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A recognised update: its name, its constants (None: not found), what each state is, its step size."""

    name: str
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    step_size: str = ""
    """The scalar of the graph that is the learning rate after schedule; '' when none is."""
    recognised: bool = True


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition that lets a state keep its old value."""

    condition: str
    advances: bool
    """The value of the condition for which the state gets its new value."""


def ungated(trial: Trial, state: State) -> tuple[str, list[Gate]]:
    """The state's new value before the gates that may hold it back, and these gates."""
    name, gates = state.updated, []
    while (node := trial.producer.get(name)) is not None:
        if node.is_a("Identity"):
            name = node.inputs[0]
        elif node.is_a("Where") and state.tensor in node.inputs[1:] and _single(trial, node.inputs[0]):
            advances = node.inputs[2] == state.tensor
            gates.append(Gate(node.inputs[0], advances))
            name = node.inputs[1] if advances else node.inputs[2]
        else:
            break
    return name, gates


def _single(trial: Trial, name: str) -> bool:
    type = trial.graph.type_of(name)
    return type.static and type.elements == 1


class Recogniser:
    """Recognises the rules of one step, cone by cone; what the cones share is tried once."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.trial = Trial(training)
        self.trials = [Scalars(self.trial, spread(self.trial.inputs, seed)) for seed in range(TRIALS)]
        self._carries = self._carriers()
        self._readers = training.graph.readers()
        self._behind = self._behind_inputs()
        self._in_backward = {
            name for node, phase in zip(training.graph.nodes, training.phases) if phase is not Phase.UPDATE
            for name in node.reads if name in self.trial.inputs
        }  # fmt: skip
        self._hypers = set(training.hyper)
        self.unscaled: dict[str, None] = {}
        """Scalar inputs that gradients were found to be divided by: loss scales."""

    def _carriers(self) -> set[str]:
        """Floating full-shaped values that reach a new parameter or optimizer state, reductions aside."""
        training = self.training
        targets = {s.updated for s in training.states if s.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)}
        for node, phase in zip(reversed(training.graph.nodes), reversed(training.phases)):
            one = all(_single(self.trial, name) for name in node.outputs if name)
            if one and not all(_single(self.trial, name) for name in node.reads):
                continue
            if phase is Phase.UPDATE and any(name in targets for name in node.outputs):
                targets.update(name for name in node.inputs if training.graph.type_of(name).dtype in FLOATS)
        return targets

    def _behind_inputs(self) -> dict[str, frozenset[str]]:
        """Small value -> the scalar inputs that it depends on."""
        found = {name: frozenset([name]) for name in self.trial.inputs}
        for node in self.trial.small:
            sets = [found[name] for name in node.reads if name in found]
            if sets:
                union = sets[0] if all(each is sets[0] for each in sets) else frozenset().union(*sets)
                found.update(dict.fromkeys(node.outputs, union))
        return found

    def inputs_behind(self, name: str) -> frozenset[str]:
        """The scalar inputs that a small value depends on."""
        return self._behind.get(name, frozenset())

    def effective_gradient(self, parameter: str) -> str:
        """The gradient after casts, unscaling, accumulation and clipping: where the rule itself begins."""
        name = self.training.gradients[parameter]
        accumulators = {s.tensor for s in self.training.states if s.kind is Kind.ACCUMULATOR}
        averaging = False
        while True:
            onward = [n for n in self._readers.get(name, ()) if any(x in self._carries for x in n.outputs)]
            onward = [n for n in onward if self.trial.producer.get(n.outputs[0]) is n]
            if len(onward) != 1:
                return name
            node = onward[0]
            others = [x for x in node.inputs if x and x != name]
            if node.is_a("Add") and len(others) == 1 and others[0] in accumulators:
                averaging = True
            elif not node.is_a("Cast", "Identity") and not self._scaled(parameter, node, name, averaging):
                return name
            name = node.outputs[0]

    def _scaled(self, parameter: str, node: Node, name: str, averaging: bool) -> bool:
        """Whether a node multiplies the gradient by a scalar that is no part of the rule."""
        over = node.is_a("Div") and node.inputs[0] == name
        others = [x for x in node.inputs if x != name]
        if not (over or node.is_a("Mul")) or len(others) != 1:
            return False
        return self._scales(others[0], averaging or self._read_by_rule(parameter, node.outputs[0]))

    def _read_by_rule(self, parameter: str, name: str) -> bool:
        """Whether a scaled gradient is used more than once, or joined by weight decay: then its constant is a scale
        of the loss (the backward of a mean), and not, say, a dampening."""
        onward = [n for n in self._readers.get(name, ()) if any(x in self._carries for x in n.outputs)]
        if len(onward) != 1:
            return len(onward) > 1
        makers = [self.trial.producer.get(x) for x in onward[0].inputs if x != name]
        return onward[0].is_a("Add") and any(m is not None and m.is_a("Mul") and parameter in m.inputs for m in makers)

    def _scales(self, scalar: str, averaging: bool) -> bool:
        """Whether a scalar undoes the loss scale, clips, or averages what was accumulated: no learning rate."""
        if not _single(self.trial, scalar) or scalar in self.trial.wide:
            return False
        if self.trial.is_constant(scalar):
            return averaging
        if scalar in self.trial.owner:
            return all(_close(each.number(scalar), 1.0) for each in self.trials)
        behind = self.inputs_behind(scalar)
        if not behind or not behind <= self._in_backward:
            return False
        self.unscaled.update(dict.fromkeys(sorted(behind)))
        return True

    def rule(self, cone: Cone) -> Rule:
        """The rule of one cone."""
        states = [s for s in cone.states if s.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)]
        fallback = self._unknown(cone, len(states) - 1)
        gradient = self.effective_gradient(cone.parameter.tensor)
        cell = Cell(self.trial, gradient, {state.tensor: ungated(self.trial, state)[0] for state in states})
        floats = all(self.training.graph.type_of(s.tensor).dtype in FLOATS for s in states)
        if not floats or len(states) > 4 or not cell.nodes:
            return fallback
        fits: list[_Fit] = []
        for scalars in self.trials:
            fit = _fit(cell, scalars, len(states))
            if fit is None or (fits and fit.kind != fits[0].kind):
                return fallback
            fits.append(fit)
        return self._settle(cell, fits)

    def _unknown(self, cone: Cone, states: int) -> Rule:
        count = f"{states} state{'' if states == 1 else 's'}" if states else "no state"
        alike = cone.mode is not Mode.WHOLE and not cone.reductions
        return Rule(f"{'elementwise' if alike else 'non-elementwise'} update with {count}", recognised=False)

    # --- from the fits of all trials to hyper-parameters ------------------------------------------------------------

    def _settle(self, cell: Cell, fits: Sequence[_Fit]) -> Rule:
        """Hyper-parameters are what all trials agree on; bias correction is what makes them agree."""
        best: tuple[int, Rule] | None = None
        for correction in self._corrections(fits, self._inputs_of(cell)):
            rule, score = self._rule(cell, fits, correction)
            if best is None or score > best[0]:
                best = score, rule
        assert best is not None
        return best[1]

    def _inputs_of(self, cell: Cell) -> list[str]:
        names = {x for node in cell.nodes for name in node.inputs for x in self.inputs_behind(name)}
        return [name for name in self.trial.inputs if name in names]

    def _corrections(self, fits: Sequence[_Fit], known: Sequence[str]) -> list[_Correction]:
        """What the moments may be divided by: nothing, or 1 - beta^t for each scalar t that the update sees."""
        ones = [1.0] * len(fits)
        found = [_Correction(False, ones, ones)]
        for name in known if fits[0].first else ():
            for later in (0.0, 1.0):
                first, second = [], []
                for fit, scalars in zip(fits, self.trials):
                    t = (scalars.number(name) or 0.0) + later
                    first.append(1 - _stored(fit.first) ** t)
                    second.append(1 - _stored(fit.second) ** t if fit.second else 1.0)
                if all(value > 0 for value in (*first, *second)):
                    found += [_Correction(True, first, second), _Correction(True, first, second, late=True)]
        return found

    def _rule(self, cell: Cell, fits: Sequence[_Fit], correction: _Correction) -> tuple[Rule, int]:
        """The rule under one hypothesis, and how much of it that explains."""
        sizes = [correction.size(place, fit) for place, fit in enumerate(fits)]
        source, score = self._source(cell, sizes)
        kind, hyper = fits[0].kind, {key: _agreed([f.hyper[key] for f in fits]) for key in fits[0].hyper}
        if kind not in ("SGD", "momentum", "Lion"):
            hyper["eps"] = _agreed([correction.eps(place, fit) for place, fit in enumerate(fits)])
            score += 4 if hyper["eps"] is not None else 0
            if fits[0].inside:
                hyper["eps_inside_root"] = True
        decay, coupled = self._decay(fits, sizes, correction, bool(source))
        score += 1 if decay is not None else 0
        hyper["weight_decay"] = decay
        if decay and kind != "SGD":
            hyper["decoupled"] = not coupled
        if fits[0].first:
            hyper["bias_correction"] = correction.made if source else None
        if kind == "Adam" and decay and not coupled:
            kind = "AdamW"
        return Rule(kind, hyper, fits[0].roles, source), 2 * score + (correction.made and bool(source))

    def _source(self, cell: Cell, size: Sequence[float]) -> tuple[str, int]:
        """The scalar that is the step size in every trial, an input before a computed one."""
        names = dict.fromkeys(self._inputs_of(cell))
        names.update(dict.fromkeys(x for node in cell.nodes for x in self.scalars_before(node.inputs)))
        ranked = sorted(names, key=lambda name: (name not in self._hypers, name not in self.trial.inputs))
        for name in ranked:
            values = [scalars.number(name) for scalars in self.trials]
            if all(_close(value, s) for value, s in zip(values, size)):
                return name, 3 if name in self._hypers else 2 if self.trial.is_constant(name) else 1
        return "", 0

    def scalars_before(self, names: Sequence[str]) -> list[str]:
        """The small values that lead to these, constants included; nothing of full shape is crossed."""
        found: dict[str, None] = {}
        stack = [name for name in names if name and _single(self.trial, name)]
        while stack:
            name = stack.pop()
            if name in found or name in self.trial.wide or len(found) > 500:
                continue
            found[name] = None
            node = self.trial.producer.get(name)
            if node is not None and not any(x in self.trial.wide for x in node.reads):
                stack.extend(x for x in node.inputs if x)
        return list(found)

    def _decay(
        self, fits: Sequence[_Fit], sizes: Sequence[float], correction: _Correction, found: bool
    ) -> tuple[Hyper, bool]:
        """Weight decay and whether it is coupled (added to the gradient)."""
        if fits[0].trust:
            return _agreed([fit.pull / correction.gain(place) for place, fit in enumerate(fits)]), False
        coupled = [fit.coupled for fit in fits]
        lost = [1 - fit.kept for fit in fits]
        if any(not abs(value) <= 1e-12 for value in coupled):
            return (_agreed(coupled), True) if all(abs(value) < 1e-12 for value in lost) else (None, True)
        if all(abs(value) < 1e-12 for value in lost):
            return 0.0, False
        return (_agreed([value / size for value, size in zip(lost, sizes)]), False) if found else (None, False)


@dataclass(frozen=True, slots=True)
class _Correction:
    """A bias correction: what each trial divides its moments by; ``late``: epsilon joins the uncorrected root."""

    made: bool
    first: Sequence[float]
    second: Sequence[float]
    late: bool = False

    def gain(self, trial: int) -> float:
        """By how much the uncorrected direction, epsilon apart, is too small."""
        return self.first[trial] / float(np.sqrt(self.second[trial]))

    def size(self, trial: int, fit: _Fit) -> float:
        return fit.size if fit.trust else fit.size * self.gain(trial)

    def eps(self, trial: int, fit: _Fit) -> float:
        second = 1.0 if self.late else self.second[trial]
        return fit.eps / second if fit.inside else fit.eps / float(np.sqrt(second))


def _stored(beta: float) -> float:
    """0.1f in place of 1 - 0.9f makes a beta differ in the eighth digit from the 0.9f that a power is taken of."""
    return float(np.float32(tidy(beta)))


def tidy(value: float) -> float:
    """The number as it was written: six significant digits where they say the same."""
    short = float(f"{value:.6g}")
    shorter = float(f"{value:.3g}")
    return shorter if abs(shorter - value) <= 2e-6 * abs(value) else short


def _agreed(values: Sequence[float | bool | None]) -> Hyper:
    """The one value of all trials, or None."""
    first = values[0]
    if first is None or isinstance(first, bool):
        return first if all(value == first for value in values) else None
    if any(value is None or not np.isfinite(value) or not _close(value, first, _ABOUT) for value in values):
        return None
    return tidy(float(first))


def _close(value: float | None, other: float, tolerance: float = 1e-6) -> bool:
    return value is not None and bool(abs(value - other) <= tolerance * max(abs(value), abs(other)) + 1e-300)


# --- one trial ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A rule's coefficients for one choice of the scalar inputs."""

    kind: str
    roles: tuple[str, ...] = ()
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    size: float
    kept: float = 1.0
    """What remains of the parameter where gradient and moments are 0."""
    coupled: float = 0.0
    eps: float = 0.0
    inside: bool = False
    first: float = 0.0
    second: float = 0.0
    trust: bool = False
    """The direction is scaled to the parameter's norm, and ``pull`` of the parameter is in it."""
    pull: float = 0.0


@dataclass(frozen=True, slots=True)
class _Form:
    """A state's new value: ``mean`` b·s + q·(g + w·p), ``square`` b·s + q·(g + w·p)², ``peak`` max(b·s, |…| + e),
    ``maximum`` max(s, new value of the square state)."""

    kind: str
    keep: float
    take: float
    decay: float = 0.0
    eps: float = 0.0

    def new(self, s: Array, g: Array, p: Array) -> Array:
        value = g + self.decay * p
        if self.kind == "mean":
            return self.keep * s + self.take * value
        if self.kind == "square":
            return self.keep * s + self.take * value**2
        return np.maximum(self.keep * s, np.abs(value) + self.eps)


class _Probe:
    """Calls a cell on columns: gradient, parameter, then the states."""

    def __init__(self, cell: Cell, scalars: Scalars, count: int) -> None:
        self.cell, self.scalars, self.count = cell, scalars, count
        rng = np.random.default_rng(7)
        self.random = rng.normal(size=(count + 1, 16))
        self.random[2:, ::2] = np.abs(self.random[2:, ::2])
        self.random[2:, 1::2] = np.abs(self.random[2:, 1::2]) * 10.0 ** -np.arange(8.0)

    def __call__(self, g: Array, *states: Array) -> list[Array] | None:
        result = self.cell(self.scalars, g, states)
        return None if result is None else list(result.values())

    def at(self, **columns: Sequence[float] | Array) -> list[Array] | None:
        """New values at points; a column that is not named is 0."""
        length = len(next(iter(columns.values())))
        names = ["g", "p", "s1", "s2", "s3"][: self.count + 1]
        return self(*(np.asarray(columns.get(name, np.zeros(length)), np.float64) for name in names))


def _agree(value: Array, other: Array) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(value - other) <= _EXACT * (np.abs(value) + np.abs(other)) + 1e-13))


def _fit(cell: Cell, scalars: Scalars, count: int) -> _Fit | None:
    """The rule of ``count`` states (the parameter first) that agrees with the cell, or None."""
    probe = _Probe(cell, scalars, count)
    truth = probe(*probe.random)
    if truth is None or not all(np.isfinite(value).all() for value in truth):
        return None
    with np.errstate(all="ignore"):
        found: dict[int, _Form] = {}
        for place in (*range(1, count), *range(1, count)):  # twice: a maximum is known after what it is a maximum of
            form = found.get(place) or _form(probe, truth, place, found)
            if form is not None:
                found[place] = form
        if len(found) != count - 1:
            return None
        forms = [found[place] for place in sorted(found)]
        # Moments may come in any order; the rules want the mean first, then the square.
        kinds = tuple(sorted(form.kind for form in forms))
        rule = _RULES.get(kinds)
        for attempt in rule or ():
            fit = attempt(probe, truth, forms)
            if fit is not None:
                return fit
    return None


def _form(probe: _Probe, truth: list[Array], place: int, known: Mapping[int, _Form]) -> _Form | None:
    """What the state at ``place`` becomes, if it is one of the forms."""
    new = probe.at(**{f"s{place}": [0, 1, 0, 0, 0], "g": [0, 0, 1, 0, 2], "p": [0, 0, 0, 1, 0]})
    if new is None:
        return None
    nothing, keep, take, decay, double = map(float, new[place])
    g, p, s = probe.random[0], probe.random[1], probe.random[place + 1]
    forms = []
    if nothing == 0 and take and abs(double - 2 * take) < 1e-9 * abs(take):
        forms.append(_Form("mean", keep, take, decay / take))
    if nothing == 0 and take > 0 and decay >= 0 and abs(double - 4 * take) < 1e-9 * take:
        forms.append(_Form("square", keep, take, float(np.sqrt(decay / take))))
    forms.append(_Form("peak", keep, 1.0, decay - nothing, nothing))
    for form in forms:
        if _agree(form.new(s, g, p), truth[place]):
            return form
    squares = [other for other, form in known.items() if form.kind == "square"]
    if any(_agree(np.maximum(s, truth[other]), truth[place]) for other in squares):
        return _Form("maximum", 1.0, 0.0)
    return None


def _sgd(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    new = probe.at(g=[1, 0], p=[0, 1])
    if new is None:
        return None
    size, kept = -new[0][0], new[0][1]
    g, p = probe.random
    if not size or not _agree(kept * p - size * g, truth[0]):
        return None
    return _Fit(kind="SGD", size=size, kept=kept)


def _momentum(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    form = forms[0]
    b, q, w = form.keep, form.take, form.decay
    # new momentum 1, gradient and parameter 0; gradient 1, new momentum 0; parameter 1, the rest 0
    if not b:
        return None
    new = probe.at(g=[0, 1, -w], p=[0, 0, 1], s1=[1 / b, -q / b, 0])
    if new is None:
        return None
    slope, direct, kept = -new[0][0], -new[0][1], new[0][2]
    g, p, _ = probe.random
    value = g + w * p
    if not _agree(kept * p - slope * truth[1] - direct * value, truth[0]):
        return None
    total = slope * q
    nesterov = bool(abs(direct) > 1e-12)
    if nesterov and not _close(total / direct, b, _ABOUT):
        return None
    hyper: dict[str, Hyper] = {"momentum": b, "nesterov": nesterov}
    if slope < 0:  # the learning rate is folded into the buffer
        hyper["dampening"] = 0.0
        size = direct if nesterov else total
    else:
        # Any other factor of the gradient may as well be a scale of the loss.
        hyper["dampening"] = 0.0 if _close(q, 1.0) else b if _close(q, 1 - b, 1e-3) else None
        size = slope / b if nesterov else slope
    if hyper["dampening"] is None and w:
        w = float("nan")
    return _Fit(kind="momentum", roles=("momentum",), hyper=hyper, size=size, kept=kept, coupled=w)


def _lion(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    form = forms[0]
    w = form.decay
    new = probe.at(g=[0, -w], p=[0, 1], s1=[1, 0])
    if new is None or not new[0][0]:
        return None
    size, kept = -new[0][0], new[0][1]
    low, high = 1e-6, 1e6
    for _ in range(6):
        points = np.geomspace(low, high, 200)
        new = probe.at(g=-points, s1=np.ones(200))
        if new is None:
            return None
        flipped = np.flatnonzero(new[0] * size > 0)
        if not flipped.size or not flipped[0]:
            return None
        low, high = points[flipped[0] - 1], points[flipped[0]]
    ratio = float(np.sqrt(low * high))
    g, p, s = probe.random
    if not _agree(kept * p - size * np.sign(ratio * s + g + w * p), truth[0]):
        return None
    if not _close(form.take, 1 - form.keep, 1e-4):
        return None
    hyper = {"beta1": ratio / (1 + ratio), "beta2": form.keep}
    return _Fit(kind="Lion", roles=("momentum",), hyper=hyper, size=size, kept=kept, coupled=w)


def _scaled(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    """RMSProp and Adagrad: gradient / (root of the square state + eps)."""
    form = forms[0]
    b, q, w = form.keep, form.take, form.decay
    if not b:
        return None
    new = probe.at(g=[1, 1, -w], p=[0, 0, 1], s1=[-q / b, (1 - q) / b, 1 / b])
    if new is None:
        return None
    bare, full, kept = -new[0][0], -new[0][1], new[0][2]
    g, p, _ = probe.random
    for inside, eps, size in _epsilons(bare, full):
        if not _agree(kept * p - size * (g + w * p) / _root(truth[1], eps, inside), truth[0]):
            continue
        if b == 1 and _close(q, 1.0):
            return _Fit(
                kind="Adagrad", roles=("sum of squares",), size=size, kept=kept, coupled=w, eps=eps, inside=inside
            )
        if _close(q, 1 - b, 1e-3):
            return _Fit(
                kind="RMSProp", roles=("second moment",), hyper={"alpha": b}, size=size, kept=kept, coupled=w,
                eps=eps, inside=inside,
            )  # fmt: skip
    return None


def _epsilons(bare: float, full: float) -> list[tuple[bool, float, float]]:
    """Epsilon and numerator from the quotient by the roots of 0 and of 1; outside the root, then inside."""
    if not np.isfinite(bare):
        return [(False, 0.0, full)]
    ratio = bare / full
    if not np.isfinite(ratio) or ratio <= 1:
        return []
    outside, inside = 1 / (ratio - 1), 1 / (ratio**2 - 1)
    return [(False, outside, full * (1 + outside)), (True, inside, full * float(np.sqrt(1 + inside)))]


def _root(square: Array, eps: float, inside: bool) -> Array:
    return np.asarray(np.sqrt(square + eps) if inside else np.sqrt(square) + eps)


def _moments(forms: Sequence[_Form]) -> tuple[int, int, int] | None:
    """Places of the mean, the square or peak, and the maximum (0: none); None where betas and decay disagree."""
    place = {form.kind: i + 1 for i, form in enumerate(forms)}
    mean, second = forms[place["mean"] - 1], forms[place.get("square", place.get("peak", 0)) - 1]
    tied = _close(mean.decay, second.decay, 1e-6) or abs(mean.decay - second.decay) < 1e-12
    if not tied or not mean.keep or not second.keep or not _close(mean.take, 1 - mean.keep, 1e-4):
        return None
    if second.kind == "square" and abs(second.take - (1 - second.keep)) > 1e-3 * second.take:
        return None
    return place["mean"], place.get("square", place.get("peak", 0)), place.get("maximum", 0)


_ROLES = {"mean": "first moment", "square": "second moment", "peak": "infinity norm", "maximum": "maximum of it"}


def _roles(forms: Sequence[_Form]) -> tuple[str, ...]:
    return tuple(_ROLES[form.kind] for form in forms)


def _adam(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    places = _moments(forms)
    if places is None:
        return None
    m, v, top = places
    first, second = forms[m - 1], forms[v - 1]
    w = first.decay
    # new first moment 1 over root 0, the same over root 1, gradient alone over root 1, parameter alone
    columns: dict[str, Sequence[float]] = {
        "g": [0, 0, 1, -w], "p": [0, 0, 0, 1],
        f"s{m}": [1 / first.keep, 1 / first.keep, -first.take / first.keep, 0],
        f"s{v}": [0, 1 / second.keep, (1 - second.take) / second.keep, 1 / second.keep],
    }  # fmt: skip
    if top:
        columns[f"s{top}"] = [0, 0, 0, 0]
    new = probe.at(**columns)
    if new is None:
        return None
    bare, full, direct, kept = -new[0][0], -new[0][1], -new[0][2], new[0][3]
    g, p = probe.random[0], probe.random[1]
    for inside, eps, size in _epsilons(bare, full):
        gain = direct * size / full
        step = (size * truth[m] + gain * (g + w * p)) / _root(truth[top or v], eps, inside)
        if not _agree(kept * p - step, truth[0]):
            continue
        hyper: dict[str, Hyper] = {"beta1": first.keep, "beta2": second.keep}
        if top:
            hyper["amsgrad"] = True
        nadam = bool(abs(gain) > 1e-12)
        return _Fit(
            kind="NAdam" if nadam else "Adam", roles=_roles(forms), hyper=hyper, size=size, kept=kept,
            coupled=w, eps=eps, inside=inside, first=first.keep, second=second.keep,
        )  # fmt: skip
    return None


def _adamax(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    places = _moments(forms)
    if places is None:
        return None
    m, u, _ = places
    first, peak = forms[m - 1], forms[u - 1]
    w = first.decay
    columns: dict[str, Sequence[float]] = {
        "g": [0, 0, -w], "p": [0, 0, 1], f"s{m}": [1 / first.keep, 1 / first.keep, 0],
        f"s{u}": [0, 1 / peak.keep, 1 / peak.keep],
    }  # fmt: skip
    new = probe.at(**columns)
    if new is None:
        return None
    bare, full, kept = -new[0][0], -new[0][1], new[0][2]
    ratio = bare / full
    outer = 0.0 if not np.isfinite(ratio) else (1 - ratio * peak.eps) / (ratio - 1)
    outer = 0.0 if abs(outer) < 1e-14 else outer
    size = full * (1 + outer)
    if not _agree(kept * probe.random[1] - size * truth[m] / (truth[u] + outer), truth[0]):
        return None
    return _Fit(
        kind="Adamax", roles=_roles(forms), hyper={"beta1": first.keep, "beta2": peak.keep}, size=size, kept=kept,
        coupled=w, eps=peak.eps or outer, first=first.keep,
    )  # fmt: skip


def _lamb(probe: _Probe, truth: list[Array], forms: Sequence[_Form]) -> _Fit | None:
    """Adam's direction plus decay, scaled by |parameter| / |direction|."""
    places = _moments(forms)
    if places is None or places[2] or forms[places[0] - 1].decay:
        return None
    m, v, _ = places
    first, second = forms[m - 1], forms[v - 1]
    columns: dict[str, Sequence[float]] = {
        "p": [1, 0, 0], "g": [0, 0, 0], f"s{m}": [0, 1 / first.keep, 1 / first.keep],
        f"s{v}": [1 / second.keep, 0, 1 / second.keep],
    }  # fmt: skip
    new = probe.at(**columns)
    if new is None:
        return None
    decay, bare, full = np.asarray(columns["p"]) - new[0]
    size = float(np.sqrt(decay**2 + bare**2 + full**2))
    for inside, eps, gain in _epsilons(bare, full):
        p = probe.random[1]
        direction = truth[m] / _root(truth[v], eps, inside) + decay / gain * p
        step = size * np.linalg.norm(p) * direction / np.linalg.norm(direction)
        if not gain or not _agree(p - step, truth[0]):
            continue
        # The scale of the direction drops out: decay stands to the moments as (bias correction) to 1.
        return _Fit(
            kind="LAMB", roles=_roles(forms), hyper={"beta1": first.keep, "beta2": second.keep}, size=size,
            eps=eps, inside=inside, first=first.keep, second=second.keep, trust=True, pull=decay / gain,
        )  # fmt: skip
    return None


_RULES: Mapping[tuple[str, ...], Sequence[Callable[[_Probe, list[Array], Sequence[_Form]], _Fit | None]]] = {
    (): (_sgd,),
    ("mean",): (_momentum, _lion),
    ("square",): (_scaled,),
    ("mean", "square"): (_adam, _lamb),
    ("maximum", "mean", "square"): (_adam,),
    ("mean", "peak"): (_adamax,),
}
