"""The rules of the optimizers: for each, its formula, and the points at which its coefficients can be read off.

A rule is believed only when its formula then gives the new parameter at random points as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.offline.optimizer.arithmetic import Array
from gopt.offline.optimizer.probe import Form, Probe, close, find_forms
from gopt.offline.optimizer.trial import Cell, Scalars

Hyper = float | bool | None
ABOUT = 2e-5
"""How well two stored constants such as 0.9 and 1 - 0.9 agree."""
_ROLES = {"mean": "first moment", "square": "second moment", "peak": "infinity norm", "maximum": "maximum of it"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
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


def fit(cell: Cell, scalars: Scalars, count: int) -> Fit | None:
    """The rule of ``count`` states (the parameter first) that agrees with the cell, or None."""
    probe = Probe(cell, scalars, count)
    if not probe.usable:
        return None
    with np.errstate(all="ignore"):
        forms = find_forms(probe)
        if forms is None:
            return None
        # Moments may come in any order.
        rules = _RULES.get(tuple(sorted(form.kind for form in forms)), ())
        fits = (rule(probe, forms) for rule in rules)
        return next((found for found in fits if found is not None), None)


def _read_off(
    probe: Probe, forms: Sequence[Form], g: Sequence[float], p: Sequence[float], new: Mapping[int, Sequence[float]]
) -> Array | None:
    """The new parameter where gradient and parameter are ``g`` and ``p``, and states become ``new``, by place."""
    at = np.asarray(g, np.float64), np.asarray(p, np.float64)
    states = {f"s{place}": forms[place - 1].old(np.asarray(value), *at) for place, value in new.items()}
    found = probe.at(g=at[0], p=at[1], **states)
    return None if found is None else found[0]


# --- rules without a root -------------------------------------------------------------------------------------------


def _sgd(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    new = _read_off(probe, forms, [1, 0], [0, 1], {})
    if new is None:
        return None
    size, kept = -new[0], new[1]
    if not size or not probe.explains(kept * probe.p - size * probe.g):
        return None
    return Fit(kind="SGD", size=size, kept=kept)


def _momentum(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    b, q, w = forms[0].keep, forms[0].take, forms[0].decay
    if not b:
        return None
    new = _read_off(probe, forms, [0, 1, -w], [0, 0, 1], {1: [1, 0, 0]})
    if new is None:
        return None
    slope, direct, kept = -new[0], -new[1], new[2]
    if not probe.explains(kept * probe.p - slope * probe.truth[1] - direct * (probe.g + w * probe.p)):
        return None
    total = slope * q
    nesterov = bool(abs(direct) > 1e-12)
    if nesterov and not close(total / direct, b, ABOUT):
        return None
    hyper: dict[str, Hyper] = {"momentum": b, "nesterov": nesterov}
    if slope < 0:  # the learning rate is folded into the buffer
        hyper["dampening"] = 0.0
        size = direct if nesterov else total
    else:
        # Any other factor of the gradient may as well be a scale of the loss.
        hyper["dampening"] = 0.0 if close(q, 1.0) else b if close(q, 1 - b, 1e-3) else None
        size = slope / b if nesterov else slope
    if hyper["dampening"] is None and w:
        w = float("nan")
    return Fit(kind="momentum", roles=("momentum",), hyper=hyper, size=size, kept=kept, coupled=w)


def _lion(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    form, w = forms[0], forms[0].decay
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
    if not probe.explains(kept * probe.p - size * np.sign(ratio * probe.state(1) + probe.g + w * probe.p)):
        return None
    if not close(form.take, 1 - form.keep, 1e-4):
        return None
    hyper = {"beta1": ratio / (1 + ratio), "beta2": form.keep}
    return Fit(kind="Lion", roles=("momentum",), hyper=hyper, size=size, kept=kept, coupled=w)


# --- rules that divide by the root of a square state ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Root:
    """A denominator: the root of a state, with epsilon inside it or beside it; ``size`` is what stands above it."""

    inside: bool
    eps: float
    size: float

    def of(self, square: Array) -> Array:
        return np.asarray(np.sqrt(square + self.eps) if self.inside else np.sqrt(square) + self.eps)


def _find_root(probe: Probe, bare: float, full: float, parameter: Callable[[_Root], Array]) -> _Root | None:
    """The root with which ``parameter`` gives the new parameter; ``bare``, ``full``: quotients by that of 0, and of 1.

    Epsilon beside the root goes first.
    """
    ratio = bare / full
    if not np.isfinite(bare):
        roots = [_Root(False, 0.0, full)]
    elif not np.isfinite(ratio) or ratio <= 1:
        roots = []
    else:
        beside, inside = 1 / (ratio - 1), 1 / (ratio**2 - 1)
        roots = [_Root(False, beside, full * (1 + beside)), _Root(True, inside, full * float(np.sqrt(1 + inside)))]
    return next((root for root in roots if probe.explains(parameter(root))), None)


def _scaled(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    """RMSProp and Adagrad: gradient / (root of the square state + eps)."""
    b, q, w = forms[0].keep, forms[0].take, forms[0].decay
    if not b:
        return None
    new = _read_off(probe, forms, [1, 1, -w], [0, 0, 1], {1: [0, 1, 1]})
    if new is None:
        return None
    kept, value = new[2], probe.g + w * probe.p
    root = _find_root(
        probe, -new[0], -new[1], lambda root: kept * probe.p - root.size * value / root.of(probe.truth[1])
    )
    if root is None:
        return None
    if b == 1 and close(q, 1.0):
        kind, role, hyper = "Adagrad", "sum of squares", {}
    elif close(q, 1 - b, 1e-3):
        kind, role, hyper = "RMSProp", "second moment", {"alpha": b}
    else:
        return None
    return Fit(
        kind=kind, roles=(role,), hyper=hyper, size=root.size, kept=kept, coupled=w, eps=root.eps, inside=root.inside
    )


# --- rules of two moments -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Moments:
    """Where the mean stands, the square or peak, and the maximum of squares (0: there is none), with their forms."""

    m: int
    v: int
    top: int
    first: Form
    second: Form


def _moments(forms: Sequence[Form]) -> _Moments | None:
    """The two moments of an update; None where their betas or decays do not go together."""
    place = {form.kind: i + 1 for i, form in enumerate(forms)}
    m, v = place["mean"], place.get("square", place.get("peak", 0))
    mean, second = forms[m - 1], forms[v - 1]
    tied = close(mean.decay, second.decay, 1e-6) or abs(mean.decay - second.decay) < 1e-12
    if not tied or not mean.keep or not second.keep or not close(mean.take, 1 - mean.keep, 1e-4):
        return None
    if second.kind == "square" and abs(second.take - (1 - second.keep)) > 1e-3 * second.take:
        return None
    return _Moments(m, v, place.get("maximum", 0), mean, second)


def _roles(forms: Sequence[Form]) -> tuple[str, ...]:
    return tuple(_ROLES[form.kind] for form in forms)


def _adam(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    found = _moments(forms)
    if found is None:
        return None
    w, m, v = found.first.decay, found.m, found.v
    # A first moment of 1 over root 0, the same over root 1, the gradient alone over root 1, the parameter alone.
    new = _read_off(probe, forms, [0, 0, 1, -w], [0, 0, 0, 1], {m: [1, 1, 0, 0], v: [0, 1, 1, 1]})
    if new is None:
        return None
    full, direct, kept = -new[1], -new[2], new[3]
    value, moment, square = probe.g + w * probe.p, probe.truth[m], probe.truth[found.top or v]

    def parameter(root: _Root) -> Array:
        step = (root.size * moment + direct * root.size / full * value) / root.of(square)
        return np.asarray(kept * probe.p - step)

    root = _find_root(probe, -new[0], full, parameter)
    if root is None:
        return None
    hyper: dict[str, Hyper] = {"beta1": found.first.keep, "beta2": found.second.keep}
    if found.top:
        hyper["amsgrad"] = True
    nadam = bool(abs(direct * root.size / full) > 1e-12)
    return Fit(
        kind="NAdam" if nadam else "Adam", roles=_roles(forms), hyper=hyper, size=root.size, kept=kept, coupled=w,
        eps=root.eps, inside=root.inside, first=found.first.keep, second=found.second.keep,
    )  # fmt: skip


def _adamax(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    found = _moments(forms)
    if found is None:
        return None
    w, m, u = found.first.decay, found.m, found.v
    new = _read_off(probe, forms, [0, 0, -w], [0, 0, 1], {m: [1, 1, 0], u: [0, 1, 1]})
    if new is None:
        return None
    bare, full, kept = -new[0], -new[1], new[2]
    ratio = bare / full
    outer = 0.0 if not np.isfinite(ratio) else (1 - ratio * found.second.eps) / (ratio - 1)
    outer = 0.0 if abs(outer) < 1e-14 else outer
    size = full * (1 + outer)
    if not probe.explains(kept * probe.p - size * probe.truth[m] / (probe.truth[u] + outer)):
        return None
    return Fit(
        kind="Adamax", roles=_roles(forms), hyper={"beta1": found.first.keep, "beta2": found.second.keep}, size=size,
        kept=kept, coupled=w, eps=found.second.eps or outer, first=found.first.keep,
    )  # fmt: skip


def _lamb(probe: Probe, forms: Sequence[Form]) -> Fit | None:
    """Adam's direction plus decay, scaled by |parameter| / |direction|."""
    found = _moments(forms)
    if found is None or found.top or found.first.decay:
        return None
    m, v = found.m, found.v
    p = [1.0, 0.0, 0.0]
    new = _read_off(probe, forms, [0, 0, 0], p, {m: [0, 1, 1], v: [1, 0, 1]})
    if new is None:
        return None
    decay, bare, full = np.asarray(p) - new
    size = float(np.sqrt(decay**2 + bare**2 + full**2))

    # The scale of the direction drops out: decay stands to the moments as (bias correction) to 1.
    def parameter(root: _Root) -> Array:
        direction = probe.truth[m] / root.of(probe.truth[v]) + decay / root.size * probe.p
        return np.asarray(probe.p - size * np.linalg.norm(probe.p) * direction / np.linalg.norm(direction))

    root = _find_root(probe, bare, full, parameter)
    if root is None:
        return None
    return Fit(
        kind="LAMB", roles=_roles(forms), hyper={"beta1": found.first.keep, "beta2": found.second.keep}, size=size,
        eps=root.eps, inside=root.inside, first=found.first.keep, second=found.second.keep, trust=True,
        pull=decay / root.size,
    )  # fmt: skip


_RULES: Mapping[tuple[str, ...], Sequence[Callable[[Probe, Sequence[Form]], Fit | None]]] = {
    (): (_sgd,),
    ("mean",): (_momentum, _lion),
    ("square",): (_scaled,),
    ("mean", "square"): (_adam, _lamb),
    ("maximum", "mean", "square"): (_adam,),
    ("mean", "peak"): (_adamax,),
}
