"""Finds the values that ranks must average to compute the step of one large batch: statistics and their cotangents.

Replace every value in which samples are reduced by its mean over the ranks, in forward and backward. Then a rank
computes its part of the step of one large batch: the transpose of a mean over ranks is a mean over ranks, so the
backward needs the same treatment as the forward and nothing else. This requires that a mean is correct for each of
these forward values: a bare sum that single samples read grows with the batch, and a maximum is not a mean. Only values
that single samples, statistics or products with other reduced values read must be averaged; gradients are averaged as
usual.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import REDUCED, CouplingKind, Relation
from gopt.analysis.coupling.propagate import propagate
from gopt.analysis.coupling.sample_counts import corrects_variance
from gopt.analysis.coupling.samples_axis import UNFOLLOWED, begun
from gopt.analysis.coupling.statistics import statistic_rules
from gopt.analysis.synchronised_values import CorrectedConstant, SynchronisedValues
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.node_kinds import record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS
from gopt.operators.table import operator

MAX_ITERATIONS = 8
LINEAR = (None, Relation.SUM, Relation.MEAN)
"""Relations for which a mean over ranks gives the correct gradient; None: equal on all ranks already."""
_OTHERS = "--statistics mean, root and local take the batch of each rank by itself"


def synchronise(training: TrainingGraph, ranks: int) -> SynchronisedValues:
    """The values to average; raises UnsupportedError where that would not give the step of one large batch."""
    nodes = _nodes(training)
    first = begun(training)
    propagate(first, nodes)
    _refuse(first, UNFOLLOWED)
    wanted = {**first.fed, **_statistics(training, first)}
    _sound(training, first, nodes, wanted)
    points = _points(first, wanted)
    for _ in range(MAX_ITERATIONS):
        second = begun(training)
        second.shared = set(points)
        propagate(second, nodes)
        odd = [name for name in training.gradients.values() if _kind(second, name) not in LINEAR]
        more = [name for name in _points(first, odd) if name not in points]
        if not more:
            break
        points += more
    _refuse(second, tuple(CouplingKind))
    for name in odd:
        raise UnsupportedError(
            f"--statistics sync: gradient {name!r} is not a sum over samples, and cannot be averaged",
            _OTHERS,
        )
    _refuse_counts(training, first)
    local = next((s for s in training.states if s.kind is StateKind.STATISTIC and s.updated in second.marks), None)
    if local is not None:
        raise UnsupportedError(f"--statistics sync: statistic {local.tensor!r} follows single samples", _OTHERS)
    return SynchronisedValues(tuple(points), tuple(_corrected(training, first, ranks)))


def _refuse_counts(training: TrainingGraph, context: CouplingContext) -> None:
    """Raise UnsupportedError for a statistic with numbers of samples in it: its means over ranks are not all of it."""
    rules = statistic_rules(context, training)
    for name, reduction in rules.known.items():
        if any(point.value not in context.marks for point in reduction.points):
            raise UnsupportedError(f"--statistics sync: the statistic {name!r} counts samples", _OTHERS)
    for name, why in rules.unclear.items():
        if why.literal:
            raise UnsupportedError(f"--statistics sync: statistic {name!r}: {why.reason}", _OTHERS)


def _nodes(training: TrainingGraph) -> list[Node]:
    """The nodes that compute loss, gradients and statistics, in order."""
    kept = [state.updated for state in training.states if state.kind is StateKind.STATISTIC]
    stops = set(training.gradients.values())
    needed = ancestors(GraphIndex(training.graph), [*training.losses, *stops, *kept])[0]
    return [node for node in training.graph.nodes if id(node) in needed]


def _kind(context: CouplingContext, name: str) -> Relation | None:
    mark = context.marks.get(name)
    return None if mark is None else mark.kind


def _statistics(training: TrainingGraph, context: CouplingContext) -> dict[str, Node]:
    """Return the new statistics that depend on reduced values, with the nodes that compute them."""
    names = [state.updated for state in training.states if state.kind is StateKind.STATISTIC]
    return {name: context.index.producers[name] for name in names if _kind(context, name) in REDUCED}


def _refuse(context: CouplingContext, kinds: Collection[CouplingKind]) -> None:
    fact = next((each for each in context.found if each.kind in kinds), None)
    if fact is not None:
        whole = operator(fact.operator).running and f"write {fact.operator} as operators with means of their own, as "
        hints = [f"{whole}gopt export and gopt derive do"] if whole else [fact.exact]
        raise UnsupportedError(
            f"--statistics sync cannot give the step of one large batch: {fact.what}", *filter(None, hints), _OTHERS
        )


def _sound(training: TrainingGraph, context: CouplingContext, nodes: list[Node], wanted: dict[str, Node]) -> None:
    """Refuse what grows with the batch where the forward, the statistics or the loss read it."""
    read = {
        name for node in nodes if node.phase is Phase.FORWARD and _single(context, node)
        for name in node.inputs if name in context.fed
    }  # fmt: skip
    for name in sorted({*read, *training.losses, *(wanted.keys() - context.fed.keys())}):
        mark = context.marks.get(name)
        if mark is not None and not mark.sound:
            what = f"the loss {name!r}" if name in training.losses else repr(name)
            raise UnsupportedError(
                f"--statistics sync cannot give the step of one large batch: {what} is made of sums or maxima over "
                "samples that no count divides, or of a count with a lower bound",
                "write statistics as means over the batch (ReduceMean, or ReduceSum divided by its number)",
            )


def _single(context: CouplingContext, node: Node) -> bool:
    """Return whether a node makes values of single samples."""
    return any(_kind(context, name) is Relation.SAMPLES for name in node.outputs)


def _points(context: CouplingContext, names: Iterable[str]) -> list[str]:
    """The values to average so that ``names`` are alike on all ranks: origins, or behind them the first floats."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    stack = sorted(names)
    while stack:
        name = stack.pop()
        if name in seen or _kind(context, name) not in REDUCED:
            continue
        seen.add(name)
        node = context.index.producers[name]
        cast = node.is_in(CASTS) and context.index.graph.type_of(node.inputs[0]).dtype not in FLOATS
        if name in context.origins or cast:
            if context.index.graph.type_of(name).dtype not in FLOATS:
                raise UnsupportedError(
                    f"--statistics sync: {name!r} counts samples in integers and is never cast",
                    "cast the count to a floating type before it is used",
                )
            found[name] = None
        else:
            stack.extend(node.reads)
    return [name for node in context.index.graph.nodes for name in node.outputs if name in found]


def _corrected(training: TrainingGraph, context: CouplingContext, ranks: int) -> Iterable[CorrectedConstant]:
    """Factors n / (n - 1) of unbiased variances, n being the number of elements that were reduced."""
    for node in training.graph.nodes:
        if node.phase is Phase.FORWARD or not record_of(node).multiplies:
            continue
        for name, constant in (node.inputs, node.inputs[::-1]):
            mark, value = context.marks.get(name), context.scalar(constant)
            if mark is None or mark.kind is not Relation.MEAN or not value:
                continue
            if corrects_variance(value, mark.count):
                whole = mark.count * ranks
                yield CorrectedConstant(node.outputs[0], constant, whole / (whole - 1))
