"""Rules that divide the gradient by the root of a square state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gopt.offline.optimizer.fits import Fit, Hyper, find_root, read_all
from gopt.offline.optimizer.numpy_ops import Array
from gopt.offline.optimizer.sampler import Form, Sampler, close


@dataclass(frozen=True, slots=True)
class _Square:
    """The square state, the mean that is taken from it (0: none), the state of another form (0: none)."""

    v: int
    m: int
    other: int
    alpha: float
    decay: float

    def below(self, sampler: Sampler) -> Array:
        """Return the operand of the root at the random points."""
        mean = sampler.truth[self.m] if self.m else 0.0
        return np.asarray(sampler.truth[self.v] - np.square(mean))


def _square(forms: Sequence[Form]) -> _Square | None:
    """The states of an update; None where the mean is not made like the square."""
    place = {form.kind: i + 1 for i, form in enumerate(forms)}
    v, m = place["square"], place.get("mean", 0)
    square = forms[v - 1]
    if not square.keep:
        return None
    if m:
        mean = forms[m - 1]
        tied = close(mean.keep, square.keep) and abs(mean.decay - square.decay) <= 1e-6 * max(1.0, abs(mean.decay))
        if not tied or not close(mean.take, 1 - mean.keep, 1e-3):
            return None
    return _Square(v, m, place.get("other", 0), square.keep, square.decay)


def scaled(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """RMSProp, centred or not, and Adagrad: gradient / (root of the square state + eps)."""
    found = _square(forms)
    if found is None:
        return None
    w, q = found.decay, forms[found.v - 1].take
    means = {found.m: [0, 0, 0]} if found.m else {}
    new = read_all(sampler, forms, [1, 1, -w], [0, 0, 1], {found.v: [0, 1, 1], **means})
    if new is None:
        return None
    bare, full, kept = -float(new[0][0]), -float(new[0][1]), float(new[0][2])
    value, below = sampler.g + w * sampler.p, found.below(sampler)
    root = find_root(sampler, bare, full, lambda root: kept * sampler.p - root.size * value / root.of(below))
    named = _named(found, q)
    if root is None or named is None:
        return None
    kind, role, hyper = named
    roles = tuple(role if form.kind == "square" else "mean gradient" for form in forms)
    size, flipped = abs(root.size), bool(root.size < 0)
    return Fit(
        kind=kind, roles=roles, hyper=hyper, size=size, kept=kept, coupled=w, eps=root.eps, inside=root.inside,
        flipped=flipped,
    )  # fmt: skip


def _named(found: _Square, take: float) -> tuple[str, str, dict[str, Hyper]] | None:
    if found.alpha == 1 and close(take, 1.0) and not found.m:
        return "Adagrad", "sum of squares", {}
    if not close(take, 1 - found.alpha, 1e-3):
        return None
    hyper: dict[str, Hyper] = {"alpha": found.alpha}
    return "RMSProp", "second moment", hyper | ({"centered": True} if found.m else {})


def with_momentum(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """RMSProp whose steps are gathered in a buffer; the learning rate stands before the buffer, or inside it."""
    found = _square(forms)
    named = None if found is None else _named(found, forms[found.v - 1].take)
    if found is None or named is None or named[0] != "RMSProp":
        return None
    w, k = found.decay, found.other
    means = {found.m: [0, 0, 0, 0]} if found.m else {}
    # The buffer alone, the gradient alone over root 0, the same over root 1, the parameter alone.
    new = read_all(
        sampler, forms, [0, 1, 1, -w], [0, 0, 0, 1], {found.v: [1, 0, 1, 1], **means}, {k: [1, 0, 0, 0]}
    )  # fmt: skip
    if new is None:
        return None
    beta, bare, full = map(float, new[k][:3])
    kept, slope = float(new[0][3]), -float(new[0][0]) / beta if beta else 0.0
    value, below = sampler.g + w * sampler.p, found.below(sampler)
    root = find_root(
        sampler, bare, full, lambda root: beta * sampler.state(k) + root.size * value / root.of(below), k
    )  # fmt: skip
    if root is None or not slope or not sampler.explains(kept * sampler.p - slope * sampler.truth[k]):
        return None
    roles = {"square": "second moment", "mean": "mean gradient", "other": "momentum"}
    size = slope * root.size
    return Fit(
        kind="RMSProp", roles=tuple(roles[form.kind] for form in forms), hyper=named[2] | {"momentum": beta},
        size=abs(size), kept=kept, coupled=w, eps=root.eps, inside=root.inside, flipped=bool(size < 0),
    )  # fmt: skip


def adadelta(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """Steps of the size of earlier steps: root of their mean square / root of the gradients'."""
    found = _square(forms)
    if found is None or not close(forms[found.v - 1].take, 1 - found.alpha, 1e-3):
        return None
    w, k, rho = found.decay, found.other, found.alpha
    new = read_all(sampler, forms, [1, 1, -w], [0, 0, 1], {found.v: [0, 1, 1]}, {k: [0, 0, 0]})
    if new is None:
        return None
    size, kept = -float(new[0][0]), float(new[0][2])  # root eps / root eps = 1
    ratio = float(np.square(new[0][1] / size))
    if not size or not 0 < ratio < 1:
        return None
    eps = ratio / (1 - ratio)
    delta = np.sqrt((sampler.state(k) + eps) / (sampler.truth[found.v] + eps)) * (sampler.g + w * sampler.p)
    steps = rho * sampler.state(k) + forms[found.v - 1].take * np.square(delta)
    if not sampler.explains(kept * sampler.p - size * delta) or not sampler.explains(steps, k):
        return None
    roles = tuple("second moment" if form.kind == "square" else "second moment of the steps" for form in forms)
    return Fit(
        kind="Adadelta", roles=roles, hyper={"rho": rho}, size=abs(size), kept=kept, coupled=w, eps=eps, inside=True,
        flipped=bool(size < 0),
    )  # fmt: skip
