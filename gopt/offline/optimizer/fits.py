"""The coefficients of a rule, and the points at which they are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.offline.optimizer.numpy_ops import Array
from gopt.offline.optimizer.sampler import Form, Sampler

Hyper = float | bool | None
ABOUT = 2e-5
"""Relative tolerance between two stored constants such as 0.9 and 1 - 0.9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A rule's coefficients for one choice of the scalar inputs."""

    kind: str
    roles: tuple[str, ...] = ()
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    size: float
    kept: float = 1.0
    """Factor of the parameter when gradient and moments are 0."""
    coupled: float = 0.0
    eps: float = 0.0
    inside: bool = False
    first: float = 0.0
    second: float = 0.0
    trust: bool = False
    """The direction is scaled to the parameter's norm, and ``pull`` of the parameter is in it."""
    pull: float = 0.0
    flipped: bool = False
    """The step goes up the gradient."""
    direct: float = 0.0
    """Rules with two moments: factor of the gradient itself; that of the first moment is ``size``."""
    share: float = 0.0
    """Averages of the parameter: weight of the new value."""


def read_all(
    sampler: Sampler,
    forms: Sequence[Form],
    g: Sequence[float],
    p: Sequence[float],
    new: Mapping[int, Sequence[float]],
    old: Mapping[int, Sequence[float]] | None = None,
) -> list[Array] | None:
    """The new parameter and states where gradient and parameter are ``g`` and ``p``, and states, by place, become
    ``new`` or start from ``old``."""
    at = np.asarray(g, np.float64), np.asarray(p, np.float64)
    states = {f"s{place}": forms[place - 1].old(np.asarray(value), *at) for place, value in new.items()}
    states |= {f"s{place}": np.asarray(value, np.float64) for place, value in (old or {}).items()}
    return sampler.at(g=at[0], p=at[1], **states)


def read_off(
    sampler: Sampler, forms: Sequence[Form], g: Sequence[float], p: Sequence[float], new: Mapping[int, Sequence[float]]
) -> Array | None:
    """The new parameter alone."""
    found = read_all(sampler, forms, g, p, new)
    return None if found is None else found[0]


@dataclass(frozen=True, slots=True)
class Root:
    """A denominator: the root of a state, with epsilon inside it or beside it; ``size`` is what stands above it."""

    inside: bool
    eps: float
    size: float

    def of(self, square: Array) -> Array:
        return np.asarray(np.sqrt(square + self.eps) if self.inside else np.sqrt(square) + self.eps)


def find_root(sampler: Sampler, bare: float, full: float, made: Callable[[Root], Array], place: int = 0) -> Root | None:
    """The root with which ``made`` gives the new value at ``place``; ``bare``, ``full``: quotients by that of 0 and 1.

    Epsilon beside the root goes first.
    """
    ratio = bare / full if full else float("inf")
    if not np.isfinite(bare):
        roots = [Root(False, 0.0, full)]
    elif not np.isfinite(ratio) or ratio <= 1:
        roots = []
    else:
        beside, inside = 1 / (ratio - 1), 1 / (ratio**2 - 1)
        roots = [Root(False, beside, full * (1 + beside)), Root(True, inside, full * float(np.sqrt(1 + inside)))]
    return next((root for root in roots if sampler.explains(made(root), place)), None)
