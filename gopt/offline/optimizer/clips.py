"""Clips of gradients: of each element, of each parameter's norm, of the norm of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gopt.offline.optimizer.evidence import tidy
from gopt.offline.optimizer.gradient_path import GradientPath, GradientPaths
from gopt.offline.optimizer.probe import Probe, Scalars, UpdateFunction, spread

_TRIALS = 3
_LARGE = (1e10, 1e14)


@dataclass(frozen=True, slots=True)
class Clip:
    """A bound on gradients.

    ``kind``: ``global norm``, ``norm of each parameter`` or ``value`` (each element). ``bound`` is the largest norm, or
    the largest magnitude of an element; None where it is not the same throughout, or no constant. ``norm_type``: ``2``,
    ``1``, ``inf``, '' where it could not be told. ``norm`` and ``coefficient`` are values of the graph, '' where there
    is none or, for clips of each parameter, the first one's. ``gradients`` of ``of`` are clipped.
    """

    kind: str
    bound: float | None
    norm_type: str
    norm: str
    coefficient: str
    gradients: int
    of: int


def find_clips(paths: GradientPaths, parameters: Sequence[str]) -> tuple[Clip, ...]:
    """The clips on the paths of these parameters' gradients."""
    ways = {name: paths.path(name) for name in parameters}
    count = len(ways)
    found: list[Clip] = []
    bounded = [_magnitude(path) for path in ways.values() if path.low is not None or path.high is not None]
    if bounded:
        found.append(Clip("value", bounded[0] if len({*bounded}) == 1 else None, "", "", "", len(bounded), count))
    norms = _Norms(paths.probe)
    ways_of: dict[tuple[str, ...], list[GradientPath]] = {}
    for path in ways.values():
        if path.factors:
            ways_of.setdefault(tuple(dict.fromkeys(path.factors)), []).append(path)
    shared: dict[tuple[frozenset[str], float | None, str], _Norm] = {}
    own: list[_Norm] = []
    for members in ways_of.values():
        norm = norms.of(members[0])
        if norm is not None and (len(norm.owners) > 1 or len(members) > 1 or count == 1):
            shared.setdefault((norm.owners, norm.bound, norm.type), norm)
        elif norm is not None:
            own.append(norm)
    for norm in shared.values():
        found.append(Clip("global norm", norm.bound, norm.type, norm.name, norm.coefficient, len(norm.owners), count))
    if own:
        bounds, types = {norm.bound for norm in own}, {norm.type for norm in own}
        found.append(
            Clip(
                "norm of each parameter", own[0].bound if len(bounds) == 1 else None, own[0].type if len(types) == 1
                else "", own[0].name, own[0].coefficient, len(own), count,
            )
        )  # fmt: skip
    return tuple(found)


def _magnitude(path: GradientPath) -> float | None:
    same = path.low is not None and path.high is not None and path.low == -path.high
    return tidy(path.high) if same and path.high is not None else None


@dataclass(frozen=True, slots=True)
class _Norm:
    name: str
    coefficient: str
    bound: float | None
    type: str
    owners: frozenset[str]


