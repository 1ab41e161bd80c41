"""Recognises the count by which a loss divides: of labels that are not ignored, or of what a mask keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np

from gopt.analysis.coupling.reduced import guarded
from gopt.analysis.isomorphism import ValueNumbers
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.node_kinds import record_of
from gopt.operators.kinds import MEANS, QUOTIENTS, RELAYS
from gopt.operators.operator import Slope

_MOST = 256
"""Values of a loss that are looked at."""


def counts_labels(index: GraphIndex, batch: Collection[str], value: str) -> bool:
    """Return whether a value is the number of samples whose label differs from one negative number, which is no class,
    as ``ignore_index`` of PyTorch is: every loss of labels has such a count, and usually no label to ignore.

    A sample of several labels is a sequence: those are padded, so that ranks' numbers differ as a rule.
    """
    count = _behind(index, value)
    if count is None or not record_of(count).sums:
        return False
    flags = _behind(index, count.inputs[0])
    equal = _behind(index, flags.inputs[0]) if flags is not None and flags.is_a("Not") else None
    if equal is None or record_of(equal).relation != "==":
        return False
    ignored = [index.constants.value(name) for name in equal.inputs]
    labels = [name for name, each in zip(equal.inputs, ignored) if each is None]
    negative = [each for each in ignored if each is not None and each.size == 1 and float(np.ravel(each)[0]) < 0]
    source = _source(index, labels[0]) if len(labels) == len(negative) == 1 else ""
    return source in batch and _one_each(index.graph.types[source].shape)


def drops_uncounted(index: GraphIndex, count: str) -> bool:
    """Return whether what a count divides has the count's mask as a factor, so that it is zero where the count is, or
    whether nothing keeps the count from zero."""
    total, divisor = _behind(index, count), guarded(index, count)
    if divisor == count or total is None or not total.is_in(MEANS):
        return divisor == count
    numbers = ValueNumbers(index.producers.get, lambda name: name, lambda name: _source(index, name))
    mask = numbers.of_value(total.inputs[0])
    quotients = [node for node in index.users.get(divisor, ()) if node.is_in(QUOTIENTS)]

    def following(name: str) -> Iterable[str]:
        node = index.producers.get(name)
        if node is None or numbers.of_value(name) == mask:
            return ()
        record = record_of(node)
        gates = record.choosers if record.elementwise else ()
        return [each for slot, each in enumerate(node.inputs) if record.slope(slot) is Slope.LINEAR or slot in gates]

    values = islice(walk([node.inputs[0] for node in quotients], following), _MOST)
    return any(numbers.of_value(name) == mask for name in values)


def _one_each(shape: tuple[int | str | None, ...] | None) -> bool:
    """Return whether a batch of this shape has one element for each sample."""
    return shape is not None and all(size == 1 for size in shape[1:])


def _behind(index: GraphIndex, name: str) -> Node | None:
    """The node that makes a value, behind casts and changes of its shape."""
    return index.producers.get(_source(index, name))


def _source(index: GraphIndex, name: str) -> str:
    """The value behind casts, parts and other shapes."""
    while (node := index.producers.get(name)) is not None and node.is_in(RELAYS):
        name = node.inputs[0]
    return name
