"""Rules without a root: gradient descent, momentum, and steps of given sizes along signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gopt.offline.optimizer.fits import ABOUT, Fit, Hyper, read_off
from gopt.offline.optimizer.sampler import Form, Sampler, close


def sgd(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    new = read_off(sampler, forms, [1, 0], [0, 1], {})
    if new is None:
        return None
    size, kept = -new[0], new[1]
    if not size or not sampler.explains(kept * sampler.p - size * sampler.g):
        return None
    return Fit(kind="SGD", size=abs(size), kept=kept, flipped=bool(size < 0))


def momentum(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    b, q, w = forms[0].keep, forms[0].take, forms[0].decay
    if not b:
        return None
    new = read_off(sampler, forms, [0, 1, -w], [0, 0, 1], {1: [1, 0, 0]})
    if new is None:
        return None
    slope, direct, kept = -new[0], -new[1], new[2]
    if not sampler.explains(kept * sampler.p - slope * sampler.truth[1] - direct * (sampler.g + w * sampler.p)):
        return None
    total = slope * q
    nesterov = bool(abs(direct) > 1e-12)
    if nesterov and not close(total / direct, b, ABOUT):
        return None
    hyper: dict[str, Hyper] = {"momentum": b, "nesterov": nesterov}
    flipped = bool(total < 0)
    if slope < 0 and not flipped:  # the learning rate is folded into the buffer
        hyper["dampening"] = 0.0
        size = direct if nesterov else total
    else:
        # Any other factor of the gradient may as well be a scale of the loss.
        averaged = not nesterov and close(abs(q), 1 - b, 1e-3)
        hyper["dampening"] = 0.0 if close(abs(q), 1.0) else b if averaged else None
        size = abs(slope / b if nesterov else slope)
    if hyper["dampening"] is None and w:
        w = float("nan")
    return Fit(kind="momentum", roles=("momentum",), hyper=hyper, size=size, kept=kept, coupled=w, flipped=flipped)


def lion(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    form, w = forms[0], forms[0].decay
    new = sampler.at(g=[0, -w], p=[0, 1], s1=[1, 0])
    if new is None or not new[0][0]:
        return None
    size, kept = -new[0][0], new[0][1]
    low, high = 1e-6, 1e6
    for _ in range(6):
        points = np.geomspace(low, high, 200)
        new = sampler.at(g=-points, s1=np.ones(200))
        if new is None:
            return None
        flipped = np.flatnonzero(new[0] * size > 0)
        if not flipped.size or not flipped[0]:
            return None
        low, high = points[flipped[0] - 1], points[flipped[0]]
    ratio = float(np.sqrt(low * high))
    if not sampler.explains(kept * sampler.p - size * np.sign(ratio * sampler.state(1) + sampler.g + w * sampler.p)):
        return None
    if not close(form.take, 1 - form.keep, 1e-4):
        return None
    hyper = {"beta1": ratio / (1 + ratio), "beta2": form.keep}
    return Fit(kind="Lion", roles=("momentum",), hyper=hyper, size=size, kept=kept, coupled=w)


def rprop(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """A step size for each element, which grows while the gradient keeps its sign and shrinks where it turns."""
    for prev, size in ((1, 2), (2, 1)):
        ends = sampler.at(g=[0, 0], **{f"s{size}": [0.0, 1e30]})
        if ends is None or not 0 < ends[size][0] < ends[size][1]:
            continue
        least, most = map(float, ends[size])
        middle = float(np.sqrt(least * min(most, 1e6)))
        new = sampler.at(g=[1, 1], **{f"s{prev}": [1.0, -1.0], f"s{size}": [middle, middle]})
        if new is None:
            continue
        plus, minus = float(new[size][0] / middle), float(new[size][1] / middle)
        if not 0 < minus < 1 < plus or not least < middle * minus < middle * plus < most:
            continue
        turn = np.sign(sampler.g * sampler.state(prev))
        steps = sampler.state(size) * np.where(turn > 0, plus, np.where(turn < 0, minus, 1.0))
        steps, kept = np.clip(steps, least, most), np.where(turn < 0, 0.0, sampler.g)
        good = sampler.explains(sampler.p - np.sign(kept) * steps)
        if good and sampler.explains(kept, prev) and sampler.explains(steps, size):
            hyper: dict[str, Hyper] = {"etaminus": minus, "etaplus": plus, "step_size_min": least}
            hyper["step_size_max"] = most if most < 1e30 else None
            roles = ("last gradient", "step sizes") if prev == 1 else ("step sizes", "last gradient")
            return Fit(kind="Rprop", roles=roles, hyper=hyper, size=0.0)
    return None


def asgd(sampler: Sampler, forms: Sequence[Form]) -> Fit | None:
    """Gradient descent beside a running average of the parameter."""
    found = sgd(sampler, ())
    new = sampler.at(g=[0], s1=[1])
    if found is None or new is None:
        return None
    share = 1 - float(new[1][0])
    if not sampler.explains(sampler.state(1) + share * (sampler.truth[0] - sampler.state(1)), 1):
        return None
    return replace(found, kind="ASGD", roles=("average of the parameter",), share=share)
