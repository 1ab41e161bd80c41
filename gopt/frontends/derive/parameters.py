"""Chooses the trained constants of a forward model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from gopt.autodiff.operators import bodies, constants_in
from gopt.errors import OptionError
from gopt.frontends.derive.forward_model import ForwardModel
from gopt.ir.nodes import nested
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS
from gopt.operators.table import operator
from gopt.text.sanitize import listed, show

MASK = 1e4
"""A constant with an element of this size or above is a mask, such as -10000 in front of a softmax."""
_FEW = 8
"""Elements below which equal values may be chance."""


@dataclass(frozen=True, slots=True)
class TrainedConstants:
    """The trained constants. ``trained``: names in the order of the file. ``asked``: names by pattern of
    ``--trainable``. ``notes``: remarks for the user."""

    trained: tuple[str, ...]
    asked: tuple[frozenset[str], ...]
    notes: tuple[str, ...]


def choose(forward: ForwardModel, trainable: Sequence[str], freeze: Sequence[str]) -> TrainedConstants:
    """Choose parameters: floating-point constants without running statistics, scalars and masks, or constants matching
    patterns.

    ``trainable``: only matching constants are trained. ``freeze``: matching constants are not. Raises OptionError for a
    pattern without match, and without any parameter.
    """
    weights = forward.weights
    floats = [name for name, tensor in weights.items() if tensor.type.dtype in FLOATS]
    statistics, excluded = running_statistics(forward), _no_weights(forward)
    patterns = _matching(floats, trainable, "--trainable", statistics)
    requested = frozenset[str]().union(*patterns)
    frozen = frozenset[str]().union(*_matching(floats, freeze, "--freeze"))
    notes, trained = [], []
    masks = []
    for name in floats:
        if name in frozen or name in statistics or (requested and name not in requested):
            continue
        tensor = weights[name]
        if name not in requested and (not tensor.type.shape or not tensor.type.elements or name in excluded):
            continue
        if name not in requested and forward.values and _is_mask(tensor):
            masks.append(name)
            continue
        trained.append(name)
    if masks:
        notes.append(f"not trained, for they look like masks: {_names(masks)} (--trainable NAME trains one)")
    single = [name for name in trained if weights[name].type.elements == 1 and name not in requested]
    if single:
        notes.append(f"of one element, and trained: {_names(single)} (--freeze what is a constant)")
    tied = _shared(forward, trained)
    if tied:
        notes.append(
            f"read by several operators, trained as one: {_names(tied)} (exporters also merge equal parameters)"
        )
    notes += [
        f"{show(one)} and {show(two)} hold equal values: if they are tied, export them as one parameter"
        for one, two in split_ties(forward, trained if forward.values else ())
    ]
    inner = _in_bodies(forward)
    if inner:
        notes.append(f"not trained, for they are in bodies of control flow: {_names(inner)}")
    if not trained:
        where = f", and {_names(inner)} in bodies of control flow cannot be trained" if inner else ""
        raise OptionError(
            f"nothing is left to train: no floating constant of one dimension or more matches the options{where}",
            "gopt inspect MODEL --text lists its constants",
        )
    return TrainedConstants(tuple(trained), tuple(patterns), tuple(notes))


def running_statistics(forward: ForwardModel) -> set[str]:
    """Means and variances a BatchNormalization reads."""
    nodes = nested(forward.model.graph.node)
    return {node.input[slot] for node in nodes for slot in operator(node.op_type).running}


def _in_bodies(forward: ForwardModel) -> list[str]:
    """Floating constants of several elements in the bodies of control flow."""
    constants = (constant for body in bodies(forward.model.graph.node) for constant in constants_in(body))
    return [name for name, kind in constants if kind.dtype in FLOATS and kind.elements > 1]


def _no_weights(forward: ForwardModel) -> set[str]:
    """Constants read by operators as operands that are never weights."""
    return {
        node.input[index]
        for node in nested(forward.model.graph.node)
        for index in operator(node.op_type).aside
        if index < len(node.input)
    }


def _shared(forward: ForwardModel, names: Sequence[str]) -> list[str]:
    """Constants several operators read."""
    counts = Counter(name for node in nested(forward.model.graph.node) for name in set(node.input))
    return [name for name in names if counts[name] > 1]


def split_ties(forward: ForwardModel, names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of constants that are equal, or transposes: an exporter with constant folding splits a tied weight so."""
    by_values: dict[object, str] = {}
    ties = []
    for name in names:
        kind = forward.stored[name].type
        value = np.asarray(forward.stored[name].numpy())
        low, high = value.min(initial=np.inf), value.max(initial=-np.inf)
        if kind.elements < _FEW or low == high:
            continue
        key = (kind.dtype, tuple(sorted(kind.dims)), float(low), float(high))
        twin = by_values.setdefault(key, name)
        if twin != name:
            twin_value = np.asarray(forward.stored[twin].numpy())
            if np.array_equal(twin_value, value) or (twin_value.ndim == 2 and np.array_equal(twin_value.T, value)):
                ties.append((twin, name))
    return ties


def _matching(
    names: Sequence[str], patterns: Sequence[str], option: str, statistics: Collection[str] = ()
) -> list[frozenset[str]]:
    """The names matching each pattern; raises OptionError for a pattern without match, or matching ``statistics``
    alone.

    A broader pattern, such as of a whole layer, passes over statistics.
    """
    matched: list[frozenset[str]] = []
    for pattern in patterns:
        match = frozenset(name for name in names if name == pattern or fnmatchcase(name, pattern))
        if not match:
            some = ", ".join(map(show, names[:4]))
            raise OptionError(f"{option} {show(pattern)} matches no floating constant", f"there are {some or 'none'}")
        trainable_names = match.difference(statistics)
        if not trainable_names:
            raise OptionError(
                f"{option}: {show(min(match))} is a running statistic of a BatchNormalization, which is not trained",
                "--batchnorm train updates it as PyTorch does",
            )
        matched.append(trainable_names)
    return matched


def _is_mask(tensor: Tensor) -> bool:
    value = np.asarray(tensor.numpy()).astype(np.float32, copy=False)
    return bool(value.size) and not bool(max(value.max(), -value.min()) < MASK)


def _names(names: Sequence[str]) -> str:
    return listed([*map(show, names)])
