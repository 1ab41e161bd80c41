"""Clips of gradients: of each element, of each parameter's norm, of the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from gopt.ir.graph_index import walk
from gopt.ir.node_kinds import record_of
from gopt.offline.optimizer.evidence import tidy
from gopt.offline.optimizer.formulas import close
from gopt.offline.optimizer.gradient_path import GradientPath, GradientPaths
from gopt.offline.optimizer.probe import Array, Probe, UpdateFunction

T = TypeVar("T")
_TRIALS = 2
_LARGE = (1e10, 1e14)
_KINDS = {"l2": "2", "sum": "1", "max": "inf"}
"""Pieces of a reduction -> the norm of the operand."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A bound on gradients.

    ``kind``: ``global norm``, ``norm of each parameter`` or ``value`` (each element). ``bound`` is the largest norm, or
    the largest magnitude of an element; None for bounds that vary or are no constant. ``norm_type``: ``2``, ``1``,
    ``inf``, '' if unknown. ``norm`` and ``coefficient`` are values of the graph, '' if absent or, for clips of each
    parameter, of the first parameter. ``gradients`` of ``of`` are clipped."""

    kind: str
    bound: float | None
    norm_type: str
    norm: str
    coefficient: str
    gradients: int
    of: int


def find_clips(paths: GradientPaths, parameters: Sequence[str]) -> tuple[Clip, ...]:
    """The clips on the paths of these parameters' gradients."""
    ways = [paths.path(name) for name in parameters]
    clips, norms = list[Clip](), _Norms(paths.probe)
    bounds = [
        tidy(path.high) if path.high is not None and path.low == -path.high else None
        for path in ways if path.low is not None or path.high is not None
    ]  # fmt: skip
    if bounds:
        clips.append(Clip("value", _common(bounds, None), "", "", "", len(bounds), len(ways)))
    ways_of: dict[tuple[str, ...], list[GradientPath]] = {}
    for path in ways:
        ways_of.setdefault(tuple(dict.fromkeys(path.factors)), []).append(path)
    shared, separate = dict[tuple[int, float | None, str], Clip](), list[Clip]()
    for factors, members in ways_of.items():
        clip, owners = norms.clip(members[0], len(ways)) if factors else (None, 0)
        if clip is not None and (clip.gradients > 1 or len(members) > 1 or len(ways) == 1):
            shared.setdefault((owners, clip.bound, clip.norm_type), clip)
        elif clip is not None:
            separate.append(replace(clip, kind="norm of each parameter"))
    if separate:
        bound, kind = _common([x.bound for x in separate], None), _common([x.norm_type for x in separate], "")
        separate[0] = replace(separate[0], bound=bound, norm_type=kind, gradients=len(separate))
    return (*clips, *shared.values(), *separate[:1])


def _common(values: Sequence[T], default: T) -> T:
    """The common value of all."""
    return values[0] if all(value == values[0] for value in values) else default


class _Norms:
    """Finds the norms that clip gradients: large gradients are scaled by constant / norm."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._inactive = [probe.scalars(seed) for seed in range(_TRIALS)]
        self._active = [probe.scalars(seed, reduced=large) for large in _LARGE for seed in range(_TRIALS)]
        self._bits: dict[str, int] = {}

    def clip(self, path: GradientPath, count: int) -> tuple[Clip | None, int]:
        """The clip of the norm behind a path's factors, and a bit for each gradient in the norm."""
        gains = self._gains(path)
        if not ((gains > 0) & (gains < 1)).all():  # not all gradients shrink
            return None, 0
        masks = self._behind(path.factors)
        every = max(masks.values(), default=0)
        for name in (name for name, mask in masks.items() if mask == every):
            norms = self._values(name)
            small, large = (gains * norms).reshape(len(_LARGE), _TRIALS)
            if np.isfinite(norms).all() and (norms > 1).all() and (np.abs(small - large) <= 1e-3 * large).all():
                bound = tidy(float(large[0])) if (np.abs(large - large[0]) <= 1e-6 * large[0]).all() else None
                factor = next((x for x in path.factors if np.allclose(self._values(x), gains, 1e-9, 0)), "")
                owners = every.bit_count()
                return Clip("global norm", bound, self._type(name), name, factor, owners, count), every
        return None, 0

    def _values(self, name: str) -> Array:
        return np.array([scalars.number(name) for scalars in self._active])

    def _gains(self, path: GradientPath) -> Array:
        """The shrink factor of the gradient for large norms."""
        update_fn = UpdateFunction(self.probe, [path.start], [path.end], path.factors)
        computed = {name for node in update_fn.nodes for name in node.outputs}
        read = {name for node in update_fn.nodes for name in node.reads} - computed
        points = {name: np.zeros(1) for name in sorted(read) if name in self.probe.owners.full}  # sums of gradients
        points[path.start] = np.array([1e-9])
        runs = [update_fn(scalars, points) for scalars in (*self._active, *self._inactive)]
        values = np.array([np.nan if result is None else result[0][0] for result in runs])
        with np.errstate(all="ignore"):
            return np.asarray(np.abs(values[:-_TRIALS] / np.tile(values[-_TRIALS:], len(_LARGE))))

    def _behind(self, factors: Iterable[str]) -> dict[str, int]:
        """Small values, in order, that lead to the factors and come from reductions -> a bit for each reduced gradient;
        a norm of thousands of gradients is a chain of as many sums."""
        probe, reduced, full = self.probe, self.probe.owners.reduced, self.probe.owners.full

        def following(name: str) -> list[str]:
            return [operand for operand in probe.producers[name].reads if operand in reduced]

        masks: dict[str, int] = {}
        order = probe.index.position
        for name in sorted(walk(factors, following), key=lambda value: order[id(probe.producers[value])]):
            masks[name] = 0
            for operand in probe.producers[name].reads:
                owner = full.get(operand)
                bit = masks.get(operand, 0) if owner is None else 1 << self._bits.setdefault(owner, len(self._bits))
                masks[name] |= bit
        return masks

    def _type(self, name: str) -> str:
        """The type of the norm, from the combination of the reduced gradients."""
        producers, full, run = self.probe.producers, self.probe.owners.full, self._active[0]
        leaves = [x for x in self._behind([name]) if any(operand in full for operand in producers[x].reads)]
        norm, values = run.number(name), np.array([*map(run.number, leaves)])
        if close(norm, float(np.sqrt(values.sum()))):  # of sums of squares
            return "2"
        joined = {"2": np.sqrt(np.square(values).sum()), "inf": values.max(), "1": values.sum()}
        kinds = {self._kind(leaf) for leaf in leaves}
        return next((kind for kind, value in joined.items() if close(norm, float(value)) and kinds == {kind}), "")

    def _kind(self, leaf: str) -> str:
        """Return the norm of one gradient computed by a reduction; '' if unknown."""
        node = self.probe.producers[leaf]
        source = self.probe.producers.get(node.inputs[0])
        record = record_of(node)
        plain = (record.sums or record.pieces == "max") and (source is None or not source.is_a("Abs"))
        return "" if plain or record.power == 2 else _KINDS.get(record.pieces or "", "")
