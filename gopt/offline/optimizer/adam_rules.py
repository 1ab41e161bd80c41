"""Rules of two moments: a mean of gradients over the root, or the peak, of another state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gopt.offline.optimizer.fits import Fit, Hyper, Root, find_root, read_off
from gopt.offline.optimizer.numpy_ops import Array
from gopt.offline.optimizer.sampler import Form, Sampler, close

_ROLES = {"mean": "first moment", "square": "second moment", "peak": "infinity norm", "maximum": "maximum of it"}


@dataclass(frozen=True, slots=True)
class _Moments:
    """Indices of the mean, the square or peak, and the maximum of squares (0: there is none), with their forms."""

    m: int
    v: int
    top: int
    first: Form
    second: Form


def _moments(forms: Sequence[Form]) -> _Moments | None:
    """The two moments of an update; None where their betas or decays cannot be combined."""
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


def adam(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    found = _moments(forms)
    if found is None:
        return None
    w, m, v = found.first.decay, found.m, found.v
    # A first moment of 1 over root 0, the same over root 1, the gradient alone over root 1, the parameter alone.
    new = read_off(sampler, forms, [0, 0, 1, -w], [0, 0, 0, 1], {m: [1, 1, 0, 0], v: [0, 1, 1, 1]})
    if new is None:
        return None
    full, direct, kept = -new[1], -new[2], new[3]
    value, moment, square = sampler.g + w * sampler.p, sampler.truth[m], sampler.truth[found.top or v]

    def parameter(root: Root) -> Array:
        step = (root.size * moment + direct * root.size / full * value) / root.of(square)
        return np.asarray(kept * sampler.p - step)

    root = find_root(sampler, -new[0], full, parameter)
    if root is None:
        return None
    hyper: dict[str, Hyper] = {"beta1": found.first.keep, "beta2": found.second.keep}
    if found.top:
        hyper["amsgrad"] = True
    direct = float(direct * root.size / full)
    nadam = abs(direct) > 1e-12
    return Fit(
        kind="NAdam" if nadam else "Adam", roles=_roles(forms), hyper=hyper, size=root.size, kept=kept, coupled=w,
        eps=root.eps, inside=root.inside, first=found.first.keep, second=found.second.keep,
        direct=direct if nadam else 0.0,
    )  # fmt: skip


def unrectified(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """The first moment alone, while the second is only gathered: the first steps of RAdam."""
    found = _moments(forms)
    if found is None or not found.first.keep:
        return None
    w, m = found.first.decay, found.m
    new = read_off(sampler, forms, [0, -w], [0, 1], {m: [1, 0]})
    if new is None:
        return None
    size, kept = -float(new[0]), float(new[1])
    if not size or not sampler.explains(kept * sampler.p - size * sampler.truth[m]):
        return None
    return Fit(
        kind="unrectified", roles=_roles(forms), hyper={"beta1": found.first.keep, "beta2": found.second.keep},
        size=size, kept=kept, coupled=w, first=found.first.keep, second=found.second.keep,
    )  # fmt: skip


def adamax(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    found = _moments(forms)
    if found is None:
        return None
    w, m, u = found.first.decay, found.m, found.v
    new = read_off(sampler, forms, [0, 0, -w], [0, 0, 1], {m: [1, 1, 0], u: [0, 1, 1]})
    if new is None:
        return None
    bare, full, kept = -new[0], -new[1], new[2]
    ratio = bare / full
    outer = 0.0 if not np.isfinite(ratio) else (1 - ratio * found.second.eps) / (ratio - 1)
    outer = 0.0 if abs(outer) < 1e-14 else outer
    size = full * (1 + outer)
    if not sampler.explains(kept * sampler.p - size * sampler.truth[m] / (sampler.truth[u] + outer)):
        return None
    return Fit(
        kind="Adamax", roles=_roles(forms), hyper={"beta1": found.first.keep, "beta2": found.second.keep}, size=size,
        kept=kept, coupled=w, eps=found.second.eps or outer, first=found.first.keep,
    )  # fmt: skip


def lamb(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """Adam's direction plus decay, scaled by |parameter| / |direction|."""
    found = _moments(forms)
    if found is None or found.top or found.first.decay:
        return None
    m, v = found.m, found.v
    # Decay against the moments over root 1; then moments over root 0, which are far larger, against those over root 1.
    beside = read_off(sampler, forms, [0, 0], [1, 0], {m: [0, 1], v: [1, 1]})
    over = read_off(sampler, forms, [0, 0, 0], [0, 0, 1], {m: [1, 1, 0], v: [0, 1, 1]})
    if beside is None or over is None or not over[1]:
        return None
    decay, full = 1 - float(beside[0]), -float(beside[1])
    bare, size = full * float(over[0] / over[1]), float(np.hypot(decay, full))

    # The scale of the direction cancels: decay : moments = (bias correction) : 1.
    def parameter(root: Root) -> Array:
        direction = sampler.truth[m] / root.of(sampler.truth[v]) + decay / root.size * sampler.p
        return np.asarray(sampler.p - size * np.linalg.norm(sampler.p) * direction / np.linalg.norm(direction))

    root = find_root(sampler, bare, full, parameter)
    if root is None:
        return None
    return Fit(
        kind="LAMB", roles=_roles(forms), hyper={"beta1": found.first.keep, "beta2": found.second.keep}, size=size,
        eps=root.eps, inside=root.inside, first=found.first.keep, second=found.second.keep, trust=True,
        pull=decay / root.size,
    )  # fmt: skip