class _Norms:
    """Finds what gradients are clipped by: they are scaled by constant / norm once they are large."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        given = [spread(probe.inputs, seed) for seed in range(_TRIALS)]
        self.inactive = [Scalars(probe, each) for each in given]
        self.active = [[Scalars(probe, each, large) for large in _LARGE] for each in given]

    def of(self, path: GradientPath) -> _Norm | None:
        """The norm from which the factors of a path are computed, if they are a clip."""
        gains = self._gains(path)
        if gains is None:
            return None
        names, owners = self._behind(path.factors)
        masks = self._owner_masks(names)
        for name in names:
            if masks[name].bit_count() != len(owners):
                continue
            norms = [[each.number(name) for each in runs] for runs in self.active]
            if any(norm is None or not np.isfinite(norm) or norm <= 1 for row in norms for norm in row):
                continue
            products = [[gain * float(norm or 0) for gain, norm in zip(*rows)] for rows in zip(gains, norms)]
            if all(abs(row[0] - row[-1]) <= 1e-3 * row[-1] for row in products):
                ends = [row[-1] for row in products]
                constant = all(abs(end - ends[0]) <= 1e-6 * ends[0] for end in ends)
                coefficient = next((x for x in path.factors if self._is(x, gains)), "")
                bound = tidy(ends[0]) if constant else None
                return _Norm(name, coefficient, bound, self._type(name), owners)
        return None

    def _gains(self, path: GradientPath) -> list[list[float]] | None:
        """The factor by which the gradient shrinks when norms are large; None unless all gradients shrink by it."""
        update_fn = UpdateFunction(self.probe, [path.start], [path.end], self.probe.owners.reduced)
        gradient = np.array([1e-9])

        def scale(scalars: Scalars) -> float:
            result = update_fn(scalars, {path.start: gradient, **_zeros(update_fn, path.start)})
            return float("nan") if result is None else float(result[0][0]) / 1e-9

        with np.errstate(all="ignore"):
            found = [
                [abs(scale(each) / scale(still)) for each in runs] for runs, still in zip(self.active, self.inactive)
            ]
        return found if all(0 < gain < 1 for row in found for gain in row) else None

    def _is(self, name: str, gains: Sequence[Sequence[float]]) -> bool:
        values = [[each.number(name) for each in runs] for runs in self.active]
        return all(
            value is not None and abs(value - gain) <= 1e-9 * gain
            for rows in zip(values, gains) for value, gain in zip(*rows)
        )  # fmt: skip

    def _behind(self, factors: Sequence[str]) -> tuple[list[str], frozenset[str]]:
        """Small values that lead to the factors and come from reductions, in order, and whose values were reduced."""
        probe = self.probe
        stack, seen, owners = list(factors), {*factors}, set()
        while stack:
            node = probe.producers.get(stack.pop())
            for operand in () if node is None else node.reads:
                if operand in probe.owners.full:
                    owners.add(probe.owners.full[operand])
                elif operand not in seen and operand in probe.owners.reduced:
                    seen.add(operand)
                    stack.append(operand)
        order = sorted(seen, key=lambda value: probe.index.position[id(probe.producers[value])])
        return order, frozenset(owners)

    def _owner_masks(self, names: Sequence[str]) -> dict[str, int]:
        """Small values, in order -> whose values were reduced to them, a bit for each owner: a norm of thousands of
        gradients is a chain of as many sums."""
        probe = self.probe
        bits: dict[str, int] = {}
        masks: dict[str, int] = {}
        for name in names:
            mask = 0
            for operand in probe.producers[name].reads:
                if operand in probe.owners.full:
                    mask |= 1 << bits.setdefault(probe.owners.full[operand], len(bits))
                else:
                    mask |= masks.get(operand, 0)
            masks[name] = mask
        return masks

    def _type(self, name: str) -> str:
        """The type of the norm, from how it combines what each gradient was reduced to."""
        probe = self.probe
        leaves = [
            value for value in self._behind([name])[0]
            if any(operand in probe.owners.full for operand in probe.producers[value].reads)
        ]  # fmt: skip
        small, large = (Scalars(probe, spread(probe.inputs, 0), size) for size in (1e4, 4e4))
        values = np.array([small.number(leaf) or np.nan for leaf in leaves])
        first, second = small.number(name) or np.nan, large.number(name) or np.nan
        if abs(second / first - 2) < 1e-6 and abs(first - np.sqrt(values.sum())) <= 1e-6 * first:
            return "2"
        joined = {"2": np.sqrt(np.square(values).sum()), "inf": values.max(), "1": values.sum()}
        if abs(second / first - 4) > 1e-6:
            return ""
        found = [kind for kind, value in joined.items() if abs(value - first) <= 1e-6 * first]
        kinds = {self._kind(leaf) for leaf in leaves}
        return next((kind for kind in found if kinds == {kind}), "")

    def _kind(self, leaf: str) -> str:
        """Return the norm of one gradient that a reduction computes; '' if it cannot be determined."""
        node = self.probe.producers[leaf]
        if node.is_a("ReduceSum", "ReduceMax"):
            source = self.probe.producers.get(node.inputs[0])
            if source is None or not source.is_a("Abs"):
                return ""
        return {"ReduceL2": "2", "ReduceL1": "1", "ReduceSum": "1", "ReduceMax": "inf"}.get(node.op_type, "")


def _zeros(update_fn: UpdateFunction, start: str) -> dict[str, np.ndarray]:
    """Zeros for the states that the nodes read beside the gradient: sums of gradients."""
    made = {name for node in update_fn.nodes for name in node.outputs}
    wide = update_fn.probe.owners.full
    read = {name for node in update_fn.nodes for name in node.reads}
    return {name: np.zeros(1) for name in sorted(read - made - {start}) if name in wide}
